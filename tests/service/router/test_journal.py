"""What operators are told: replays, losses and requests, phase by phase and worker by worker."""

from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from mesh.domain.errors import InvalidRequest
from mesh.domain.tokens import SequenceFailure
from mesh.domain.worker import WorkerRole, WorkerState
from tandem._responses import history as history_values
from tandem._responses import mesh as mesh_values
from tandem.v1 import mesh_pb2, mesh_pb2_grpc
from tests.exposition import scrape
from tests.fakes.router_workers import DecodeScript
from tests.service.conftest import make_request
from tests.waiting import LIMIT_S


async def told(mesh: Any) -> Any:
    """The operators' view, as the SDK gives it."""
    stub = mesh_pb2_grpc.MeshStub(mesh.channel)
    return mesh_values(await stub.ListWorkers(mesh_pb2.ListWorkersRequest(), timeout=5))


async def test_a_replayed_request_is_told_with_its_workers(make_mesh: Any) -> None:
    mesh = await make_mesh()
    await mesh.prefill()
    decode = await mesh.decode()
    moved = (await told(mesh)).workers[0].transferred_bytes
    decode.pace_s = 0.05  # so that no attempt ends before its transfer is heard to be complete
    decode.scripts = [DecodeScript(fail_after=(3, SequenceFailure.PREEMPTED))]
    result = await mesh.generate(token_ids=[70] * 8, max_new_tokens=8)
    view = await told(mesh)
    assert (view.ended_choices, view.failed_choices, view.replays) == (1, 0, 1)
    (trace,) = view.traces
    assert trace.request_id == result.messages[0].prompt.request_id
    assert (trace.prompt_tokens, trace.completion_tokens, trace.finish_reason.value) == (8, 8, "length")
    assert [place.failure for place in trace.places] == ["SequencePreempted", ""]
    assert {(place.prefill_worker, place.decode_worker) for place in trace.places} == {("prefill-0", "decode-0")}
    assert len(trace.timing.attempts) == 2
    replayed = view.incidents[0]
    assert (replayed.kind, replayed.request_id, replayed.cause) == ("replayed", trace.request_id, "SequencePreempted")
    assert [worker.transferred_bytes - moved for worker in view.workers] == [2, 2], "a byte for each fake transfer"
    assert all(worker.serving and worker.open_transfers == 0 for worker in view.workers)


async def test_lost_workers_and_failed_requests_are_told(make_mesh: Any) -> None:
    mesh = await make_mesh(no_worker_timeout_s=0.05)
    decode = await mesh.decode()
    await decode.kill()
    await mesh.until(lambda: not mesh.model.mesh.has_path)
    with pytest.raises(grpc.aio.AioRpcError):
        await mesh.generate(token_ids=[70] * 8, max_new_tokens=8)
    view = await told(mesh)
    assert [(incident.kind, incident.worker_id) for incident in view.incidents] == [
        ("failed", ""),
        ("lost", "decode-0"),
        ("joined", "decode-0"),
    ]
    assert view.failed_choices == 1
    assert view.traces[0].error == "NoWorkers"
    assert view.traces[0].finish_reason is None
    assert not view.workers[0].serving


async def test_running_requests_are_told_as_far_as_they_have_come(make_mesh: Any) -> None:
    mesh = await make_mesh()
    decode = await mesh.decode()
    decode.gate.close()
    call = mesh.stub.Generate(make_request(token_ids=[70] * 8, max_new_tokens=4), timeout=20)
    await mesh.until(lambda: len(decode.started.items) == 1)
    (before,) = (await told(mesh)).running
    assert (before.prompt_tokens, before.completion_tokens, before.finish_reason, before.error) == (8, 0, None, "")
    assert [place.decode_worker for place in before.places] == ["decode-0"]
    decode.gate.allow(2)
    await mesh.until(lambda: mesh.router.journal.running[0].completion_tokens == 2)
    (after,) = (await told(mesh)).running
    assert after.request_id == before.request_id
    assert after.age_s > before.age_s
    phases = [{name for name, ms in each.timing.phases_ms.items() if ms > 0} for each in (before, after)]
    assert "decode" not in phases[0]
    assert "decode" in phases[1]
    decode.gate.open()
    async for _ in call:
        pass
    view = await told(mesh)
    assert (view.running, view.traces[0].completion_tokens) == ((), 4)


async def test_what_the_queue_waits_for(make_mesh: Any) -> None:
    mesh = await make_mesh()
    decode = await mesh.decode(max_num_seqs=1)
    decode.gate.close()
    request = make_request(token_ids=[70] * 8, max_new_tokens=2)
    calls = [mesh.stub.Generate(request, timeout=20) for _ in range(2)]
    await mesh.until(lambda: mesh.model.queue.num_queued == 1)
    assert (await told(mesh)).shortage == "decode capacity"
    decode.gate.open()
    for call in calls:
        async for _ in call:
            pass
    assert (await told(mesh)).shortage == ""


