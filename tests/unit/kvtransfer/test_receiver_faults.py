"""Clean transfers always commit, spoilt ones never: property tests over chunkings and faults."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer import ExpectedTransfer, KVReceiver
from kvtransfer.chunks import Extent
from kvtransfer.messages import Commit, Committed, Renew, Renewed, SenderMessage, TransferChunk
from kvtransfer.transports.base import Payload
from mesh.domain.errors import LayoutMismatch, MeshError, TransferCorrupt, TransferFailed
from mesh.domain.kv import KVLayout, Span
from tests.fakes.kv_store import FakeKVStore, with_axis
from tests.fakes.transfers import (
    FIRST_TOKEN,
    GRPC_ONLY,
    Conversation,
    Outcomes,
    make_chunk,
    make_commit,
    open_message,
)

NUM_BLOCKS = 12


@dataclass
class Case:
    """An honest transfer between two stores of random content."""

    source: FakeKVStore
    target: FakeKVStore
    reservation: ExpectedTransfer
    source_ids: list[int]
    chunks: list[TransferChunk]

    def messages(self) -> list[SenderMessage]:
        return [
            open_message(self.source, self.reservation),
            *self.chunks,
            make_commit(self.reservation, self.chunks),
        ]


def chop(extent: Extent, random: Random) -> list[Extent]:
    """Random boxes that tile `extent`."""
    axes = {"blocks": extent.blocks, "layers": extent.span.layers, "heads": extent.span.heads}
    ways = [axis for axis, span in axes.items() if span.count > 1]
    if not ways or random.random() < 0.3:
        return [extent]
    axis = random.choice(ways)
    length, cut = axes[axis].count, random.randrange(1, axes[axis].count)
    first, rest = with_axis(extent, axis, 0, cut - length), with_axis(extent, axis, cut, -cut)
    return chop(first, random) + chop(rest, random)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    random = draw(st.randoms(use_true_random=False))
    layout = KVLayout(
        "m", random.randint(1, 4), random.randint(1, 3), 2, random.randint(1, 4), random.choice(["float32", "bfloat16"])
    )
    num_tokens = random.randint(1, NUM_BLOCKS * layout.block_size)
    num_blocks = layout.num_blocks_for(num_tokens)
    first_block = random.randrange(num_blocks)
    source, target = FakeKVStore(layout, NUM_BLOCKS, seed=1), FakeKVStore(layout, NUM_BLOCKS, seed=2)
    source_ids, target_ids = (random.sample(range(NUM_BLOCKS), num_blocks) for _ in range(2))
    reservation = ExpectedTransfer("transfer", random.randint(1, 3), tuple(target_ids), first_block, num_tokens)
    places = chop(Extent(Span(first_block, num_blocks - first_block), layout.whole), random)
    random.shuffle(places)
    chunks = [make_chunk(source, reservation, source_ids, n, place) for n, place in enumerate(places)]
    return Case(source, target, reservation, source_ids, chunks)


def run(case: Case, messages: list[SenderMessage]) -> tuple[Outcomes, MeshError | None, Conversation]:
    async def converse() -> tuple[Outcomes, MeshError | None, Conversation]:
        outcomes = Outcomes()
        receiver = KVReceiver(case.target, "this-run", outcomes.callbacks(), GRPC_ONLY)
        receiver.expect(case.reservation)
        conversation = Conversation(receiver, messages)
        try:
            await conversation.run()
        except MeshError as error:
            return outcomes, error, conversation
        finally:
            await receiver.close()
        return outcomes, None, conversation

    return asyncio.run(converse())


@settings(max_examples=100)
@given(cases())
def test_clean_transfers_commit(case: Case) -> None:
    before = case.target.data.copy()
    outcomes, error, conversation = run(case, case.messages())
    assert error is None
    assert outcomes.committed == [("transfer", FIRST_TOKEN)]
    assert outcomes.failed == []
    assert isinstance(conversation.replies[-1], Committed)
    first, ids = case.reservation.first_block, case.reservation.block_ids
    assert case.target.blocks(ids[first:]) == case.source.blocks(case.source_ids[first:])
    others = [block for block in range(NUM_BLOCKS) if block not in ids[first:]]
    assert (case.target.data[:, :, others] == before[:, :, others]).all()
    assert (case.target.written[:, ids[first:]] >= 1).all()


@settings(max_examples=30)
@given(cases(), st.lists(st.integers(1, 100), max_size=6))
def test_renewals_anywhere_change_nothing(case: Case, places: list[int]) -> None:
    messages = case.messages()
    for place in places:
        messages.insert(1 + place % (len(messages) - 1), Renew())  # after open, before commit
    outcomes, error, conversation = run(case, messages)
    assert error is None
    assert outcomes.committed == [("transfer", FIRST_TOKEN)]
    assert sum(isinstance(reply, Renewed) for reply in conversation.replies) == len(places)


@settings(max_examples=10)
@given(cases())
def test_a_renewal_opens_nothing(case: Case) -> None:
    outcomes, error, _ = run(case, [Renew(), *case.messages()])
    assert isinstance(error, TransferFailed)
    assert (outcomes.committed, outcomes.failed) == ([], [])


def flip(case: Case, n: int, random: Random) -> None:
    payload = bytearray(case.chunks[n].payload.inline)
    payload[random.randrange(len(payload))] ^= 1 << random.randrange(8)
    case.chunks[n] = replace(case.chunks[n], payload=Payload(bytes(payload)))


def truncate(case: Case, n: int, random: Random) -> None:
    payload = case.chunks[n].payload.inline
    case.chunks[n] = replace(case.chunks[n], payload=Payload(payload[: random.randrange(len(payload))]))


def truncate_and_say_so(case: Case, n: int, random: Random) -> None:
    truncate(case, n, random)
    case.chunks[n] = replace(case.chunks[n], num_bytes=len(case.chunks[n].payload.inline))


def _remade(case: Case, n: int, reservation: ExpectedTransfer) -> None:
    chunk = case.chunks[n]
    case.chunks[n] = make_chunk(case.source, reservation, case.source_ids, n, chunk.extent)


def stale(case: Case, n: int, random: Random) -> None:
    _remade(case, n, replace(case.reservation, attempt=case.reservation.attempt + random.choice([-1, 1])))


def foreign(case: Case, n: int, random: Random) -> None:
    _remade(case, n, replace(case.reservation, transfer_id="another"))


def duplicate(case: Case, n: int, random: Random) -> None:
    again = make_chunk(case.source, case.reservation, case.source_ids, len(case.chunks), case.chunks[n].extent)
    case.chunks.append(again)


def repeat(case: Case, n: int, random: Random) -> None:
    case.chunks.insert(random.randint(n, len(case.chunks)), case.chunks[n])


def drop(case: Case, n: int, random: Random) -> None:
    del case.chunks[n]
    case.chunks = [
        make_chunk(case.source, case.reservation, case.source_ids, number, chunk.extent)
        for number, chunk in enumerate(case.chunks)
    ]


def lose(case: Case, n: int, random: Random) -> None:
    del case.chunks[n]


def move(case: Case, n: int, random: Random) -> None:
    place = case.chunks[n].extent
    by = random.choice([(-1, 0), (1, 0), (0, -1), (0, 1)])
    moved = with_axis(place, random.choice(["blocks", "layers", "heads"]), *by)
    case.chunks[n] = replace(case.chunks[n], extent=moved)


FAULTS = (flip, truncate, truncate_and_say_so, stale, foreign, duplicate, repeat, drop, lose, move)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@settings(max_examples=25)
@given(case=cases(), random=st.randoms(use_true_random=False))
def test_spoilt_transfers_never_commit(fault: Callable[[Case, int, Random], None], case: Case, random: Random) -> None:
    fault(case, random.randrange(len(case.chunks)), random)
    check_refused(case, case.messages())


@settings(max_examples=30)
@given(cases(), st.data())
def test_reordered_chunks_never_commit(case: Case, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(case.chunks))))
    if list(order) == list(range(len(case.chunks))):
        return
    messages = case.messages()
    messages[1:-1] = [case.chunks[n] for n in order]
    check_refused(case, messages)


@settings(max_examples=30)
@given(cases(), st.data())
def test_swapped_payloads_never_commit(case: Case, data: st.DataObject) -> None:
    if len(case.chunks) < 2:
        return
    a, b = data.draw(st.lists(st.integers(0, len(case.chunks) - 1), min_size=2, max_size=2, unique=True))
    first, second = case.chunks[a], case.chunks[b]
    messages = case.messages()
    messages[1 + a] = replace(first, payload=second.payload)
    messages[1 + b] = replace(second, payload=first.payload)
    check_refused(case, messages)


@settings(max_examples=25)
@given(cases(), st.sampled_from(["num_tokens", "num_chunks", "digest"]))
def test_a_wrong_commit_never_commits(case: Case, field: str) -> None:
    messages = case.messages()
    commit = messages[-1]
    assert isinstance(commit, Commit)
    messages[-1] = replace(commit, **{field: getattr(commit, field) ^ 1})
    check_refused(case, messages)


@settings(max_examples=30)
@given(cases(), st.integers(0, 20))
def test_a_sender_that_goes_away_never_commits(case: Case, keep: int) -> None:
    messages = case.messages()
    check_refused(case, messages[: 1 + min(keep, len(messages) - 2)])


OTHERS: dict[str, Any] = {
    "model_fingerprint": "other",
    "num_layers": 9,
    "num_kv_heads": 7,
    "head_dim": 4,
    "block_size": 8,
    "dtype": "float16",
}


@pytest.mark.parametrize("field", sorted(OTHERS))
@settings(max_examples=3)
@given(cases())
def test_a_wrong_layout_is_refused_with_both_values(field: str, case: Case) -> None:
    messages = case.messages()
    theirs = replace(case.source.layout, **{field: OTHERS[field]})
    messages[0] = replace(open_message(case.source, case.reservation), layout=theirs)
    error = check_refused(case, messages)
    assert isinstance(error, LayoutMismatch)
    ours = getattr(case.target.layout, field)
    assert f"{field}: {ours!r} here, {OTHERS[field]!r} there" in str(error)
    assert case.target.written.max() == 0


def check_refused(case: Case, messages: list[SenderMessage]) -> MeshError:
    ids = set(case.reservation.block_ids[case.reservation.first_block :])
    outcomes, error, conversation = run(case, messages)
    assert isinstance(error, TransferFailed | TransferCorrupt | LayoutMismatch)
    assert outcomes.committed == []
    assert outcomes.failed == [("transfer", error)]
    assert not any(isinstance(reply, Committed) for reply in conversation.replies)
    assert {block for block in range(NUM_BLOCKS) if case.target.written[:, block].any()} <= ids
    return error
