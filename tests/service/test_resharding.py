"""KV from rank to rank: prefill and decode workers of any degrees, and the end of all shards when one fails."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

import numpy as np
import pytest

from kvtransfer import (
    AnyOutgoingTransfer,
    ExpectedTransfer,
    KVReceiver,
    KVSender,
    MultiRankReceiver,
    MultiRankSender,
    TransferSettings,
    TransferSpec,
)
from mesh.domain.errors import LayoutMismatch, MeshError, TransferCorrupt, TransferFailed
from mesh.domain.kv import Degrees, KVLayout, KVSpan, Span, kv_spans
from mesh.domain.worker import KVEndpoint
from mesh.rpc.credentials import Credentials
from mesh.rpc.status import named_error
from mesh.v1 import rank_pb2
from rank_worker.kv import RankKV
from rank_worker.settings import RankSettings
from tests.fakes.kv_store import FakeKVStore
from tests.fakes.transfers import FIRST_TOKEN, GRPC_ONLY, INCARNATION, Outcomes
from tests.service.transfer_pair import KEY, serving, until
from tests.waiting import LIMIT_S

LAYOUT = KVLayout("tiny", num_layers=4, num_kv_heads=4, head_dim=4, block_size=4, dtype="float32")
SOURCE_IDS = (1, 2, 3)
RESERVATION = ExpectedTransfer("transfer", 1, (4, 9, 2), 1, 11)  # the first block is there
DEGREES = [Degrees(tensor, pipeline) for tensor in (1, 2, 4) for pipeline in (1, 2)]
COPIES = [Degrees(1), Degrees(2), Degrees(4, 2), Degrees(8)]


class Rank:
    """A rank and the leader's connection to it, in this process. Implements kvtransfer.ranks.RankPeer."""

    def __init__(self, store: FakeKVStore) -> None:
        self.span = store.span
        self.host = "127.0.0.1"
        self.store = store
        settings = RankSettings(leader="127.0.0.1:1", rank=1, model="m", mesh_key="a mesh key for tests")
        self.kv = RankKV(store, settings, "127.0.0.1", self._on_answer)  # type: ignore[arg-type]
        self._numbers = itertools.count(1)
        self._answers: dict[int, Future[rank_pb2.KvReport]] = {}

    def ask(self, request: rank_pb2.KvOrder) -> "Future[rank_pb2.KvReport]":
        answer: Future[rank_pb2.KvReport] = Future()
        answer.set_running_or_notify_cancel()
        request.number = next(self._numbers)
        self._answers[request.number] = answer
        self.kv.handle(request)
        return answer

    def tell(self, request: rank_pb2.KvOrder) -> None:
        request.number = next(self._numbers)
        self.kv.handle(request)

    async def set_up(self, incarnation: str = "") -> int:
        setup = rank_pb2.KvSetup(transports=["grpc"], worker_id="worker", incarnation=incarnation)
        return (await asyncio.wrap_future(self.ask(rank_pb2.KvOrder(setup=setup)))).port

    def require_idle(self) -> None:
        assert not self._answers, "something was never answered"
        assert not self.kv._sends
        assert not self.kv._expected

    def _on_answer(self, answer: rank_pb2.KvReport) -> None:
        asked = self._answers.pop(answer.number)
        if answer.HasField("failed"):
            asked.set_exception(named_error(answer.failed.error, answer.failed.reason))
        else:
            asked.set_result(answer)


@dataclass
class Workers:
    """A prefill and a decode worker, each of several ranks."""

    sources: list[FakeKVStore]
    targets: list[FakeKVStore]
    sender: MultiRankSender
    receiver: MultiRankReceiver
    endpoints: tuple[KVEndpoint, ...]
    outcomes: Outcomes
    ranks: list[Rank]

    async def begin(self) -> AnyOutgoingTransfer:
        await self.receiver.expect(RESERVATION)
        whole = self.sources[0].layout.whole
        spec = TransferSpec("transfer", 1, "", INCARNATION, SOURCE_IDS, whole, RESERVATION.first_block)
        return self.sender.open(spec, self.endpoints)

    async def outcome(self) -> MeshError | None:
        """None if the transfer is committed. One outcome only, and then nothing writes."""
        async with asyncio.timeout(LIMIT_S):
            await self.outcomes.changed.wait()
            while any(rank._answers for rank in self.ranks):  # noqa: ASYNC110 - the leader's and the ranks' tasks
                await asyncio.sleep(0)
        assert len(self.outcomes.committed) + len(self.outcomes.failed) == 1
        assert not any(store.writing.num_inside for store in self.targets)
        return self.outcomes.failed[0][1] if self.outcomes.failed else None


