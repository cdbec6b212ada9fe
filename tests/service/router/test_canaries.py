"""Canaries, trips and stalls over real sockets: who gets requests, and when the router says that it serves."""

import asyncio
from typing import Any

import grpc
import pytest

from mesh.domain import errors
from mesh.domain.prefill import KVDestination
from mesh.domain.tokens import SequenceFailure
from mesh.domain.worker import WorkerState
from mesh.rpc.credentials import Credentials
from router.workers.canary import NAMESPACE
from router.workers.connections import RouterIdentity
from router.workers.health import Trust
from router.workers.prefill_client import PrefillClient
from tandem.v1 import mesh_pb2, mesh_pb2_grpc
from tests.defects import Repaired
from tests.evidence import Evidence
from tests.fakes.requests import make_request as make_spec
from tests.fakes.router_workers import BLOCK_SIZE, DecodeScript, FakeWorker, PrefillScript, expected_tokens
from tests.service.conftest import Mesh
from tests.service.router.test_lifecycle import NOT_SERVING, SERVING, health, watch_until
from tests.waiting import LIMIT_S

PROMPT = [65, 66, 67, 68, 69]
COUNT = 10

SICK = DecodeScript(refuse=SequenceFailure.INTERNAL)


def hangs() -> PrefillScript:
    return PrefillScript(hold=asyncio.Event())


def fails() -> PrefillScript:
    return PrefillScript(fail_before_first=errors.TransferFailed("cut"))


async def workers_of(mesh: Mesh) -> list[mesh_pb2.WorkerStatus]:
    stub = mesh_pb2_grpc.MeshStub(mesh.channel)
    return list((await stub.ListWorkers(mesh_pb2.ListWorkersRequest(), timeout=5)).workers)


async def generate(mesh: Mesh, *prompts: list[int]) -> None:
    """All at once, and each exact."""
    results = await asyncio.gather(*(mesh.generate(token_ids=ids, max_new_tokens=COUNT) for ids in prompts))
    assert [result.ids() for result in results] == [expected_tokens(ids, COUNT) for ids in prompts]


