"""What operators are told: replays, losses and requests, phase by phase and worker by worker."""

from typing import Any

import grpc
import pytest

from mesh.domain.tokens import SequenceFailure
from tandem._responses import history as history_values
from tandem._responses import mesh as mesh_values
from tandem.v1 import mesh_pb2, mesh_pb2_grpc
from tests.fakes.router_workers import DecodeScript
from tests.service.router.conftest import make_request
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
    await mesh.generate(token_ids=[70] * 8, max_new_tokens=8)
    mesh.router.history.add(mesh.router.reading())
    points = history_values(await stub.GetHistory(mesh_pb2.GetHistoryRequest(), timeout=5))
    assert sum(point.failed_choices for point in points) == 0
    (took,) = [point for point in points if point.first_token_p50_s is not None]
    assert 0 < took.first_token_p50_s <= took.first_token_p95_s < 60
    assert 0 < took.gap_p50_s <= took.gap_p99_s
    recent = mesh_pb2.GetHistoryRequest()
    recent.span.FromMicroseconds(1)
    assert len((await stub.GetHistory(recent, timeout=5)).points) == 1


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
