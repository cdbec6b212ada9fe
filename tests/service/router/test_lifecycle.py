"""Start, readiness, credentials, stop."""

import asyncio
import json
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from mesh.domain.errors import ConfigurationError
from mesh.v1 import worker_pb2_grpc
from tandem.v1 import generation_pb2, mesh_pb2, mesh_pb2_grpc
from tests.defects import Repaired
from tests.exposition import scrape
from tests.fakes.router_workers import FakeDecodeWorker, expected_tokens
from tests.processes import running_process
from tests.service.conftest import Mesh, make_request
from tests.waiting import LIMIT_S

PROMPT = [65, 66, 67]
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
KEY = "0123456789abcdef"


async def health(mesh: Mesh, service: str = "") -> int:
    stub = health_pb2_grpc.HealthStub(mesh.channel)
    status: int = (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status
    return status


async def watch_until(mesh: Mesh, wanted: int, service: str = "tandem.v1.Generation") -> None:
    stub = health_pb2_grpc.HealthStub(mesh.channel)
    call = stub.Watch(health_pb2.HealthCheckRequest(service=service), timeout=LIMIT_S)
    async for response in call:
        if response.status == wanted:
            call.cancel()
            return


async def test_health_follows_the_mesh(make_mesh: Any, capsys: pytest.CaptureFixture[str]) -> None:
    mesh = await make_mesh()
    await watch_until(mesh, NOT_SERVING)
    decode = await mesh.decode()
    await watch_until(mesh, SERVING)
    assert await health(mesh) == SERVING
    assert '{"event": "ready"}' in capsys.readouterr().out
    await decode.kill()
    await watch_until(mesh, NOT_SERVING)
    assert await health(mesh) == NOT_SERVING


async def test_the_first_health_waits_for_a_prefill_worker_where_one_is_expected(
    make_mesh: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two. Once it has served, the mesh may do without: decode workers prefill by themselves."""
    mesh = await make_mesh(expect_prefill=2)
    decode = await mesh.decode()
    await watch_until(mesh, SERVING, "decode")
    assert [await health(mesh), await health(mesh, "prefill")] == [NOT_SERVING, NOT_SERVING]
    assert (await mesh.generate(token_ids=PROMPT, max_new_tokens=3)).ids() == expected_tokens(PROMPT, 3)
    first = await mesh.prefill("prefill-0")
    await watch_until(mesh, SERVING)
    await watch_until(mesh, SERVING, "prefill")
    assert '"ready"' not in capsys.readouterr().out  # the other one is still expected
    await first.kill()
    await watch_until(mesh, NOT_SERVING, "prefill")
    assert await health(mesh) == SERVING
    await mesh.prefill("prefill-1")
    await mesh.prefill("prefill-2")
    await mesh.until(lambda: mesh.router._readiness._announced)
    assert '{"event": "ready"}' in capsys.readouterr().out
    await decode.kill()
    await watch_until(mesh, NOT_SERVING)
    assert await health(mesh, "decode") == NOT_SERVING


async def test_a_broken_link_is_opened_again(make_mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.workers.decode_link._FIRST_RETRY_S", 0.01)
    mesh = await make_mesh()
    decode = await mesh.decode()
    decode.break_links()
    await mesh.until(lambda: mesh.router._links.find(decode.info) is None)
    decode.beat()
    await mesh.until(lambda: mesh.router._links.find(decode.info) is not None)
    assert (await mesh.generate(token_ids=PROMPT, max_new_tokens=3)).ids() == expected_tokens(PROMPT, 3)


async def test_a_broken_link_leaves_no_task(make_mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that awaits the next command for ever is destroyed some day, with an error in the log."""
    monkeypatch.setattr("router.workers.decode_link._FIRST_RETRY_S", 0.01)
    mesh = await make_mesh()
    decode = await mesh.decode()
    num_writers = num_tasks("_write_commands")
    assert num_writers > 0
    for _ in range(3):
        decode.break_links()
        await mesh.until(lambda: mesh.router._links.find(decode.info) is None)
        decode.beat()
        await mesh.until(lambda: mesh.router._links.find(decode.info) is not None)
    await mesh.until(lambda: num_tasks("_write_commands") == num_writers)


async def test_workers_that_join_together_are_followed_together(
    make_mesh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look at all workers for each of those that join would cost the square of their number."""
    mesh = await make_mesh()
    first = await mesh.prefill(settle=False)
    sizes: list[int] = []
    reconcile = mesh.router._links.reconcile
    monkeypatch.setattr(
        mesh.router._links, "reconcile", lambda: (sizes.append(len(mesh.router.membership.views())), reconcile())
    )
    for number in range(200):
        mesh.router.membership.join(replace(first.info, worker_id=f"p{number}", incarnation=f"run-{number}"))
    await mesh.until(lambda: sizes and sizes[-1] == 201)
    assert len(sizes) < 5


async def test_a_lost_worker_gets_no_request_from_the_same_moment_on(make_mesh: Any) -> None:
    """Its link and its canaries are looked after a little later."""
    mesh = await make_mesh()
    decode = await mesh.decode()
    assert mesh.model.mesh.has_path
    mesh.router.membership.lose(decode.info)
    assert not mesh.model.mesh.has_path


def num_tasks(name: str) -> int:
    return sum(name in repr(task.get_coro()) for task in asyncio.all_tasks())


async def test_reflection(make_mesh: Any) -> None:
    mesh = await make_mesh()

    def services() -> list[str]:
        with grpc.insecure_channel(mesh.router.public.address) as channel:
            return list(ProtoReflectionDescriptorDatabase(channel).get_services())

    assert {"tandem.v1.Generation", "tandem.v1.Mesh"} <= set(await asyncio.to_thread(services))


async def test_with_a_mesh_key(make_mesh: Any) -> None:
    mesh = await make_mesh(mesh_key=KEY)
    await mesh.prefill()
    await mesh.decode()
    assert (await mesh.generate(token_ids=PROMPT, max_new_tokens=3)).ids() == expected_tokens(PROMPT, 3)
    for key in (None, "0123456789abcdeX"):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await mesh.add(FakeDecodeWorker, "forged", mesh_key=key)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert mesh.router.membership.find("forged") is None


async def test_the_registry_is_not_on_the_public_port(make_mesh: Any) -> None:
    mesh = await make_mesh()
    call = worker_pb2_grpc.RegistryStub(mesh.channel).Register()  # sends nothing: that could fail first, as INTERNAL
    assert await call.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_wide_open_registry_is_refused(model_dir: Path) -> None:
    with pytest.raises(ConfigurationError, match="without credentials"):
        Mesh(model_dir, registry_host="0.0.0.0")


async def test_stop_lets_streams_end_and_refuses_new_ones(make_mesh: Any) -> None:
    mesh = await make_mesh()
    await mesh.prefill()
    decode = await mesh.decode()
    decode.gate.close()
    running = asyncio.create_task(mesh.generate(token_ids=PROMPT, max_new_tokens=5))
    await decode.started.wait_len(1)
    stopping = asyncio.create_task(mesh.router.stop(4 * LIMIT_S))
    await watch_until(mesh, NOT_SERVING)
    await mesh.until(lambda: mesh.model.service._stopping)
    refused = mesh.stub.Generate(make_request(token_ids=PROMPT), timeout=LIMIT_S)
    assert await refused.code() is grpc.StatusCode.UNAVAILABLE
    decode.gate.open()
    assert (await running).ids() == expected_tokens(PROMPT, 5)
    async with asyncio.timeout(LIMIT_S):  # once its streams have ended, not after its grace
        await stopping


async def test_streams_that_outlast_the_grace_end_with_a_status(make_mesh: Any, repaired: Repaired) -> None:
    mesh = await make_mesh()
    decode = await mesh.decode()
    decode.gate.close()
    call = mesh.stub.Generate(make_request(token_ids=PROMPT, max_new_tokens=5), timeout=10)
    await decode.started.wait_len(1)
    await mesh.router.stop(0.05)
    assert await call.code() is grpc.StatusCode.UNAVAILABLE
    assert "stopping" in await call.details()
    await decode.aborted.wait_len(1, timeout_s=1)
    samples = await scrape(mesh.router.metrics.registry)
    assert samples["tandem_request_failure_total", frozenset({("error", "RouterStopping")})] == 1
    assert samples["tandem_request_cancelled_total", frozenset()] == 0
    repaired("D27", "streams that a stopping router cuts off are failures, RouterStopping")


def hold_encoding(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> tuple[asyncio.Event, asyncio.Event]:
    """Let the router's encoder wait. Returns what is set when a prompt has come to it, and what lets it go on."""
    encoder = mesh.model.service._inputs.encoder
    encode, encoding, go_on = encoder.encode, asyncio.Event(), asyncio.Event()

    async def slow(*arguments: Any, **options: Any) -> Any:
        encoding.set()
        await go_on.wait()
        return await encode(*arguments, **options)

    monkeypatch.setattr(encoder, "encode", slow)
    return encoding, go_on


async def test_requests_that_are_still_being_admitted_have_the_grace_too(
    make_mesh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = await make_mesh()
    await mesh.decode()
    encoding, go_on = hold_encoding(mesh, monkeypatch)
    running = asyncio.create_task(mesh.generate(token_ids=PROMPT, max_new_tokens=3))
    await encoding.wait()
    draining = asyncio.create_task(mesh.router._directory.drain(LIMIT_S))
    await asyncio.sleep(0)
    with pytest.raises(grpc.aio.AioRpcError, match="stopping"):
        await mesh.generate(token_ids=PROMPT, max_new_tokens=1)
    assert not draining.done()
    go_on.set()
    assert (await running).ids() == expected_tokens(PROMPT, 3)
    await draining
    mesh.assert_at_rest()


async def test_a_request_admitted_after_the_grace_is_refused(make_mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = await make_mesh()
    decode = await mesh.decode()
    encoding, go_on = hold_encoding(mesh, monkeypatch)
    late = asyncio.create_task(mesh.generate(token_ids=PROMPT, max_new_tokens=3))
    await encoding.wait()
    before = len(decode.started.items)
    await mesh.router._directory.drain(0.05)
    go_on.set()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await late
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert len(decode.started.items) == before
    mesh.assert_at_rest()


async def test_a_request_that_cannot_be_started_gives_its_permits_back(
    make_mesh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any, **options: Any) -> None:
        raise LookupError("unforeseen")

    mesh = await make_mesh()
    await mesh.decode()
    monkeypatch.setattr("router.service.Choice", broken)
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await mesh.generate(token_ids=PROMPT, max_new_tokens=3)
    assert failed.value.code() is grpc.StatusCode.INTERNAL
    mesh.assert_at_rest()


async def test_the_process(model_dir: Path) -> None:
    async with running_process(
        sys.executable,
        *("-m", "router", "--model", str(model_dir), "--port", "0", "--registry-port", "0"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        listening = json.loads(await asyncio.wait_for(process.stdout.readline(), LIMIT_S))
        assert listening["event"] == "listening"
        async with grpc.aio.insecure_channel(listening["address"]) as channel:
            stub = mesh_pb2_grpc.MeshStub(channel)
            assert list((await stub.ListWorkers(mesh_pb2.ListWorkersRequest(), timeout=LIMIT_S)).workers) == []
        process.send_signal(signal.SIGTERM)
        _, errors = await asyncio.wait_for(process.communicate(), LIMIT_S)
    assert process.returncode == 0
    assert b"Traceback" not in errors


async def test_a_wrong_setting_is_one_line(model_dir: Path) -> None:
    async with running_process(
        sys.executable,
        *("-m", "router", "--model", str(model_dir), "--port", "0", "--registry-port", "0"),
        *("--max-input-length", "9999"),
        stderr=asyncio.subprocess.PIPE,
    ) as process:
        _, errors = await asyncio.wait_for(process.communicate(), LIMIT_S)
    assert process.returncode == 2
    assert errors.splitlines()[-1].startswith(b"router: max_input_length must be < max_total_tokens, got 9999 and")


async def test_generation_without_workers_reports_not_ready(make_mesh: Any) -> None:
    mesh = await make_mesh()
    assert not (await mesh.stub.GetModel(generation_pb2.GetModelRequest())).model.ready