async def test_a_replay_that_does_not_happen_is_not_counted(make_mesh: Any) -> None:
    mesh = await make_mesh(max_attempts=3)
    decode = await mesh.decode()
    decode.scripts = [DecodeScript(refuse=SequenceFailure.KV_REFUSED)] * 3
    with pytest.raises(grpc.aio.AioRpcError):
        await mesh.generate(token_ids=[70] * 8, max_new_tokens=8)
    view = await told(mesh)
    assert (view.failed_choices, view.replays) == (1, 2)
    assert [incident.kind for incident in view.incidents].count("replayed") == 2


async def test_the_history_has_what_requests_took(make_mesh: Any) -> None:
    mesh = await make_mesh()
    await mesh.prefill()
    await mesh.decode()
    stub = mesh_pb2_grpc.MeshStub(mesh.channel)
    mesh.router.history.add(mesh.router.reading())
    await mesh.generate(token_ids=[70] * 8, max_new_tokens=64)
    mesh.router.history.add(mesh.router.reading())
    points = history_values(await stub.GetHistory(mesh_pb2.GetHistoryRequest(), timeout=5))
    assert sum(point.failed_choices for point in points) == 0
    (took,) = [point for point in points if point.first_token_p50_s is not None]
    assert 0 < took.first_token_p50_s <= took.first_token_p95_s < 60
    assert 0 < took.gap_p50_s <= took.gap_p99_s
    recent = mesh_pb2.GetHistoryRequest()
    recent.span.FromMicroseconds(1)
    assert len((await stub.GetHistory(recent, timeout=5)).points) == 1
    recent.span.seconds = 2**62
    assert len((await stub.GetHistory(recent, timeout=5)).points) == len(points)


async def test_a_drained_worker_gets_nothing_until_it_is_taken_back(make_mesh: Any) -> None:
    mesh = await make_mesh()
    await mesh.prefill()
    await mesh.decode()
    await mesh.decode("decode-1")
    stub = mesh_pb2_grpc.MeshStub(mesh.channel)
    drained = mesh_pb2.SetDrainingRequest(worker_id="decode-0", draining=True)
    await stub.SetDraining(drained, timeout=LIMIT_S)
    await mesh.until(lambda: mesh.model.mesh.serving() == {"prefill-0-1", "decode-1-1"})
    for _ in range(4):
        await mesh.generate(token_ids=[70] * 8, max_new_tokens=8)
    assert {trace.places[0].decode_worker for trace in (await told(mesh)).traces} == {"decode-1"}
    drained.draining = False
    await stub.SetDraining(drained, timeout=LIMIT_S)
    await mesh.until(lambda: "decode-0-1" in mesh.model.mesh.serving())
    with pytest.raises(grpc.aio.AioRpcError, match="there is no worker 'decode-7'"):
        await stub.SetDraining(mesh_pb2.SetDrainingRequest(worker_id="decode-7"), timeout=LIMIT_S)


async def test_roles_are_changed_by_operators_but_for_the_last_of_a_role(make_mesh: Any) -> None:
    mesh = await make_mesh()
    await mesh.prefill(switchable=True)
    first = await mesh.decode(switchable=True)
    stub = mesh_pb2_grpc.MeshStub(mesh.channel)

    async def switch(worker_id: str, role: int = mesh_pb2.WORKER_ROLE_PREFILL) -> None:
        await stub.SwitchRole(mesh_pb2.SwitchRoleRequest(worker_id=worker_id, role=role), timeout=LIMIT_S)

    for worker_id, role, reason in (
        ("decode-7", mesh_pb2.WORKER_ROLE_PREFILL, "there is no worker 'decode-7'"),
        ("decode-0", mesh_pb2.WORKER_ROLE_PREFILL, "decode-0 is the last decode worker that serves"),
        ("prefill-0", mesh_pb2.WORKER_ROLE_DECODE, "prefill-0 is the last prefill worker that serves"),
        ("decode-0", mesh_pb2.WORKER_ROLE_UNSPECIFIED, "role must be prefill or decode, got 0"),
    ):
        with pytest.raises(grpc.aio.AioRpcError, match=reason) as refused:
            await switch(worker_id, role)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    second = await mesh.decode("decode-1", switchable=True)
    await mesh.decode("decode-2")
    with pytest.raises(grpc.aio.AioRpcError, match="decode-2 cannot change its role: start it with `tandem up --swi"):
        await switch("decode-2")
    await switch("decode-0")
    await switch("decode-0", mesh_pb2.WORKER_ROLE_DECODE)
    assert [worker.switchable for worker in (await told(mesh)).workers] == [True, True, False, True]
    assert first.wanted_roles == [WorkerRole.PREFILL, WorkerRole.DECODE]
    await switch("decode-1")
    assert second.wanted_roles == [WorkerRole.PREFILL]


