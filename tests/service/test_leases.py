"""A transfer is a lease: dead, stopped and silent peers lose it, busy ones keep it."""

import asyncio
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvtransfer import TransferSettings
from kvtransfer.messages import Renew
from mesh.domain.errors import LeaseExpired, TransferFailed
from mesh.domain.request import mint_id
from mesh.durations import duration_to_proto
from mesh.v1 import decode_pb2, kvtransfer_pb2, kvtransfer_pb2_grpc
from tests.evidence import Evidence
from tests.fakes.kv_store import box
from tests.fakes.requests import make_request
from tests.fakes.runner import fake_continuation
from tests.fakes.transfers import FIRST_TOKEN, make_chunk, make_commit, open_message
from tests.service.fake_router import fake_router
from tests.service.raw_sender import honest_messages, raw_sender
from tests.service.stalled_pass import check_stalled_pass
from tests.service.transfer_pair import KEY, RESERVATION, SOURCE_IDS, Pair, announce_all, serving, until
from tests.service.worker_rig import MESH_KEY, worker_rig

LEASE_S = 1.0
WAIT_S = 60.0


def clock() -> float:
    return asyncio.get_running_loop().time()


def scaled(seconds: float, lease_s: float = LEASE_S) -> str:
    return f"after {seconds:.2f} s (lease {lease_s:g} s for 10 s)"


async def test_a_silent_sender_loses_its_lease_once_its_writes_are_done(tmp_path: Path) -> None:
    async with (
        Pair(tmp_path, "grpc", lease_s=LEASE_S).running() as pair,
        raw_sender(pair.server.address, KEY) as sender,
    ):
        pair.receiver.expect(RESERVATION)
        assert await sender.say(open_message(pair.source, RESERVATION)) == "granted"
        pair.target.writing.close()
        chunk = make_chunk(pair.source, RESERVATION, SOURCE_IDS, 0, box(0, 3, 0, 1))
        saying = asyncio.create_task(sender.say(chunk))
        await until(pair.target.writing.arrived)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2 * LEASE_S):
                await pair.outcomes.changed.wait()  # not before the write in flight has ended
        pair.target.writing.open()
        assert isinstance(await pair.failure(), LeaseExpired)
        assert await saying in ("", "ack")
        assert await sender.refused() is grpc.StatusCode.ABORTED
        assert pair.target.writing.num_inside == 0
        await pair.require_working()


async def test_renewals_alone_keep_a_lease(tmp_path: Path) -> None:
    async with (
        Pair(tmp_path, "grpc", lease_s=LEASE_S).running() as pair,
        raw_sender(pair.server.address, KEY) as sender,
    ):
        pair.receiver.expect(RESERVATION)
        await sender.say(open_message(pair.source, RESERVATION))
        began = clock()
        while clock() - began < 2.5 * LEASE_S:
            assert await sender.say(Renew()) == "renewed"
            await asyncio.sleep(LEASE_S / 5)
        chunks = [make_chunk(pair.source, RESERVATION, SOURCE_IDS, layer, box(0, 3, layer, 1)) for layer in range(3)]
        assert await sender.say_all([*chunks, make_commit(RESERVATION, chunks)]) is grpc.StatusCode.OK
        assert pair.outcomes.committed == [("transfer", FIRST_TOKEN)]


async def test_a_reservation_nobody_opens_is_given_up(tmp_path: Path) -> None:
    async with Pair(tmp_path, "grpc", opening_lease_s=LEASE_S).running() as pair:
        pair.receiver.expect(replace(RESERVATION, transfer_id="aborted"))
        await pair.receiver.abort("aborted")
        pair.receiver.expect(RESERVATION)
        assert isinstance(await pair.failure(), LeaseExpired)
        with pytest.raises(TransferFailed, match="not expected"):
            await pair.open().commit(11, FIRST_TOKEN)
        pair.receiver.expect(RESERVATION)
        transfer = pair.open()
        announce_all(transfer)
        await transfer.commit(11, FIRST_TOKEN)
        await asyncio.sleep(1.5 * LEASE_S)
        assert len(pair.outcomes.failed) == 1  # neither the aborted nor the opened one


class Silent(kvtransfer_pb2_grpc.KvTransferServicer):
    """Grants a transfer and is never heard of again, as a stopped process or a cut network looks from outside."""

    def __init__(self) -> None:
        self.granted_at: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    async def Push(self, request_iterator: Any, context: Any) -> AsyncIterator[kvtransfer_pb2.PushResponse]:
        await anext(request_iterator)
        granted = kvtransfer_pb2.TransferGranted(transport="grpc", credit_chunks=2, lease=duration_to_proto(LEASE_S))
        yield kvtransfer_pb2.PushResponse(granted=granted)
        self.granted_at.set_result(clock())
        await asyncio.Event().wait()


