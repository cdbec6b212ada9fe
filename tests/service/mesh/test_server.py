"""What every server of the mesh does: statuses, credentials, ports."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from mesh.domain import errors
from mesh.domain.errors import ConfigurationError, MeshError
from mesh.rpc import health
from mesh.rpc.channel import open_channel
from mesh.rpc.credentials import MeshKey
from mesh.rpc.probe import main as probe
from mesh.rpc.request_reader import RequestReader
from mesh.rpc.server import Listen, Server, require_free
from mesh.rpc.status import STATUS_BY_ERROR, error_from_rpc
from mesh.v1 import worker_pb2, worker_pb2_grpc
from tests.defects import Repaired
from tests.waiting import LIMIT_S


def all_errors(base: type[MeshError] = MeshError) -> list[type[MeshError]]:
    return [cls for child in base.__subclasses__() for cls in (child, *all_errors(child))]


class Failing(worker_pb2_grpc.WorkerServicer):
    def __init__(self, error: BaseException) -> None:
        self.error = error

    async def GetWorker(self, request, context):
        raise self.error


async def call(error: BaseException) -> grpc.aio.AioRpcError:
    server = Server(Listen("127.0.0.1", 0))
    worker_pb2_grpc.add_WorkerServicer_to_server(Failing(error), server.grpc)
    await server.start(["mesh.v1.Worker"])
    async with open_channel(server.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await worker_pb2_grpc.WorkerStub(channel).GetWorker(worker_pb2.GetWorkerRequest(), timeout=5)
    await server.stop(0)
    return raised.value


@pytest.mark.parametrize("num_steps", range(4))
async def test_a_server_whose_start_is_cancelled_can_be_stopped(num_steps: int) -> None:
    server = Server(Listen("127.0.0.1", 0))
    starting = asyncio.create_task(server.start([]))
    for _ in range(num_steps):  # of the event loop
        await asyncio.sleep(0)
    starting.cancel()
    async with asyncio.timeout(LIMIT_S):
        with suppress(asyncio.CancelledError):
            await starting
        await server.stop(0)


def test_every_error_has_a_status() -> None:
    assert set(STATUS_BY_ERROR) == set(all_errors())


@pytest.mark.parametrize("cls", all_errors(), ids=lambda cls: cls.__name__)
async def test_error_arrives_as_itself(cls: type[MeshError]) -> None:
    raised = await call(cls("because"))
    assert raised.code() is STATUS_BY_ERROR[cls]
    back = error_from_rpc(raised)
    assert type(back) is cls
    assert str(back) == "because"


@pytest.mark.parametrize("char", ["x", "%", "\n", "é", "日", "😀", "\ud800"])
async def test_an_error_with_a_long_message_arrives_as_itself(char: str) -> None:
    """gRPC's limit on trailing metadata counts the bytes of the percent-encoded message."""
    raised = await call(errors.ModelNotFound("none is " + 1_000_000 * char))
    assert raised.code() is grpc.StatusCode.NOT_FOUND
    details = raised.details() or ""
    assert details.startswith("none is ")
    assert details.endswith("...")
    assert 300 < len(details) < 4100
    raised = await call(errors.ModelNotFound(1000 * char))
    assert raised.code() is grpc.StatusCode.NOT_FOUND
    assert len(raised.details() or "") >= 341


async def test_overloaded_says_when_to_come_back() -> None:
    raised = await call(errors.Overloaded("full", retry_after_s=0.25))
    assert dict(raised.trailing_metadata())["retry-after-ms"] == "250"


class Panic(BaseException):
    """As pyo3 raises for a panic in Rust, in a tokenizer for one."""


@pytest.mark.parametrize("error", [KeyError("secret detail"), Panic("secret detail")])
async def test_bug_is_internal_and_shows_nothing(error: BaseException) -> None:
    raised = await call(error)
    assert raised.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in raised.details()


async def test_garbage_is_an_invalid_request() -> None:
    server = Server(Listen("127.0.0.1", 0))
    worker_pb2_grpc.add_WorkerServicer_to_server(Failing(KeyError()), server.grpc)
    await server.start(["mesh.v1.Worker"])
    async with open_channel(server.address) as channel:
        send = channel.unary_unary("/mesh.v1.Worker/GetWorker", request_serializer=None, response_deserializer=None)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await send(b"\xff\xff\xff\xff", timeout=5)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await server.stop(0)


async def unsent(channel: grpc.aio.Channel, path: str, limit_s: float) -> grpc.StatusCode:
    """The status of a unary call whose request does not come. A message that is sent by halves looks the same."""
    never = asyncio.Event()

    async def requests() -> AsyncIterator[bytes]:
        await never.wait()
        yield b""

    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await channel.stream_unary(path)(requests(), timeout=limit_s)
    return raised.value.code()


