"""Whatever bytes a sender of KV sends: a MeshError comes out, or the KV that was meant has arrived."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer import ExpectedTransfer, KVReceiver
from kvtransfer.messages import Renew, SenderMessage, reply_from_proto, request_from_bytes, request_to_bytes
from mesh.domain.errors import MeshError
from mesh.v1 import kvtransfer_pb2
from tests.fakes.kv_store import TINY, FakeKVStore, box
from tests.fakes.transfers import GRPC_ONLY, INCARNATION, Outcomes, make_chunk, make_commit, open_message
from tests.unit.fuzz.mutations import fuzzed, near

SOURCE = FakeKVStore(seed=3)
SOURCE_IDS, TARGET_IDS = (4, 2), (7, 1)
RESERVATION = ExpectedTransfer("transfer", 0, TARGET_IDS, first_block=0, num_tokens=2 * TINY.block_size)
CHUNKS = [make_chunk(SOURCE, RESERVATION, SOURCE_IDS, n, box(0, 2, n, 1)) for n in range(TINY.num_layers)]
HONEST = [
    request_to_bytes(open_message(SOURCE, RESERVATION)),
    request_to_bytes(Renew()),
    *(request_to_bytes(chunk) for chunk in CHUNKS),
    request_to_bytes(make_commit(RESERVATION, CHUNKS)),
]


@fuzzed
@given(near(HONEST))
def test_messages(raw: bytes) -> None:
    with contextlib.suppress(MeshError):
        request_from_bytes(raw)
    with contextlib.suppress(DecodeError, MeshError):
        reply_from_proto(kvtransfer_pb2.PushResponse.FromString(raw))


async def converse(raws: list[bytes], target: FakeKVStore) -> Outcomes:
    """Send these messages one after another, each when the ones before are dealt with."""
    outcomes = Outcomes()
    receiver = KVReceiver(target, INCARNATION, outcomes.callbacks(), GRPC_ONLY)
    receiver.expect(RESERVATION)
    answered = asyncio.Semaphore(0)

    async def requests() -> AsyncIterator[SenderMessage]:
        for raw in raws:
            yield request_from_bytes(raw)
            await answered.acquire()

    with contextlib.suppress(MeshError):
        async for _ in receiver.push(requests()):
            answered.release()
    await receiver.close()
    return outcomes


def test_an_honest_conversation_commits() -> None:
    target = FakeKVStore()
    outcomes = asyncio.run(converse(HONEST, target))
    assert len(outcomes.committed) == 1
    assert target.blocks(TARGET_IDS) == SOURCE.blocks(SOURCE_IDS)


def test_conversations() -> None:
    with asyncio.Runner() as runner:

        @fuzzed
        @given(st.integers(0, len(HONEST) - 1), near(HONEST), st.booleans())
        def check(place: int, raw: bytes, instead: bool) -> None:
            raws = [*HONEST[:place], raw, *HONEST[place + instead :]]
            target = FakeKVStore()
            outcomes = runner.run(converse(raws, target))
            assert len(outcomes.committed) + len(outcomes.failed) <= 1
            if outcomes.committed:
                assert target.blocks(TARGET_IDS) == SOURCE.blocks(SOURCE_IDS)

        check()