def part_of(whole: FakeKVStore, span: KVSpan) -> FakeKVStore:
    store = FakeKVStore(whole.layout, span=span)
    store.data[:] = whole._part(span)
    return store


@asynccontextmanager
async def workers(
    prefill: Degrees, decode: Degrees, settings: TransferSettings = GRPC_ONLY, layout: KVLayout = LAYOUT
) -> AsyncIterator[Workers]:
    whole = FakeKVStore(layout, seed=1)
    sources = [part_of(whole, span) for span in kv_spans(4, layout.num_kv_heads, prefill)]
    targets = [FakeKVStore(layout, span=span) for span in kv_spans(4, layout.num_kv_heads, decode)]
    sending, receiving = (list(map(Rank, stores[1:])) for stores in (sources, targets))
    outcomes = Outcomes()
    own = KVSender(sources[0], "prefill-0", Credentials(KEY), settings)
    receiver = MultiRankReceiver(
        lambda callbacks: KVReceiver(targets[0], INCARNATION, callbacks, settings), receiving, outcomes.callbacks()
    )
    sender = MultiRankSender(own, sending)
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(serving(receiver.own))
        stack.push_async_callback(receiver.close)
        stack.push_async_callback(sender.close)
        endpoints = [KVEndpoint(server.address, targets[0].span)]
        for rank in sending:
            stack.push_async_callback(rank.kv.close)
            await rank.set_up()
        for rank in receiving:
            stack.push_async_callback(rank.kv.close)
            endpoints.append(KVEndpoint(f"127.0.0.1:{await rank.set_up(INCARNATION)}", rank.span))
        yield Workers(sources, targets, sender, receiver, tuple(endpoints), outcomes, [*sending, *receiving])
        for rank in (*sending, *receiving):
            rank.require_idle()


def announce(transfer: AnyOutgoingTransfer) -> None:
    """Layer after layer, in two pieces, as in a prompt of two chunks."""
    for blocks in (Span(0, 2), Span(2, 1)):
        for layer in range(LAYOUT.num_layers):
            transfer.announce(blocks, Span(layer, 1))


def require_same(running: Workers) -> None:
    """The KV is that which one rank would have sent to one rank."""
    layout = running.targets[0].layout
    whole, expected = FakeKVStore(layout, seed=1), FakeKVStore(layout)
    expected.data[:, :, list(RESERVATION.block_ids[1:])] = whole.data[:, :, list(SOURCE_IDS[1:])]
    for target in running.targets:
        assert np.array_equal(target.data, expected._part(target.span))


@pytest.mark.parametrize("decode", DEGREES, ids=str)
@pytest.mark.parametrize("prefill", DEGREES, ids=str)
async def test_any_degrees_bring_the_same_kv(prefill: Degrees, decode: Degrees) -> None:
    async with workers(prefill, decode) as running:
        transfer = await running.begin()
        announce(transfer)
        result = await transfer.commit(11, FIRST_TOKEN)
        assert await running.outcome() is None
        assert running.outcomes.committed == [("transfer", FIRST_TOKEN)]
        assert (result.transport, result.num_bytes) == ("grpc", 2 * LAYOUT.block_bytes)
        require_same(running)