async def test_two_workers_that_agree_at_once_leave_one(make_mesh: Any) -> None:
    """Their heartbeats have not said yet that they drain."""
    mesh = await make_mesh()
    workers = [await mesh.decode(f"decode-{number}", switchable=True) for number in range(2)]
    switch = mesh.router._control.switch_role
    await switch("decode-0", WorkerRole.PREFILL)
    with pytest.raises(InvalidRequest, match="decode-1 is the last decode worker that serves"):
        await switch("decode-1", WorkerRole.PREFILL)
    await switch("decode-0", WorkerRole.DECODE)
    await switch("decode-1", WorkerRole.PREFILL)
    assert [len(worker.wanted_roles) for worker in workers] == [2, 1]


async def test_an_orderly_leave_is_no_loss(make_mesh: Any) -> None:
    """One worker stops, another one changes its role: what operators see, read in the log, and count."""
    mesh = await make_mesh()
    await mesh.decode("decode-0")
    stopping, switching = await mesh.decode("decode-1"), await mesh.decode("decode-2")
    with capture_logs() as logs:
        for worker, farewell in ((stopping, WorkerState.STOPPED), (switching, WorkerState.SWITCHING)):
            worker.beat(WorkerState.DRAINING)
            worker.end_links()
            worker.beat(farewell)
            await mesh.until(lambda name=worker.info.worker_id: mesh.router.membership.find(name).state.is_gone)
            await worker.kill()
    states = {worker.worker_id: worker.state for worker in (await told(mesh)).workers}
    assert states == {"decode-0": "ready", "decode-1": "stopped", "decode-2": "switching"}
    await mesh.prefill("decode-2", incarnation="decode-2-2")
    incidents = [(each.kind, each.worker_id) for each in (await told(mesh)).incidents][:4]
    assert incidents == [
        ("switched", "decode-2"),
        ("draining", "decode-2"),
        ("stopped", "decode-1"),
        ("draining", "decode-1"),
    ]
    assert [line["state"] for line in logs if line["event"] == "worker left"] == ["stopped", "switching"]
    assert not [line for line in logs if line["event"] == "worker lost" or "broken" in line["event"]]
    samples = await scrape(mesh.router.metrics.registry)
    kinds = {kind: samples["tandem_incidents_total", frozenset({("kind", kind)})] for kind in ("stopped", "lost")}
    assert kinds == {"stopped": 1, "lost": 0}
    assert (await mesh.generate(token_ids=[70] * 8, max_new_tokens=8)).ids()


async def test_a_worker_that_ends_its_streams_in_order_is_not_lost(make_mesh: Any) -> None:
    """Though its stream ends before its last heartbeat says why."""
    mesh = await make_mesh()
    worker = await mesh.decode("decode-0")
    with capture_logs() as logs:
        worker.beat(WorkerState.DRAINING)
        await mesh.until(lambda: mesh.router.membership.find("decode-0").state is WorkerState.DRAINING)
        worker.end_links()
        await mesh.until(lambda: worker.info.incarnation in mesh.router._links._num_failures)
        worker.beat(WorkerState.STOPPED)
        await mesh.until(lambda: mesh.router.membership.find("decode-0").state is WorkerState.STOPPED)
    incidents = [each.kind for each in (await told(mesh)).incidents]
    assert incidents[:2] == ["stopped", "draining"]
    assert not [line for line in logs if line["event"] == "worker lost" or "broken" in line["event"]]


async def test_a_worker_that_comes_back_in_another_role_is_told_as_switched(make_mesh: Any) -> None:
    mesh = await make_mesh()
    await mesh.decode("decode-0")
    switching = await mesh.decode("decode-1")
    await switching.kill()
    await mesh.prefill("decode-1", incarnation="decode-1-2")
    incidents = [(each.kind, each.cause) for each in (await told(mesh)).incidents if each.worker_id == "decode-1"]
    assert incidents == [("switched", "prefill from now on"), ("lost", ""), ("joined", "")]
    samples = await scrape(mesh.router.metrics.registry)
    assert samples["tandem_incidents_total", frozenset({("kind", "switched")})] == 1
    assert (await mesh.generate(token_ids=[70] * 8, max_new_tokens=8)).ids()