async def test_no_request_is_read_before_its_credential_or_for_ever(
    monkeypatch: pytest.MonkeyPatch, repaired: Repaired
) -> None:
    monkeypatch.setattr(RequestReader.__init__, "__defaults__", (0.5,))
    monkeypatch.setattr(health, "REQUEST_LIMIT_S", LIMIT_S)
    servers = [Server(Listen("127.0.0.1", 0, guard)) for guard in (None, MeshKey("a-key-for-tests-only"))]
    for server in servers:
        worker_pb2_grpc.add_WorkerServicer_to_server(Failing(errors.InvalidRequest("no")), server.grpc)
        await server.start(["mesh.v1.Worker"])
    get, check = "/mesh.v1.Worker/GetWorker", "/grpc.health.v1.Health/Check"
    async with open_channel(servers[0].address) as free, open_channel(servers[1].address) as guarded:
        assert await unsent(guarded, get, LIMIT_S) is grpc.StatusCode.UNAUTHENTICATED
        assert await unsent(free, get, LIMIT_S) is grpc.StatusCode.DEADLINE_EXCEEDED
        calls = [asyncio.create_task(unsent(guarded, check, LIMIT_S)) for _ in range(health.MAX_READERS + 5)]
        ended, stuck = await asyncio.wait(calls, timeout=5)
        assert (len(ended), len(stuck)) == (5, health.MAX_READERS)
        asked = health_pb2_grpc.HealthStub(guarded).Check(health_pb2.HealthCheckRequest(), timeout=LIMIT_S)
        assert (await asked).status == health_pb2.HealthCheckResponse.NOT_SERVING
        for call in stuck:
            call.cancel()
        await asyncio.gather(*stuck, return_exceptions=True)
    for server in servers:
        await server.stop(0)
    repaired("D32", "refused unread without a credential, after 60 s with one; 4 unfinished health checks at a time")


async def test_a_call_does_not_keep_the_message_of_its_request() -> None:
    async def raws() -> AsyncGenerator[bytes]:
        yield b"4 MB"
        raise AssertionError("nothing reads on")

    receiver = raws()
    assert await RequestReader().read(receiver) == b"4 MB"
    assert receiver.ag_frame is None


async def test_port_in_use_is_a_clear_error() -> None:
    server = Server(Listen("127.0.0.1", 0))
    with pytest.raises(ConfigurationError, match="in use"):
        Server(Listen("127.0.0.1", server.port))
    await server.stop(0)


@pytest.mark.parametrize("host", ["nowhere.invalid", "192.0.2.1"])
def test_a_host_that_is_not_of_this_machine_is_named(host: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"{host}:\d+, .*: choose an address of this machine as the host"):
        require_free(host, 50051)


@pytest.mark.parametrize("host", ["::1", "[::1]"])
async def test_ipv6_with_and_without_brackets(host: str) -> None:
    server = Server(Listen(host, 0))
    await server.start([])
    server.set_serving(True)
    assert server.address == f"[::1]:{server.port}"
    assert await asyncio.to_thread(probe, [server.address]) == 0
    with pytest.raises(ConfigurationError, match=r"cannot listen on \[::1\]:\d+, "):
        Server(Listen(host, server.port))
    await server.stop(0)


def test_listening_to_the_world_needs_a_key() -> None:
    with pytest.raises(ConfigurationError, match="refusing to listen"):
        Server(Listen("0.0.0.0", 0))
    with pytest.raises(ConfigurationError, match="fewer than 16"):
        MeshKey("short")


async def test_probe_follows_health(capsys: pytest.CaptureFixture[str]) -> None:
    server = Server(Listen("127.0.0.1", 0, MeshKey("a-key-for-tests-only")))
    await server.start([])
    assert await asyncio.to_thread(probe, [server.address]) == 1
    server.set_serving(True)
    assert await asyncio.to_thread(probe, [server.address]) == 0
    await server.stop(0)
    assert await asyncio.to_thread(probe, [server.address]) == 1
    shown = capsys.readouterr()
    assert shown.out == f"{server.address}: NOT_SERVING\n{server.address}: SERVING\n"
    assert shown.err == f"{server.address}: UNAVAILABLE without TLS\n"


def test_probe_says_how_it_is_used(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert (probe([]), probe(["--port"]), probe(["--help"])) == (2, 2, 0)
    assert capsys.readouterr().out.startswith("usage: python -m mesh.rpc.probe HOST:PORT\n")
    monkeypatch.setenv("TANDEM_PUBLIC_TLS_CERT", "cert.pem")
    assert probe(["127.0.0.1:50051"]) == 2
    assert "public_tls_cert and public_tls_key belong together" in capsys.readouterr().err


async def test_a_proxy_of_the_environment_sees_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would see the mesh key."""
    num_connections = 0

    async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        writer.close()

    proxy = await asyncio.start_server(count, "127.0.0.1", 0)
    for name in ("http_proxy", "grpc_proxy", "https_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}")
    for name in ("no_proxy", "no_grpc_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    server = Server(Listen("127.0.0.1", 0))
    await server.start([])
    server.set_serving(True)
    async with open_channel(server.address) as channel:
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
    assert await asyncio.to_thread(probe, [server.address]) == 0
    assert num_connections == 0
    await server.stop(0)
    proxy.close()
