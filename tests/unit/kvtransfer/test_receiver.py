"""The receiver's rules: who is let in, how a transfer ends, and what abort promises."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from kvtransfer import ExpectedTransfer, KVReceiver, TransferSettings
from kvtransfer.messages import Ack, Committed, Granted, ReceiverMessage, Renew, SenderMessage, TransferChunk
from kvtransfer.transports.base import TransportOffer
from kvtransfer.transports.grpc_bytes import GrpcReceiveTransport
from mesh.domain.errors import LayoutMismatch, TransferCorrupt, TransferFailed
from mesh.domain.kv import Span
from tests.defects import Repaired
from tests.fakes.kv_store import TINY, FakeKVStore, box
from tests.fakes.transfers import (
    FIRST_TOKEN,
    INCARNATION,
    Conversation,
    Outcomes,
    make_chunk,
    make_commit,
    open_message,
)
from tests.fakes.transport import MemoryTransport

SETTINGS = TransferSettings(transports=("grpc",), credit_chunks=2)
RESERVATION = ExpectedTransfer("transfer", 1, (4, 9, 2), 0, 11)
SOURCE_IDS = (1, 2, 3)
LAYERS = [box(0, 3, layer, 1) for layer in range(TINY.num_layers)]


class Bench:
    def __init__(self, **options: object) -> None:
        self.source = FakeKVStore(seed=1)
        self.target = FakeKVStore()
        self.outcomes = Outcomes()
        self.receiver = KVReceiver(self.target, INCARNATION, self.outcomes.callbacks(), SETTINGS, **options)  # type: ignore[arg-type]
        self.receiver.expect(RESERVATION)
        self.opening = open_message(self.source, RESERVATION)
        self.chunks = [make_chunk(self.source, RESERVATION, SOURCE_IDS, n, place) for n, place in enumerate(LAYERS)]
        self.commit = make_commit(RESERVATION, self.chunks)

    def messages(self) -> list[SenderMessage]:
        return [self.opening, *self.chunks, self.commit]

    async def run(self, *messages: SenderMessage, hasty: bool = False) -> list[object]:
        conversation = Conversation(self.receiver, messages, hasty=hasty)
        await conversation.run()
        return list(conversation.replies)

    async def require_still_expected(self) -> None:
        """The reservation was not touched: the right sender still gets in."""
        assert self.outcomes.failed == []
        await self.run(*self.messages())
        assert self.outcomes.committed == [("transfer", FIRST_TOKEN)]


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    bench.source.reading.open()
    bench.target.writing.open()
    await bench.receiver.close()


async def test_replies_of_a_clean_transfer(bench: Bench) -> None:
    replies = await bench.run(*bench.messages())
    assert replies[0] == Granted("grpc", 2, 10)
    assert sorted(reply.sequence_number for reply in replies if isinstance(reply, Ack)) == [0, 1, 2]
    assert replies[-1] == Committed()
    assert bench.target.blocks(RESERVATION.block_ids) == bench.source.blocks(SOURCE_IDS)


async def test_all_cached_here_needs_no_chunk(bench: Bench) -> None:
    reservation = replace(RESERVATION, transfer_id="cached", first_block=3)
    bench.receiver.expect(reservation)
    await bench.run(open_message(bench.source, reservation), make_commit(reservation, []))
    assert bench.outcomes.committed == [("cached", FIRST_TOKEN)]
    assert not bench.target.written.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"transfer_id": "unknown"}, "not expected"),
        ({"attempt": 2}, "attempt 2, is not expected"),
        ({"receiver_incarnation": "former-run"}, "another incarnation"),
    ],
)
async def test_whoever_is_not_meant_is_refused_and_changes_nothing(
    bench: Bench, change: dict[str, object], message: str
) -> None:
    with pytest.raises(TransferFailed, match=message):
        await bench.run(replace(bench.opening, **change), *bench.chunks)  # type: ignore[arg-type]
    assert not bench.target.written.any()
    await bench.require_still_expected()


async def test_a_conversation_begins_with_open(bench: Bench) -> None:
    for message in (bench.chunks[0], bench.commit):
        with pytest.raises(TransferFailed, match="must be open"):
            await bench.run(message, hasty=True)
    with pytest.raises(TransferFailed, match="must be open"):
        await bench.run()
    await bench.require_still_expected()


async def test_a_second_sender_is_refused(bench: Bench) -> None:
    bench.target.writing.close()
    first = asyncio.create_task(bench.run(*bench.messages()))
    await asyncio.to_thread(bench.target.writing.arrived.wait)
    with pytest.raises(TransferFailed, match="has a sender already"):
        await bench.run(*bench.messages())
    bench.target.writing.open()
    await first
    assert bench.outcomes.committed == [("transfer", FIRST_TOKEN)]


@pytest.mark.parametrize("change", [{"first_block": 1}, {"end_block": 4}])
async def test_other_blocks_than_reserved(bench: Bench, change: dict[str, int]) -> None:
    with pytest.raises(TransferFailed, match=r"\[0, 3\) are reserved"):
        await bench.run(replace(bench.opening, **change))  # type: ignore[arg-type]
    assert [transfer_id for transfer_id, _ in bench.outcomes.failed] == ["transfer"]


async def test_other_heads_than_held_here(bench: Bench) -> None:
    part = replace(bench.opening.span, heads=Span(1, 2))
    with pytest.raises(
        LayoutMismatch, match=r"KV heads 0\.\.1 are expected here, the sender offers .* KV heads 1\.\.2"
    ):
        await bench.run(replace(bench.opening, span=part))
    assert [transfer_id for transfer_id, _ in bench.outcomes.failed] == ["transfer"]


async def test_no_common_transport_is_said_in_words(bench: Bench) -> None:
    with pytest.raises(LayoutMismatch, match="the sender offers rdma, shm; the receiver has grpc"):
        await bench.run(replace(bench.opening, transports=(TransportOffer("rdma"), TransportOffer("shm"))))


async def test_credit_is_enforced(bench: Bench) -> None:
    with pytest.raises(TransferFailed, match="more than 2 chunks unacknowledged"):
        await bench.run(bench.opening, *bench.chunks, hasty=True)
    assert [transfer_id for transfer_id, _ in bench.outcomes.failed] == ["transfer"]


async def test_commit_may_follow_the_last_chunk_at_once_and_waits_for_its_write(bench: Bench) -> None:
    bench.target.writing.close()
    chunk = make_chunk(bench.source, RESERVATION, SOURCE_IDS, 0, box(0, 3, 0, TINY.num_layers))
    messages = (bench.opening, chunk, make_commit(RESERVATION, [chunk]))
    running = asyncio.create_task(bench.run(*messages, hasty=True))
    await asyncio.to_thread(bench.target.writing.arrived.wait, 20)
    await asyncio.sleep(0.05)
    assert bench.outcomes.committed == []
    bench.target.writing.open()
    assert await running == [Granted("grpc", 2, 10), Committed()]  # no acknowledgement of its own
    assert len(bench.outcomes.committed) == 1


async def test_open_twice_is_refused(bench: Bench) -> None:
    with pytest.raises(TransferFailed, match="opened only once"):
        await bench.run(bench.opening, bench.opening)


async def test_a_huge_chunk_is_refused_before_memory_is_taken_for_it() -> None:
    layout = replace(TINY, num_kv_heads=1024, head_dim=1024)
    bench = Bench()
    bench.target.layout, bench.target.span = layout, layout.whole  # 3 layers of 3 blocks are 300 MB
    bench.receiver.expect(replace(RESERVATION, transfer_id="huge"))
    opening = replace(bench.opening, transfer_id="huge", layout=layout, span=layout.whole)
    place = box(0, 3, 0, 3, layout.whole.heads)
    with pytest.raises(TransferCorrupt, match="bytes instead of"):
        await bench.run(opening, TransferChunk(0, place, place.num_bytes(layout), 0, bench.chunks[0].payload))
    await bench.receiver.close()


async def test_a_broken_store_fails_the_transfer_only(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(bench.target, "write_blocks", lambda *_: 1 / 0)
        with capture_logs(), pytest.raises(TransferFailed, match="the receiver failed"):
            await bench.run(*bench.messages())
    assert len(bench.outcomes.failed) == 1
    bench.receiver.expect(RESERVATION)
    await bench.run(*bench.messages())
    assert len(bench.outcomes.committed) == 1


async def test_expect_twice_and_nonsense(bench: Bench) -> None:
    with pytest.raises(ValueError, match="expected already"):
        bench.receiver.expect(RESERVATION)
    with pytest.raises(ValueError, match="3 blocks are reserved for 13 tokens"):
        bench.receiver.expect(replace(RESERVATION, transfer_id="b", num_tokens=13))
    with pytest.raises(ValueError, match="outside of 3 blocks"):
        bench.receiver.expect(replace(RESERVATION, transfer_id="b", first_block=4))


async def test_abort_before_open_refuses_the_sender(bench: Bench) -> None:
    await bench.receiver.abort("transfer")
    await bench.receiver.abort("transfer")
    with pytest.raises(TransferFailed, match="not expected"):
        await bench.run(*bench.messages())
    assert not bench.target.written.any()
    assert bench.outcomes.failed == []


async def test_abort_waits_for_the_write_in_flight_and_lets_no_other_begin(bench: Bench) -> None:
    bench.target.writing.close()
    call = asyncio.create_task(bench.run(*bench.messages()))
    await asyncio.to_thread(bench.target.writing.arrived.wait)
    aborts = [asyncio.create_task(bench.receiver.abort("transfer")) for _ in range(2)]
    for _ in range(20):
        await asyncio.sleep(0)
    assert not any(abort.done() for abort in aborts)
    bench.target.writing.open()
    await asyncio.gather(*aborts)
    assert bench.target.writing.num_inside == 0
    after = bench.target.written.copy()
    with pytest.raises(TransferFailed, match="aborted by its receiver"):
        await call
    assert (bench.target.written == after).all()
    assert bench.outcomes.failed == []
    assert bench.outcomes.committed == []
    bench.receiver.expect(RESERVATION)  # the id is free again


async def test_abort_after_the_end_does_nothing(bench: Bench) -> None:
    await bench.run(*bench.messages())
    await bench.receiver.abort("transfer")
    assert len(bench.outcomes.committed) == 1
    assert bench.outcomes.failed == []


async def test_failure_is_told_only_when_no_write_is_in_flight(bench: Bench) -> None:
    bench.target.writing.close()
    replies = bench.receiver.push(_endless(bench.opening, bench.chunks[0]))
    assert await anext(replies) == Granted("grpc", 2, 10)
    await asyncio.to_thread(bench.target.writing.arrived.wait)
    closing = asyncio.create_task(replies.aclose())  # how a vanished peer looks
    for _ in range(20):
        await asyncio.sleep(0)
    assert bench.outcomes.failed == []
    bench.target.writing.open()
    await closing
    ((transfer_id, error),) = bench.outcomes.failed
    assert transfer_id == "transfer"
    assert isinstance(error, TransferFailed)


async def test_another_transport_plugs_in() -> None:
    transport = MemoryTransport()
    bench = Bench(transports=(transport,))
    slots = [await transport.acquire(chunk.num_bytes) for chunk in bench.chunks]
    for n, slot in enumerate(slots):
        slot.buffer()[:] = bench.chunks[n].payload.inline
        bench.chunks[n] = replace(bench.chunks[n], payload=slot.seal())
    bench.opening = replace(bench.opening, transports=(TransportOffer("shm"), transport.offer()))
    replies = await bench.run(*bench.messages())
    assert replies[0] == Granted("memory", 2, 10)
    assert bench.outcomes.committed == [("transfer", FIRST_TOKEN)]
    assert transport.num_open_sources == 0
    for slot in slots:
        slot.release(is_acknowledged=True)
    await bench.receiver.close()


async def test_a_close_that_is_cancelled_still_closes_all_behind_the_last_write() -> None:
    transport = OnceClosed()
    bench = Bench(transports=(GrpcReceiveTransport(), transport))
    bench.target.writing.close()
    running = asyncio.create_task(bench.run(*bench.messages()))
    await asyncio.to_thread(bench.target.writing.arrived.wait, 60)
    closing = asyncio.create_task(bench.receiver.close())
    await asyncio.sleep(0)  # it has begun
    closing.cancel()
    await asyncio.sleep(0)
    assert not transport.is_closed, "a write is in flight"
    bench.target.writing.open()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert transport.is_closed
    with pytest.raises(TransferFailed, match="aborted"):
        await running
    for thread in bench.receiver._executor._threads:
        await asyncio.to_thread(thread.join, 60)
        assert not thread.is_alive()
    await bench.receiver.close()


class OnceClosed(MemoryTransport):
    """As a library that must not be closed twice."""

    is_closed = False

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True


async def _endless(*messages: SenderMessage) -> AsyncIterator[SenderMessage]:
    for message in messages:
        yield message
    await asyncio.Event().wait()


async def test_replies_nobody_takes_do_not_keep_a_transfer_alive(bench: Bench) -> None:
    """The call is cancelled while gRPC is writing a reply: the generator is left as it is, its stream ends."""
    async with aclosing(bench.receiver.push(_stream(bench.opening, bench.chunks[0]))) as replies:
        await anext(replies)
        await asyncio.wait_for(bench.outcomes.changed.wait(), 60)
        assert len(bench.outcomes.failed) == 1


async def test_a_sender_that_renews_and_takes_no_replies_fills_no_memory(bench: Bench, repaired: Repaired) -> None:
    async def renewals() -> AsyncIterator[SenderMessage]:
        yield bench.opening
        for _ in range(10_000):
            yield Renew()

    replies = bench.receiver.push(renewals())
    assert isinstance(await anext(replies), Granted)
    async with asyncio.timeout(60):
        await bench.outcomes.changed.wait()  # before another reply is taken
    unread: list[ReceiverMessage] = []
    with pytest.raises(TransferFailed, match="reads no replies"):
        await _take_all(replies, unread)
    num_unread = len(unread)
    assert 0 < num_unread <= 66
    repaired("S6", f"10,000 renewals of a sender that reads nothing: {num_unread} replies are kept, the transfer ends")


async def _take_all(replies: AsyncIterator[ReceiverMessage], taken: list[ReceiverMessage]) -> None:
    async for reply in replies:
        taken.append(reply)


async def _stream(*messages: SenderMessage) -> AsyncIterator[SenderMessage]:
    for message in messages:
        yield message
