"""KV transfers over real gRPC servers: every way they end, on both sides, leaves nothing behind."""

import asyncio
import itertools
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from kvtransfer import (
    SERVICE_NAME,
    ExpectedTransfer,
    KVReceiver,
    KVSender,
    TransferResult,
    TransferSettings,
    TransferSpec,
)
from kvtransfer.chunks import Extent
from kvtransfer.incoming_transfer import ShardChecks
from kvtransfer.outgoing_conversation import OutgoingConversation
from kvtransfer.push_call import ConnectionPool
from kvtransfer.transports.base import Slot
from kvtransfer.transports.shm import ShmSendTransport
from mesh.domain.errors import (
    ConfigurationError,
    InvalidRequest,
    LayoutMismatch,
    ReceiverLost,
    TransferCorrupt,
    TransferFailed,
    Unauthenticated,
)
from mesh.domain.kv import Span
from mesh.durations import duration_to_proto
from mesh.rpc.credentials import Credentials, MeshKey
from mesh.v1 import kvtransfer_pb2 as pb
from mesh.v1 import kvtransfer_pb2_grpc
from tests.fakes.kv_store import TINY, FakeKVStore
from tests.fakes.transfers import FIRST_TOKEN, INCARNATION, Outcomes
from tests.fakes.transport import MemoryTransport
from tests.service.transfer_pair import (
    KEY,
    RESERVATION,
    SOURCE_IDS,
    WAIT_S,
    Pair,
    announce_all,
    arenas,
    serving,
    turn_until,
    until,
)


@pytest.fixture(params=["shm", "link", "grpc", "gloo"])
async def pair(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Pair]:
    """Over "link" go the conversations of shm behind the first."""
    is_linked = request.param == "link"
    async with Pair(tmp_path, "shm" if is_linked else request.param).running() as pair:
        if is_linked:
            await pair.link()
        yield pair


@pytest.fixture(params=["shm", "link"])
async def shm_pair(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Pair]:
    async with Pair(tmp_path, "shm").running() as pair:
        if request.param == "link":
            await pair.link()
        yield pair


async def test_pushed_layer_by_layer_in_token_chunks(pair: Pair) -> None:
    pair.receiver.expect(RESERVATION)
    transfer = pair.open()
    for first, num in ((0, 1), (1, 2)):
        for layer in range(TINY.num_layers):
            transfer.announce(Span(first, num), Span(layer, 1))
            await asyncio.sleep(0)
    result = await transfer.commit(11, FIRST_TOKEN)
    assert result.transport == pair.settings.transports[0]
    assert (result.num_chunks, result.num_bytes) == (9, 3 * TINY.block_bytes)
    assert pair.outcomes.committed == [("transfer", FIRST_TOKEN)]
    assert pair.target.blocks(RESERVATION.block_ids) == pair.source.blocks(SOURCE_IDS)
    await transfer.abort()
    transfer.announce(Span(0, 1), Span(0, 1))
    await transfer.ended()


async def test_blocks_the_receiver_has_are_not_sent(pair: Pair) -> None:
    result = await pair.start(replace(RESERVATION, first_block=2)).commit(11, FIRST_TOKEN)
    assert result.num_bytes == TINY.block_bytes
    assert not pair.target.written[:, [4, 9]].any()
    assert pair.target.blocks([2]) == pair.source.blocks([3])


