"""Work nobody waits for any more: workers end it themselves, and what is left does not wait for it."""

import asyncio

import grpc
import pytest

from mesh.v1 import decode_pb2
from tests.evidence import Evidence
from tests.fakes.requests import make_request
from tests.fakes.runner import fake_continuation
from tests.service.fake_router import FakeRouter, fake_router
from tests.service.worker_rig import EngineRig, until, worker_rig

WAIT_S = 60.0
NUM_CANCELLED = 10
LONG = 180
"""Tokens of a long prompt: 12 chunks of at most 16."""


async def test_a_decode_worker_ends_what_is_out_of_time_though_its_router_is_silent() -> None:
    async with worker_rig() as rig, fake_router(rig) as router:
        rig.decode.runner.step_s = 0.05
        await router.start(make_request("runs", [1, 2, 3], max_new_tokens=190, time_left_s=0.4))
        await router.start(make_request("waits for KV", range(1, 20), time_left_s=0.3), "t")
        await router.start(make_request("came too late", [1, 2, 3], time_left_s=0.0))
        for request_id in ("came too late", "waits for KV", "runs"):
            failed = await router.failure(request_id)
            assert failed.reason == decode_pb2.SEQUENCE_FAILURE_DEADLINE
        assert rig.decode_service.num_sequences == 0
        await rig.wait_whole(WAIT_S)


async def test_a_sequence_that_is_in_time_hears_nothing_of_its_deadline() -> None:
    async with worker_rig() as rig, fake_router(rig) as router:
        request = make_request("a", [1, 2, 3], max_new_tokens=6, time_left_s=3600.0)
        await router.start(request)
        assert await router.collect(request) == fake_continuation([1, 2, 3], 6)
        assert rig.decode_service.num_sequences == 0
        await rig.decode_service.drained()


async def test_the_deadline_of_a_prefill_stops_it_within_one_chunk() -> None:
    async with worker_rig() as rig, fake_router(rig) as router:
        rig.prefill.runner.close_gate_after = 2
        request = make_request("a", range(1, LONG))
        await router.start(request, "t")
        await router.box("a").get()
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            async for _ in router.prefill(request, "t", 0, timeout_s=3.0):
                pass
        assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: rig.prefill_service.num_prompts == 0, WAIT_S)
        async with asyncio.timeout(WAIT_S):
            await rig.prefill_service.drained()
        num_steps = rig.prefill.runner.num_steps
        rig.prefill.runner.gate.set()
        await rig.prefill.wait_whole(rig.prefill_engine, WAIT_S)
        assert rig.prefill.runner.num_steps <= num_steps + 1  # the chunk that was being computed


def large() -> EngineRig:
    """Room for all long prompts."""
    return EngineRig.make(num_blocks=600)


async def long_prefills(router: FakeRouter) -> list[grpc.aio.UnaryStreamCall]:
    """Calls for long prompts, each with its place on the decode worker."""
    requests = [make_request(f"long-{i}", [i, *range(1, LONG)]) for i in range(NUM_CANCELLED)]
    for request in requests:
        await router.start(request, request.request_id)
        assert (await router.box(request.request_id).get()).HasField("reserved")
    return [router.prefill(request, request.request_id, 0) for request in requests]


async def test_cancelled_long_prefills_hold_nobody_up(evidence: Evidence) -> None:
    """All ten are cancelled while the first computes its second chunk; then a short one comes."""
    prefill = large()
    async with worker_rig(prefill=prefill, decode=large()) as rig, fake_router(rig) as router:
        prefill.runner.step_s = 0.05
        calls = await long_prefills(router)
        reading = [asyncio.create_task(call.read()) for call in calls]
        await until(lambda: rig.prefill_service.num_prompts == NUM_CANCELLED and prefill.runner.num_steps > 0, WAIT_S)
        for call in calls:
            call.cancel()
        await asyncio.wait(reading)
        steps_before = prefill.runner.num_steps
        clock = asyncio.get_running_loop().time
        began = clock()
        short = make_request("short", [7, 7, 7], max_new_tokens=3)
        assert await router.run(short) == fake_continuation([7, 7, 7], 3)
        waited_s = clock() - began
        wasted = prefill.runner.num_steps - steps_before - 1
        assert wasted < LONG // 16, "a cancelled prompt was computed to its end"
        evidence(
            "R5",
            f"a short request behind {NUM_CANCELLED} cancelled prefills waited",
            f"{waited_s:.2f} s (chunks of {prefill.runner.step_s:g} s)",
            target="<= 0.5 s",
            ok=waited_s <= 0.5,
            is_reported_only=True,
        )
        await rig.prefill.wait_whole(rig.prefill_engine, WAIT_S)


async def test_a_queued_prefill_that_is_cancelled_never_starts(evidence: Evidence) -> None:
    """The first one's chunk is held until the cancellations are with the engine, so that the count is exact."""
    prefill = large()
    async with worker_rig(prefill=prefill, decode=large()) as rig, fake_router(rig) as router:
        prefill.runner.close_gate_after = 1
        calls = await long_prefills(router)
        reading = [asyncio.create_task(call.read()) for call in calls]
        await until(lambda: rig.prefill_service.num_prompts == NUM_CANCELLED, WAIT_S)
        await until(lambda: not prefill.runner.gate.is_set(), WAIT_S)
        for call in calls:
            call.cancel()
        await asyncio.wait(reading)
        async with asyncio.timeout(WAIT_S):
            await rig.prefill_service.drained()
        prefill.runner.gate.set()
        await rig.prefill.wait_whole(rig.prefill_engine, WAIT_S)
        more = prefill.runner.num_steps - 1
        assert prefill.scheduler.load().computed_tokens <= 2 * 16
        evidence(
            "R5",
            "chunks computed after the cancellation (one was begun)",
            more,
            target="<= 1",
            ok=more <= 1,
        )