async def test_a_silent_receiver_is_given_up_though_it_owes_nothing(tmp_path: Path) -> None:
    async with Pair(tmp_path, "grpc", lease_s=LEASE_S).running() as pair, serving(Silent()) as silent:
        transfer = pair.open(address=silent.address)
        with pytest.raises(TransferFailed, match=r"the receiver has sent nothing for 1 s"):
            async with asyncio.timeout(WAIT_S):
                await transfer.ended()


async def test_prefill_frees_its_blocks_when_the_receiver_is_silent(evidence: Evidence) -> None:
    settings = TransferSettings(transports=("grpc",), lease_s=LEASE_S)
    async with worker_rig(settings=settings) as rig, fake_router(rig) as router:
        servicer = Silent()
        async with serving(servicer, MESH_KEY) as silent:
            rig.decode_address = silent.address
            call = router.prefill(make_request("a", range(1, 60)), "t", 0)
            granted_at = await servicer.granted_at
            assert rig.prefill.scheduler.pool.num_free < rig.prefill.scheduler.pool.num_blocks
            await rig.prefill.wait_whole(rig.prefill_engine, WAIT_S)
            freed_s = clock() - granted_at
            with pytest.raises(grpc.aio.AioRpcError, match="the receiver has sent nothing"):
                async for _ in call:
                    pass
        evidence(
            "R8",
            "prefill side frees blocks of a silent receiver",
            scaled(freed_s),
            target="<= 1 lease",
            ok=freed_s <= LEASE_S + 0.5,
            is_reported_only=True,
        )


async def test_a_stalled_forward_pass_loses_no_lease(evidence: Evidence) -> None:
    await check_stalled_pass(lease_s=1.0, stall_s=6.0, evidence=evidence)


async def test_a_silent_sender_frees_the_decode_workers_blocks_and_the_router_is_told(evidence: Evidence) -> None:
    settings = TransferSettings(transports=("grpc",), lease_s=LEASE_S)
    async with (
        worker_rig(settings=settings) as rig,
        fake_router(rig) as router,
        raw_sender(rig.decode_address, MESH_KEY) as sender,
    ):
        prompt = list(range(1, 30))
        transfer_id = mint_id()
        await router.start(make_request("a", prompt, max_new_tokens=6), transfer_id)
        await router.box("a").get()
        opening, chunk, *_ = honest_messages(prompt, transfer_id)
        assert await sender.say(opening) == "granted"
        assert await sender.say(chunk) == "ack"
        silent_since = clock()
        failed = (await router.box("a").get()).failed
        told_s = clock() - silent_since
        assert failed.reason == decode_pb2.SEQUENCE_FAILURE_KV_MISSING
        assert "the sender has sent nothing" in failed.detail
        await rig.decode.wait_whole(rig.decode_engine, WAIT_S)
        replay = make_request("a", prompt, attempt=1, max_new_tokens=6)
        assert await router.run(replay) == fake_continuation(prompt, 6)
        evidence(
            "R7",
            "reservation of a silent sender freed, router told",
            scaled(told_s),
            target="<= 1 lease",
            ok=told_s <= LEASE_S + 0.5,
            is_reported_only=True,
        )


@pytest.mark.parametrize("transport", ["grpc", "gloo"])
async def test_a_stopped_sender_process_loses_its_lease(tmp_path: Path, evidence: Evidence, transport: str) -> None:
    lease_s = 1.5
    async with Pair(tmp_path, transport, lease_s=lease_s).running() as pair:
        process = await pair.start_process(transports=[transport])
        try:
            await asyncio.sleep(1.5 * lease_s)  # it renews
            assert pair.outcomes.failed == []
            process.send_signal(signal.SIGSTOP)
            stopped_at = clock()
            assert isinstance(await pair.failure(), LeaseExpired)
            freed_s = clock() - stopped_at
        finally:
            process.kill()
            await process.wait()
        await pair.require_working()
        evidence(
            "R7",
            f"reservation of a stopped (SIGSTOP) sender freed, over {transport}",
            scaled(freed_s, lease_s),
            target="<= 1 lease",
            ok=freed_s <= lease_s + 0.5,
            is_reported_only=True,
        )