async def test_a_bit_that_flips_on_the_way_is_refused_and_never_committed(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the sender has summed it up: on the wire, or in the arena."""
    seal = OutgoingConversation._fill

    def fill(conversation: OutgoingConversation, slot: Slot, number: int, extent: Extent) -> bytes:
        request = bytearray(seal(conversation, slot, number, extent))
        if number == 4:
            memory = request if pair.settings.transports == ("grpc",) else slot.buffer()
            memory[-1] ^= 8
        return bytes(request)

    with monkeypatch.context() as patch:
        patch.setattr(OutgoingConversation, "_fill", fill)
        with pytest.raises(TransferCorrupt, match="chunk 4 does not match its checksum"):
            await pair.start().commit(11, FIRST_TOKEN)
    assert isinstance(await pair.failure(), TransferCorrupt)
    assert pair.outcomes.committed == []
    assert pair.target.written[1, RESERVATION.block_ids[1]] == 1  # and cleared by whoever aborts the sequence
    pair.outcomes.changed.clear()
    await pair.require_working()


async def test_nothing_to_send(pair: Pair) -> None:
    result = await pair.start(replace(RESERVATION, first_block=3)).commit(11, FIRST_TOKEN)
    assert (result.num_chunks, result.num_bytes) == (0, 0)


async def test_more_transfers_than_slots_all_get_through(pair: Pair) -> None:
    async def one(number: int) -> None:
        reservation = ExpectedTransfer(f"t{number}", 1, (number, 8, 9), 0, 11)
        await pair.start(reservation).commit(11, FIRST_TOKEN)

    await asyncio.gather(*(one(number) for number in range(8)))
    assert len(pair.outcomes.committed) == 8
    assert len(pair.sender._resources.connections) == 1


async def test_bad_specs_and_pushes_are_the_callers_errors(pair: Pair) -> None:
    with pytest.raises(ValueError, match="outside of 3 blocks"):
        pair.open(first_block=4)
    transfer = pair.open()
    for piece in ((0, 4, 0, 1), (2, 1, 3, 1), (0, 1, -1, 2)):
        with pytest.raises(ValueError, match="outside of 3 blocks or the store's layers"):
            transfer.announce(Span(*piece[:2]), Span(*piece[2:]))
    await transfer.abort()


@pytest.mark.parametrize("key", [None, MeshKey("another mesh key, wrong")])
async def test_a_wrong_key_is_refused_and_changes_nothing(tmp_path: Path, key: MeshKey | None) -> None:
    async with Pair(tmp_path, "shm").running(key=key) as pair:
        with pytest.raises(Unauthenticated):
            await pair.start().commit(11, FIRST_TOKEN)
        assert pair.outcomes.failed == []
        await pair.receiver.abort("transfer")


@pytest.mark.parametrize("change", [{"transfer_id": "other"}, {"attempt": 2}, {"receiver_incarnation": "former"}])
async def test_strangers_are_refused(pair: Pair, change: dict[str, object]) -> None:
    pair.receiver.expect(RESERVATION)
    transfer = pair.open(**change)  # type: ignore[arg-type]
    announce_all(transfer)
    with pytest.raises(TransferFailed):
        await transfer.commit(11, FIRST_TOKEN)
    with pytest.raises(TransferFailed):
        await transfer.ended()
    assert pair.outcomes.failed == []
    assert not pair.target.written.any()


async def test_a_layout_mismatch_names_both_values(pair: Pair) -> None:
    pair.source.layout = replace(TINY, dtype="bfloat16", model_fingerprint="newer")
    with pytest.raises(LayoutMismatch, match="model_fingerprint: 'tiny' here, 'newer' there; dtype: 'float32' here"):
        await pair.start().commit(11, FIRST_TOKEN)
    assert isinstance(await pair.failure(), LayoutMismatch)


async def test_no_common_transport(tmp_path: Path) -> None:
    pair = Pair(tmp_path, "shm")
    async with pair.running(receive=replace(pair.settings, transports=("grpc",))):
        with pytest.raises(LayoutMismatch, match="the sender offers shm; the receiver has grpc"):
            await pair.start().commit(11, FIRST_TOKEN)


async def test_falls_back_to_grpc_when_the_arena_is_not_visible(tmp_path: Path) -> None:
    pair = Pair(tmp_path, "shm")
    pair.settings = replace(pair.settings, transports=("shm", "grpc"))
    async with pair.running(receive=replace(pair.settings, shm_dir=str(tmp_path / "other-container"))):
        result = await pair.start().commit(11, FIRST_TOKEN)
        assert result.transport == "grpc"


async def test_a_wrong_number_of_tokens_or_a_missing_push_is_refused(pair: Pair) -> None:
    with pytest.raises(TransferFailed, match="11 tokens are reserved, 12 committed"):
        await pair.start().commit(12, FIRST_TOKEN)
    pair.receiver.expect(RESERVATION)
    transfer = pair.open()
    transfer.announce(Span(0, 3), Span(0, 2))
    with pytest.raises(TransferFailed, match="6 of 18 blocks"):
        await transfer.commit(11, FIRST_TOKEN)
    await pair.require_working()


async def test_pushed_twice_is_refused(pair: Pair) -> None:
    transfer = pair.start()
    transfer.announce(Span(1, 1), Span(1, 1))
    with pytest.raises(TransferCorrupt, match="has arrived before"):
        await transfer.commit(11, FIRST_TOKEN)
    await pair.require_working()


async def test_broken_stores_fail_the_transfer_on_both_sides(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    for store, method in ((pair.source, "copy_out"), (pair.target, "copy_in")):
        with monkeypatch.context() as patch:
            patch.setattr(store, method, lambda *_: 1 / 0)
            pair.outcomes.changed.clear()
            pair.outcomes.failed.clear()
            # capture_logs: rendering tracebacks is slow
            with capture_logs() as logs, pytest.raises(TransferFailed, match="its log has the details"):
                await pair.start().commit(11, FIRST_TOKEN)
            assert isinstance(await pair.failure(), TransferFailed)
            assert [type(entry["exc_info"]) for entry in logs if "exc_info" in entry] == [ZeroDivisionError]
    await pair.require_working()


async def test_abort_before_the_conversation_began(pair: Pair) -> None:
    transfer = pair.start()
    await asyncio.gather(transfer.abort(), transfer.abort())
    with pytest.raises(TransferFailed, match="aborted by its sender"):
        await transfer.commit(11, FIRST_TOKEN)
    pair.require_slots_back()
    await pair.receiver.abort("transfer")
    await pair.require_working()


async def test_abort_while_gathering_waits_for_the_thread(pair: Pair) -> None:
    pair.source.reading.close()
    transfer = pair.start()
    commit = asyncio.create_task(transfer.commit(11, FIRST_TOKEN))
    await until(pair.source.reading.arrived)
    abort = asyncio.create_task(transfer.abort())
    assert isinstance(await pair.failure(), TransferFailed)  # the peer knows before the thread is out
    assert not abort.done()
    pair.source.reading.open()
    await abort
    assert pair.source.reading.num_inside == 0
    with pytest.raises(TransferFailed, match="aborted by its sender"):
        await commit
    pair.require_slots_back()
    await pair.require_working()


async def test_abort_while_chunks_are_unacknowledged(pair: Pair) -> None:
    pair.target.writing.close()
    transfer = pair.start()
    await until(pair.target.writing.arrived)
    await transfer.abort()
    pair.require_slots_back()
    assert pair.outcomes.failed == []  # a write is in flight still
    pair.target.writing.open()
    assert isinstance(await pair.failure(), TransferFailed)
    await pair.require_working()


async def test_close_aborts_what_is_running(tmp_path: Path) -> None:
    async with Pair(tmp_path, "shm").running() as pair:
        pair.target.writing.close()
        transfer = pair.start()
        await until(pair.target.writing.arrived)
        await pair.sender.close()
        with pytest.raises(TransferFailed):
            await transfer.ended()


async def test_receiver_aborts_before_anything_came(pair: Pair) -> None:
    pair.receiver.expect(RESERVATION)
    await pair.receiver.abort("transfer")
    with pytest.raises(TransferFailed, match="not expected"):
        await pair.open().commit(11, FIRST_TOKEN)
    assert pair.outcomes.failed == []


async def test_receiver_aborts_while_writing(pair: Pair) -> None:
    pair.target.writing.close()
    transfer = pair.start()
    commit = asyncio.create_task(transfer.commit(11, FIRST_TOKEN))
    await until(pair.target.writing.arrived)
    abort = asyncio.create_task(pair.receiver.abort("transfer"))
    await asyncio.sleep(0)
    assert not abort.done()
    pair.target.writing.open()
    await abort
    written = pair.target.written.sum()
    with pytest.raises(TransferFailed, match="aborted by its receiver"):
        await commit
    assert pair.target.written.sum() == written < 9
    assert pair.outcomes.failed == []
    pair.require_slots_back()
    await pair.require_working()


async def test_receiver_aborts_while_the_sender_computes(pair: Pair) -> None:
    """The sender learns of it without commit, so that it can stop."""
    pair.receiver.expect(RESERVATION)
    transfer = pair.open()
    transfer.announce(Span(0, 1), Span(0, 1))
    await until(pair.target.writing.arrived)
    await pair.receiver.abort("transfer")
    with pytest.raises(TransferFailed, match="aborted by its receiver"):
        await transfer.ended()
    with pytest.raises(TransferFailed):
        await transfer.commit(11, FIRST_TOKEN)


async def test_nobody_listens(pair: Pair) -> None:
    await stop_receiving(pair)
    with pytest.raises(TransferFailed, match="cannot be reached"):
        await pair.start().commit(11, FIRST_TOKEN)
    await pair.receiver.abort("transfer")


async def stop_receiving(pair: Pair) -> None:
    """The receiver's ends of links close, and its server."""
    if pair.transports[0].name == "shm":
        (transport,) = pair.receiver._transports
        for arena in list(transport._arenas._entries):  # type: ignore[attr-defined]
            if arena._link is not None:
                arena._link.close()
        await turn_until(lambda: not pair.links)
    await pair.server.stop(0)


class Stopping(kvtransfer_pb2_grpc.KvTransferServicer):
    """Ends each call as a server does that stops."""

    async def Push(self, messages: AsyncIterator[Any], _: object) -> AsyncIterator[Any]:
        await anext(messages)
        raise asyncio.CancelledError
        yield


async def test_a_receiver_that_stops_is_named(pair: Pair) -> None:
    async with serving(Stopping()) as stopping:
        with pytest.raises(ReceiverLost, match="stopping"):
            await pair.open(address=stopping.address).commit(11, FIRST_TOKEN)


async def test_receiver_goes_away_mid_transfer(pair: Pair) -> None:
    pair.target.writing.close()
    commit = asyncio.create_task(pair.start().commit(11, FIRST_TOKEN))
    await until(pair.target.writing.arrived)
    stop = asyncio.create_task(stop_receiving(pair))
    with pytest.raises((ReceiverLost, TransferFailed)):
        await commit
    pair.target.writing.open()
    await stop
    assert isinstance(await pair.failure(), TransferFailed)


async def test_a_receiver_that_hangs_leaves_memory_for_others(tmp_path: Path) -> None:
    pair, target = Pair(tmp_path, "shm", receiver_chunks=2, progress_timeout_s=WAIT_S), FakeKVStore()
    other = KVReceiver(target, INCARNATION, Outcomes().callbacks(), pair.settings)
    async with pair.running(), serving(other) as server:
        (arena,) = pair.transports
        assert isinstance(arena, ShmSendTransport)
        pair.target.writing.close()
        hanging = [pair.start(replace(RESERVATION, transfer_id=f"hanging-{number}")) for number in range(3)]
        await turn_until(lambda: arena.slots.num_free <= 1)
        other.expect(RESERVATION)
        transfer = pair.open(address=server.address)
        announce_all(transfer)
        await transfer.commit(11, FIRST_TOKEN)
        assert target.blocks(RESERVATION.block_ids) == pair.source.blocks(SOURCE_IDS)
        pair.target.writing.open()
        for held in hanging:
            await held.commit(11, FIRST_TOKEN)
    await other.close()


async def test_a_stuck_receiver_is_given_up_and_a_slow_sender_is_not(tmp_path: Path) -> None:
    pair = Pair(tmp_path, "shm")
    pair.settings = replace(pair.settings, progress_timeout_s=0.2)
    async with pair.running():
        pair.target.writing.close()
        with pytest.raises(TransferFailed, match=r"has not answered for 0\.2 s"):
            await pair.start().commit(11, FIRST_TOKEN)
        pair.require_slots_back()
        pair.target.writing.open()
        assert isinstance(await pair.failure(), TransferFailed)
        pair.receiver.expect(RESERVATION)
        transfer = pair.open()
        watchdog = transfer._conversation._watchdog
        transfer.announce(Span(0, 1), Span(0, 1))
        await turn_until(lambda: watchdog._num_requests == watchdog._num_answers == 1)
        assert watchdog.due > asyncio.get_running_loop().time() + 5  # no answer is due: only the lease runs
        transfer.announce(Span(1, 2), Span(0, 1))
        transfer.announce(Span(0, 3), Span(1, 2))
        await transfer.commit(11, FIRST_TOKEN)


class Misbehaving(kvtransfer_pb2_grpc.KvTransferServicer):
    """Answers with what it was given, whatever it gets, then ends the call or hangs."""

    def __init__(self, *responses: pb.PushResponse, hang: bool = False) -> None:
        self._responses = responses
        self._hang = hang

    async def Push(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.PushResponse]:
        await anext(request_iterator)
        for response in self._responses:
            yield response
        if self._hang:
            await asyncio.Event().wait()


def granted(transport: str = "memory", credit: int = 2, lease_s: float = 60) -> pb.PushResponse:
    return pb.PushResponse(
        granted=pb.TransferGranted(transport=transport, credit_chunks=credit, lease=duration_to_proto(lease_s))
    )


def ack(number: int) -> pb.PushResponse:
    return pb.PushResponse(ack=pb.TransferAck(sequence_number=number))


COMMITTED = pb.PushResponse(committed=pb.TransferCommitted())


@pytest.mark.parametrize(
    ("servicer", "message"),
    [
        (Misbehaving(), "ended the conversation early"),
        (Misbehaving(granted()), "ended the conversation early"),
        (Misbehaving(granted("rdma")), "not offered"),
        (Misbehaving(granted(credit=0)), "no credit"),
        (Misbehaving(granted(lease_s=0)), "no lease"),
        (Misbehaving(COMMITTED), "no credit"),
        (Misbehaving(pb.PushResponse()), "unknown kind"),
        (Misbehaving(granted(), ack(77), hang=True), "acknowledged a chunk that was not sent"),
        (Misbehaving(granted(), granted(), hang=True), "acknowledged a chunk that was not sent"),
        (Misbehaving(granted(), COMMITTED, hang=True), "committed before the sender did"),
        (Misbehaving(hang=True), "the receiver has sent nothing"),
        (Misbehaving(granted(), hang=True), "has not answered"),
    ],
)
async def test_misbehaving_receivers(servicer: Misbehaving, message: str) -> None:
    transport = MemoryTransport()
    async with serving(servicer) as server:
        settings = TransferSettings(lease_s=1, progress_timeout_s=0.5, chunk_bytes=1)
        sender = KVSender(FakeKVStore(seed=1), "prefill-0", Credentials(KEY), settings, (transport,))
        transfer = sender.open(TransferSpec("transfer", 1, server.address, INCARNATION, SOURCE_IDS, TINY.whole))
        announce_all(transfer)
        with pytest.raises(TransferFailed, match=message):
            await transfer.commit(11, FIRST_TOKEN)
        assert transport.payloads == {}
        await sender.close()


async def test_garbage_on_the_wire_ends_that_call_only(pair: Pair) -> None:
    pair.receiver.expect(RESERVATION)
    async with grpc.aio.insecure_channel(pair.server.address) as channel:
        for garbage in (b"", b"\xff" * 50, b"\x0a\x02\xff\xff", b"\x12\x00", b"\x1a\x00", os.urandom(1000)):
            call = channel.stream_stream(f"/{SERVICE_NAME}/Push")(metadata=KEY.metadata())
            await call.write(garbage)
            assert await call.code() is not grpc.StatusCode.OK
    assert pair.outcomes.failed == []
    announce_all(transfer := pair.open())
    await transfer.commit(11, FIRST_TOKEN)


@pytest.mark.parametrize("phase", range(0, 40, 3))
async def test_a_link_that_breaks_at_any_moment_leaves_nothing(tmp_path: Path, phase: int) -> None:
    """After ever more turns of the loop, as when one side is killed; then all goes on over gRPC and a new link."""
    async with Pair(tmp_path, "shm").running() as pair:
        await pair.link()
        (link,) = pair.links
        (transport,) = pair.receiver._transports
        (arena,) = transport._arenas._entries  # type: ignore[attr-defined]
        transfers = [pair.start(ExpectedTransfer(f"t{number}", 1, (number, 8, 9), 0, 11)) for number in range(3)]
        commits = [asyncio.create_task(transfer.commit(11, FIRST_TOKEN)) for transfer in transfers]
        for _ in range(phase):
            await asyncio.sleep(0)
        pair.cut_links()
        results = await asyncio.gather(*commits, return_exceptions=True)
        assert all(isinstance(result, TransferResult | TransferFailed) for result in results)
        for number in range(3):
            await pair.receiver.abort(f"t{number}")  # as the router does, if the transfer had not been opened
        ended = [transfer_id for transfer_id, _ in (*pair.outcomes.committed, *pair.outcomes.failed)]
        assert len(ended) == len(set(ended))
        pair.require_slots_back()
        pair.outcomes.committed.clear()
        await turn_until(lambda: arena not in transport._arenas._entries)  # type: ignore[attr-defined]
        await pair.require_working()
        (new_link,) = pair.links
        assert new_link is not link
        await pair.require_working()


async def test_a_write_fails_behind_which_the_commit_has_come_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Pair(tmp_path, "shm").running() as pair:
        await pair.link()
        copy_in, num_chunks = pair.target.copy_in, itertools.count()
        monkeypatch.setattr(pair.target, "copy_in", lambda *args: copy_in(*args) ^ (next(num_chunks) == 8))
        with pytest.raises(TransferCorrupt, match="chunk 8 does not match"):
            await pair.start().commit(11, FIRST_TOKEN)
        assert isinstance(await pair.failure(), TransferCorrupt)
        assert pair.outcomes.committed == []


async def test_a_write_that_hangs_delays_no_other_transfer_of_its_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtransfer.transports.link._HANGS_AFTER_S", 0.02)
    hangs, go_on = threading.Event(), threading.Event()
    async with Pair(tmp_path, "shm").running() as pair:
        await pair.link()
        copy_in = pair.target.copy_in

        def hang_once(block_ids: Any, *args: Any) -> int:
            if not hangs.is_set():
                hangs.set()
                assert go_on.wait(WAIT_S)
            return copy_in(block_ids, *args)

        accept = ShardChecks.accept

        def accept_late(*args: Any, **credit: Any) -> None:
            if not hangs.is_set():
                time.sleep(0.1)  # as where the reading thread gets no core: no other may overtake it
            accept(*args, **credit)

        monkeypatch.setattr(ShardChecks, "accept", accept_late)
        monkeypatch.setattr(pair.target, "copy_in", hang_once)
        commit = asyncio.create_task(pair.start().commit(11, FIRST_TOKEN))
        await until(hangs)
        await pair.start(ExpectedTransfer("other", 1, (5, 8, 7), 0, 11)).commit(11, FIRST_TOKEN)
        go_on.set()
        await commit
        assert [transfer_id for transfer_id, _ in pair.outcomes.committed] == ["other", "transfer"]
        await pair.require_working()


@pytest.mark.parametrize("is_known", [False, True])
async def test_a_link_that_the_receiver_closes_as_a_transfer_opens_costs_no_transfer(
    tmp_path: Path, is_known: bool
) -> None:
    async with Pair(tmp_path, "shm").running() as pair:
        await pair.link()
        (transport,) = pair.receiver._transports
        (arena,) = transport._arenas._entries  # type: ignore[attr-defined]
        if is_known:  # the opening waits at the receiver as the link is closed
            commit = asyncio.create_task(pair.start().commit(11, FIRST_TOKEN))
            await turn_until(lambda: bool(pair.links[0]._calls))
        transport._arenas._close(arena)  # type: ignore[attr-defined]
        if not is_known:
            commit = asyncio.create_task(pair.start().commit(11, FIRST_TOKEN))
        assert (await commit).transport == "shm"
        assert pair.outcomes.failed == []
        await pair.require_working()


async def test_garbage_on_a_link_ends_no_more_than_the_link(tmp_path: Path) -> None:
    async with Pair(tmp_path, "shm").running() as pair:
        await pair.link()
        (link,) = pair.links
        call = link.call()
        call.send(b"\xff\xff")
        with pytest.raises(InvalidRequest):
            await call.read()
        await pair.require_working()
        link._socket.send(b"short")
        await turn_until(lambda: not pair.links)
        pair.outcomes.committed.clear()
        await pair.require_working()


@pytest.mark.parametrize("phase", ["writing", "idle"])
async def test_a_killed_sender_fails_its_transfer_and_its_arena_is_removed(tmp_path: Path, phase: str) -> None:
    async with Pair(tmp_path, "shm").running() as pair:
        if phase == "writing":
            pair.target.writing.close()
        process = await pair.start_process(transports=["shm"], shm_dir=str(tmp_path))
        process.send_signal(signal.SIGKILL)
        await process.wait()
        pair.target.writing.open()
        assert isinstance(await pair.failure(), TransferFailed)
        (transport,) = pair.receiver._transports
        await turn_until(lambda: len(transport._arenas) == 0)  # type: ignore[attr-defined]
        assert len(arenas(tmp_path)) == 2
        await pair.require_working()
        next_sender = KVSender(pair.source, "prefill-1", Credentials(KEY), pair.settings)
        assert len(arenas(tmp_path)) == 2
        await next_sender.close()
        assert len(arenas(tmp_path)) == 1


async def test_idle_connections_are_closed() -> None:
    pool = ConnectionPool(idle_s=0, tls=None, max_chunks=1)
    with pool.use("127.0.0.1:1") as first, pool.use("127.0.0.1:1") as second:
        assert first is second
    assert len(pool) == 1
    await turn_until(lambda: len(pool) == 0)
    with pool.use("127.0.0.1:1"):
        pass
    await pool.close()
    assert len(pool) == 0


def test_blocks_too_large_for_a_message_are_refused_at_start() -> None:
    layout = replace(TINY, num_kv_heads=1024, head_dim=1024)
    store = FakeKVStore(num_blocks=1)
    store.layout = layout
    with pytest.raises(ConfigurationError, match="use smaller blocks"):
        KVSender(store, "prefill-0", Credentials(KEY))


@pytest.mark.parametrize("phase", range(0, 24, 3))
async def test_abort_storm_leaves_nothing(shm_pair: Pair, phase: int) -> None:
    """Transfers aborted after ever more turns of the loop, by either side; then a clean one."""
    pair = shm_pair

    async def one(number: int) -> None:
        reservation = ExpectedTransfer(f"t{number}", 1, (4, 9, 2), 0, 11)
        transfer = pair.start(reservation)
        commit = asyncio.create_task(transfer.commit(11, FIRST_TOKEN))
        for _ in range(phase * (number + 1)):
            await asyncio.sleep(0)
        sides: list[Callable[[], Any]] = [transfer.abort, lambda: pair.receiver.abort(reservation.transfer_id)]
        for side in sides if number % 2 else reversed(sides):
            await side()
        await asyncio.gather(commit, return_exceptions=True)

    await asyncio.gather(*(one(number) for number in range(6)))
    pair.require_slots_back()
    assert pair.receiver._incoming == {}
    await pair.require_working()