async def test_what_a_canary_is(make_mesh: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Tiny, greedy, of whole blocks, cached by nobody, without a permit and without a line of the access log."""
    mesh = await make_mesh(max_concurrent_requests=1)
    prefill, decode = await mesh.prefill(), await mesh.decode()
    [alone, moved] = decode.canaries.items
    [sent] = prefill.canaries.items
    assert (alone.transfer_id, moved.transfer_id) == ("", sent.destination.transfer_id)
    for spec in (alone.sequence, moved.sequence):
        assert len(spec.token_ids) == BLOCK_SIZE + 2
        assert spec.sampling.max_new_tokens == 2
        assert spec.sampling.temperature == 0
        assert NAMESPACE in spec.cache_namespace
    assert alone.sequence.cache_namespace != moved.sequence.cache_namespace
    logged = capsys.readouterr().out
    assert "worker proven" in logged
    assert "finished" not in logged
    assert (prefill.calls.items, decode.started.items) == ([], [])
    await generate(mesh, PROMPT)


async def test_it_serves_only_once_a_canary_went_through(make_mesh: Any) -> None:
    mesh = await make_mesh(no_worker_timeout_s=10.0)
    decode = await mesh.decode(canary=SICK, settle=False)
    await decode.canaries.wait_len(1)
    await watch_until(mesh, NOT_SERVING)
    waiting = asyncio.create_task(generate(mesh, PROMPT))
    await mesh.until(lambda: mesh.model.queue.num_queued == 1)
    await decode.canaries.wait_len(2)
    assert (await health(mesh), decode.started.items) == (NOT_SERVING, [])
    decode.canary = DecodeScript()
    await waiting
    assert await health(mesh) == SERVING


@pytest.mark.parametrize(
    ("canary", "words"),
    [
        (DecodeScript(logprob=float("nan")), "not finite"),
        (DecodeScript(logprob=float("-inf")), "not finite"),
        (DecodeScript(refuse=SequenceFailure.MODEL_FAILED), "scripted"),
    ],
)
async def test_a_worker_that_computes_nan_is_not_proven(
    make_mesh: Any, capsys: pytest.CaptureFixture[str], canary: DecodeScript, words: str, repaired: Repaired
) -> None:
    mesh = await make_mesh()
    decode = await mesh.decode(canary=canary, settle=False)
    await decode.canaries.wait_len(2)
    assert await health(mesh) == NOT_SERVING
    [worker] = await workers_of(mesh)
    assert not worker.serving
    assert words in worker.canary_error
    assert any("canary failed" in line and words in line for line in capsys.readouterr().out.splitlines())
    decode.canary = DecodeScript()
    await watch_until(mesh, SERVING)
    [worker] = await workers_of(mesh)
    assert (worker.serving, worker.canary_error) == (True, "")
    repaired("M7", "a worker whose canary gives NaN gets no requests; its log and `tandem workers` say why")


async def test_a_request_that_the_model_fails_at_is_not_replayed(make_mesh: Any, repaired: Repaired) -> None:
    mesh = await make_mesh()
    decode = await mesh.decode()
    decode.scripts = [DecodeScript(fail_after=(2, SequenceFailure.MODEL_FAILED))]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await mesh.generate(token_ids=PROMPT, max_new_tokens=COUNT)
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.INTERNAL, "scripted")
    assert len(decode.started.items) == 1
    repaired("M7", "one attempt, one INTERNAL status")


async def test_a_worker_that_joins_a_stopping_router_goes_on_with_its_streams(
    make_mesh: Any, repaired: Repaired
) -> None:
    mesh = await make_mesh()
    first = await mesh.decode("decode-0")
    first.gate.close()
    stream = asyncio.create_task(mesh.generate(token_ids=PROMPT, max_new_tokens=COUNT))
    first.gate.allow(3)
    await first.sent.wait_len(3)
    stopping = asyncio.create_task(mesh.router.stop(LIMIT_S))
    await watch_until(mesh, NOT_SERVING)
    await first.kill()
    second = await mesh.decode("decode-1", settle=False)
    assert (await stream).ids() == expected_tokens(PROMPT, COUNT)
    assert len(second.started.items) == 1
    await stopping
    repaired("D20", "the new worker is proven and goes on with the stream")


@pytest.mark.parametrize("canary", [fails, hangs])
async def test_a_sick_prefill_worker_holds_nobody_up(make_mesh: Any, canary: Any) -> None:
    mesh = await make_mesh(canary_timeout_s=0.3)
    sick = await mesh.prefill("prefill-0", canary=canary(), settle=False)
    decode = await mesh.decode(settle=False)
    await generate(mesh, PROMPT)
    await sick.canaries.wait_len(2)
    assert (sick.calls.items, mesh.trust(sick), mesh.trust(decode)) == ([], Trust.NONE, Trust.LOCAL)
    await mesh.prefill("prefill-1", settle=False)
    await mesh.until(lambda: mesh.trust(decode) is Trust.FULL)
    await generate(mesh, PROMPT)
    assert decode.started.items[-1].transfer_id
    sick.canary = PrefillScript()
    await mesh.until(lambda: mesh.is_settled(sick))


async def test_a_sick_decode_worker_holds_nobody_up(make_mesh: Any) -> None:
    mesh = await make_mesh()
    sick = await mesh.decode("decode-0", canary=SICK, settle=False)
    prefill = await mesh.prefill(settle=False)
    well = await mesh.decode("decode-1", settle=False)
    await mesh.until(lambda: mesh.trust(prefill) is mesh.trust(well) is Trust.FULL)
    await generate(mesh, PROMPT)
    assert (len(well.started.items), sick.started.items, mesh.trust(sick)) == (1, [], Trust.NONE)


@pytest.mark.parametrize("failures", [SequenceFailure.INTERNAL, SequenceFailure.KV_REFUSED])
async def test_a_worker_that_fails_requests_gets_none_until_it_is_proven(
    make_mesh: Any, failures: SequenceFailure
) -> None:
    mesh = await make_mesh(trip_after=2)
    sick, well = await mesh.decode("decode-0"), await mesh.decode("decode-1")
    sick.scripts = [DecodeScript(refuse=failures) for _ in range(100)]
    sick.canary = SICK
    for n in range(20):
        await generate(mesh, [*PROMPT, n])
    assert len(sick.started.items) == 2
    assert len(well.started.items) == 20
    sick.canary, sick.scripts = DecodeScript(), []
    await mesh.until(lambda: mesh.is_settled(sick), timeout_s=20.0)
    await generate(mesh, PROMPT)
    assert len(sick.started.items) == 3


async def test_transfers_that_break_leave_decode_workers_with_local_prompts(make_mesh: Any) -> None:
    mesh = await make_mesh()
    prefill, decode = await mesh.prefill(), await mesh.decode()
    prefill.scripts = [fails() for _ in range(100)]
    prefill.canary = fails()
    serving = [await health(mesh)]
    for n in range(10):
        await generate(mesh, [*PROMPT, n])
        serving.append(await health(mesh))
    assert (mesh.trust(prefill), mesh.trust(decode)) == (Trust.NONE, Trust.FULL)
    assert set(serving) == {SERVING}
    assert len(prefill.calls.items) == 3
    assert decode.started.items[-1].transfer_id == ""


async def test_a_dead_workers_streams_trip_it_once_and_move_at_once(make_mesh: Any, evidence: Evidence) -> None:
    """100 streams, one death: all go on elsewhere without a wait for the budget, though that is spent."""
    num_streams = 100
    mesh = await make_mesh(max_replays_per_s=0.001, max_concurrent_requests=num_streams)
    first = await mesh.decode("decode-0", max_num_seqs=num_streams, num_blocks=2000)
    second = await mesh.decode("decode-1", max_num_seqs=num_streams, num_blocks=2000, settle=False)
    await mesh.until(lambda: mesh.is_settled(second))
    mesh.router.membership.heartbeat(second.info, second.load, WorkerState.DRAINING)
    first.gate.close()
    prompts = [[60 + n, 61, 62] for n in range(num_streams)]
    requests = asyncio.create_task(generate(mesh, *prompts))
    await mesh.until(lambda: first.num_running == num_streams)
    second.beat()
    await mesh.until(lambda: mesh.is_settled(second))
    for _ in range(num_streams):
        mesh.model.service._dispatcher._budget.take_s()
    begun_s = asyncio.get_running_loop().time()
    first.break_links()
    await requests
    moved_s = asyncio.get_running_loop().time() - begun_s
    evidence(
        "R6",
        "100 streams of a lost worker, done elsewhere",
        f"{moved_s:.2f} s",
        target="<= 5 s",
        ok=moved_s <= 5,
        is_reported_only=True,
    )
    assert len(second.started.items) == num_streams
    first.beat()
    await mesh.until(lambda: mesh.is_settled(first))


async def test_replays_without_progress_wait_for_the_budget(make_mesh: Any) -> None:
    """20 refusals of 10 requests: each request's first replay is free, at least ten come at the budget's pace."""
    mesh = await make_mesh(max_replays_per_s=20.0)
    decode = await mesh.decode(max_num_seqs=10)
    decode.scripts = [DecodeScript(refuse=SequenceFailure.NO_CAPACITY) for _ in range(20)]
    budget = mesh.model.service._dispatcher._budget
    while budget.take_s() == 0.0:
        pass
    begun_s = asyncio.get_running_loop().time()
    await generate(mesh, *([*PROMPT, n] for n in range(10)))
    assert asyncio.get_running_loop().time() - begun_s > 0.45
    assert len(decode.started.items) == 30


async def stall(mesh: Mesh, worker: FakeWorker, state: WorkerState = WorkerState.STALLED) -> None:
    mesh.router.membership.heartbeat(worker.info, worker.load, state)


async def test_sequences_leave_a_stalled_worker_when_others_can_take_them(make_mesh: Any) -> None:
    mesh = await make_mesh()
    stuck, other = await mesh.decode("decode-0"), await mesh.decode("decode-1")
    stuck.gate.close()
    stuck.gate.allow(3)
    request = asyncio.create_task(generate(mesh, PROMPT))
    await stuck.sent.wait_len(3)
    await stall(mesh, stuck)
    await request
    assert len(other.started.items) == 1
    await mesh.until(lambda: stuck.num_running == 0)  # it was told to drop its part
    await generate(mesh, PROMPT)
    assert len(stuck.started.items) == 1
    mesh.assert_at_rest()


async def test_sequences_wait_at_a_stalled_worker_while_there_is_no_other(make_mesh: Any) -> None:
    mesh = await make_mesh()
    stuck = await mesh.decode("decode-0")
    stuck.gate.close()
    first = asyncio.create_task(generate(mesh, PROMPT))
    await stuck.started.wait_len(1)
    await stall(mesh, stuck)
    await watch_until(mesh, NOT_SERVING)
    second = asyncio.create_task(generate(mesh, PROMPT))
    await mesh.until(lambda: mesh.model.queue.num_queued == 1)
    assert stuck.num_running == 1
    stuck.gate.open()
    await first  # the stall has ended
    await stall(mesh, stuck, WorkerState.READY)
    await second
    assert [start.sequence.attempt for start in stuck.started.items] == [0, 0]


async def test_a_worker_that_joins_takes_over_from_a_stalled_one(make_mesh: Any) -> None:
    mesh = await make_mesh()
    stuck = await mesh.decode("decode-0")
    stuck.gate.close()
    request = asyncio.create_task(generate(mesh, PROMPT))
    await stuck.started.wait_len(1)
    await stall(mesh, stuck)
    other = await mesh.decode("decode-1")
    await request
    assert len(other.started.items) == 1


async def test_prompts_leave_a_stalled_prefill_worker(make_mesh: Any) -> None:
    mesh = await make_mesh()
    prefill, decode = await mesh.prefill(), await mesh.decode()
    prefill.scripts = [hangs()]
    request = asyncio.create_task(generate(mesh, PROMPT))
    await prefill.calls.wait_len(1)
    await stall(mesh, prefill)
    await request
    assert decode.started.items[-1].transfer_id == ""
    await prefill.cancelled.wait_len(1)


@pytest.mark.parametrize(
    ("timeout_s", "time_left_s", "expected"),
    [(10.0, 0.1, errors.DeadlineExceeded), (0.1, 10.0, errors.TransferFailed), (0.1, None, errors.TransferFailed)],
)
async def test_a_request_that_runs_out_of_time_blames_nobody(
    make_mesh: Any, timeout_s: float, time_left_s: float | None, expected: type[Exception]
) -> None:
    mesh = await make_mesh()
    prefill, decode = await mesh.prefill(), await mesh.decode()
    prefill.scripts = [hangs()]
    caller = RouterIdentity("test", Credentials())
    client = PrefillClient(mesh.router.membership, mesh.router._channels, caller, timeout_s=timeout_s)
    spec = make_spec("r", PROMPT, time_left_s=time_left_s)
    with pytest.raises(expected):
        async for _ in client.run(prefill.info, spec, KVDestination.at(decode.info, "t", 0)):
            pass


async def test_a_prefill_worker_that_falls_silent_is_blamed_alone(make_mesh: Any) -> None:
    """Its channel is closed while prompts are on their way; the decode worker has no part in that."""
    mesh = await make_mesh(trip_after=1)
    prefill, decode = await mesh.prefill(), await mesh.decode()
    prefill.scripts = [hangs() for _ in range(4)]
    requests = asyncio.create_task(generate(mesh, *([*PROMPT, n] for n in range(4))))
    await prefill.calls.wait_len(4)
    mesh.router.membership.lose(prefill.info)
    await requests
    assert (mesh.trust(prefill), mesh.trust(decode)) == (Trust.NONE, Trust.FULL)


async def test_canaries_keep_no_figures_of_workers_that_are_gone(make_mesh: Any) -> None:
    mesh = await make_mesh()
    await mesh.decode()
    for run in range(3):
        await mesh.prefill(incarnation=f"prefill-0-{run}")
    known = {view.info.incarnation for view in mesh.model.mesh.views()}
    figures = mesh.model._canaries._in_flight
    await mesh.until(lambda: figures.transfers().keys() <= known)