@pytest.mark.parametrize("num_kv_heads", [1, 2])
@pytest.mark.parametrize("decode", COPIES, ids=str)
@pytest.mark.parametrize("prefill", COPIES, ids=str)
async def test_ranks_with_copies_of_heads_send_one_and_get_all(
    prefill: Degrees, decode: Degrees, num_kv_heads: int
) -> None:
    layout = replace(LAYOUT, num_kv_heads=num_kv_heads)
    async with workers(prefill, decode, layout=layout) as running:
        transfer = await running.begin()
        announce(transfer)
        result = await transfer.commit(11, FIRST_TOKEN)
        assert await running.outcome() is None
        assert result.num_bytes == 2 * layout.block_bytes * max(1, decode.tensor // num_kv_heads)
        require_same(running)


class Broken(FakeKVStore):
    """A store that cannot be read."""

    def read_blocks(self, *_: object) -> None:
        raise OSError("broken memory")


@pytest.mark.parametrize("number", range(2))
@pytest.mark.parametrize(("prefill", "decode"), [(Degrees(2), Degrees(1)), (Degrees(2), Degrees(2))], ids=str)
async def test_one_flow_that_fails_ends_all(prefill: Degrees, decode: Degrees, number: int) -> None:
    """The leader's, or another rank's. Nothing is committed, although the other shard is complete."""
    async with workers(prefill, decode) as running:
        running.sources[number].__class__ = Broken
        transfer = await running.begin()
        announce(transfer)
        with pytest.raises(TransferFailed):
            await transfer.commit(11, FIRST_TOKEN)
        assert isinstance(await running.outcome(), TransferFailed)
        await transfer.abort()


@pytest.mark.parametrize("number", range(2))
async def test_corrupt_kv_in_one_flow_is_told_as_such(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async with workers(Degrees(2), Degrees(2)) as running:
        store, original = running.targets[number], FakeKVStore.write_blocks

        def refuse(self: FakeKVStore, *arguments: object) -> None:
            if self is store:
                raise TransferCorrupt("chunk 0 does not match its checksum")
            original(self, *arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(FakeKVStore, "write_blocks", refuse)
        transfer = await running.begin()
        announce(transfer)
        with pytest.raises(MeshError):
            await transfer.commit(11, FIRST_TOKEN)
        assert isinstance(await running.outcome(), TransferCorrupt)
        await transfer.abort()


@pytest.mark.parametrize("number", range(2))
async def test_an_abort_waits_for_the_writers_of_all_ranks(number: int) -> None:
    async with workers(Degrees(2), Degrees(2)) as running:
        gate = running.targets[number].writing
        gate.close()
        transfer = await running.begin()
        announce(transfer)
        await until(gate.arrived)
        aborting = asyncio.create_task(running.receiver.abort("transfer"))
        done, _ = await asyncio.wait([aborting], timeout=0.1)
        assert not done, "a rank still writes"
        gate.open()
        await aborting
        assert not any(target.writing.num_inside for target in running.targets)
        with pytest.raises(MeshError):
            await transfer.ended()
        assert not running.outcomes.changed.is_set()
        await transfer.abort()


async def test_a_sender_that_aborts_lets_no_rank_read_on() -> None:
    async with workers(Degrees(2), Degrees(1)) as running:
        gate = running.sources[1].reading
        gate.close()
        transfer = await running.begin()
        announce(transfer)
        await until(gate.arrived)
        aborting = asyncio.create_task(transfer.abort())
        done, _ = await asyncio.wait([aborting], timeout=0.1)
        assert not done, "a rank still reads"
        gate.open()
        await aborting
        assert isinstance(await running.outcome(), TransferFailed)


async def test_a_flow_that_never_comes_ends_with_the_opening_lease() -> None:
    settings = TransferSettings(transports=("grpc",), num_threads=1, opening_lease_s=0.2)
    async with workers(Degrees(2), Degrees(1), settings) as running:
        await running.receiver.expect(RESERVATION)
        spec = TransferSpec("transfer", 1, running.endpoints[0].address, INCARNATION, SOURCE_IDS, LAYOUT.whole, 1)
        only = running.sender._own.open(replace(spec, span=running.sources[0].span))
        for blocks in (Span(0, 2), Span(2, 1)):
            only.announce(blocks, LAYOUT.whole.layers)
        await only.commit(11, FIRST_TOKEN)
        assert "no sender has opened" in str(await running.outcome())


async def test_kv_that_no_rank_has_is_refused() -> None:
    async with workers(Degrees(2), Degrees(1)) as running:
        running.sender._ranks = ()
        with pytest.raises(LayoutMismatch, match=r"do not hold each of .* exactly once"):
            running.sender.receivers("127.0.0.1:1", ())


async def test_a_decode_worker_that_a_rank_cannot_reach_is_named() -> None:
    async with workers(Degrees(2), Degrees(1)) as running:
        running.ranks[0].host = "10.0.0.2"
        with pytest.raises(LayoutMismatch, match=r"rank at 10\.0\.0\.2 sends its KV by itself and cannot reach .*127"):
            running.sender.receivers(running.endpoints[0].address, ())
        assert running.sender.receivers("10.0.0.1:5", ()) == (KVEndpoint("10.0.0.1:5", LAYOUT.whole),)


async def test_kv_that_a_rank_does_not_expect_is_refused() -> None:
    """It may have refused the order to expect it, with the reason."""
    rank = Rank(FakeKVStore(LAYOUT))
    with pytest.raises(TransferFailed, match="order 7 brings no transfer here"):
        await asyncio.wrap_future(rank.ask(rank_pb2.KvOrder(collect=rank_pb2.KvCollect(expect=7))))
    rank.require_idle()
