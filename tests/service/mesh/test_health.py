"""grpc.health.v1 beside clients that take no data."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import tandem
from gateway.backend import RouterHealth
from mesh.rpc.channel import open_channel
from mesh.rpc.credentials import MeshKey
from mesh.rpc.health import METHODS, Health
from mesh.rpc.server import Listen, Server
from tests.defects import Repaired
from tests.zero_window import zero_window_call

WATCH = "/grpc.health.v1.Health/Watch"
REFLECT = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
LIST_SERVICES = b"\x3a\x01*"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
SOON_S = 20.0

Make = Callable[..., Awaitable[Server]]


@pytest.fixture
async def make_server() -> AsyncIterator[Make]:
    servers: list[Server] = []

    async def make(**limits: float) -> Server:
        server = Server(Listen("127.0.0.1", 0, MeshKey("a-key-for-tests-only")), Health(**limits))
        servers.append(server)
        await server.start([])
        return server

    yield make
    for server in servers:
        await server.stop(0)


async def until_watched(server: Server, num_watchers: int) -> None:
    """Return when so many Watch calls are open. They come over other connections than this test's own."""
    async with asyncio.timeout(SOON_S):
        while len(server.health._watchers) != num_watchers:  # noqa: ASYNC110  (nothing tells of it)
            await asyncio.sleep(0.01)


async def test_a_watcher_that_takes_nothing_holds_up_nobody(make_server: Make, repaired: Repaired) -> None:
    server = await make_server()
    async with AsyncExitStack() as stack:
        stuck = [await stack.enter_async_context(zero_window_call(server.address, WATCH)) for _ in range(20)]
        await stack.enter_async_context(zero_window_call(server.address, REFLECT, LIST_SERVICES))
        await until_watched(server, len(stuck))
        channel = await stack.enter_async_context(open_channel(server.address))
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=SOON_S)
        assert (await watch.read()).status == NOT_SERVING
        async with asyncio.timeout(SOON_S):
            server.set_serving(True)
            assert (await watch.read()).status == SERVING
        client = await stack.enter_async_context(tandem.AsyncClient(server.address))
        assert await RouterHealth(client).is_ready()
        await client.wait_ready(SOON_S)
        began_s = time.monotonic()
        stopping = asyncio.create_task(server.stop(0.5))
        assert (await watch.read()).status == NOT_SERVING
        await asyncio.wait_for(stopping, SOON_S)
        took_s = time.monotonic() - began_s
    repaired(
        "D2", f"20 such watchers: health changes, readiness is 200, a server with 0.5 s of grace ends in {took_s:.1f} s"
    )


async def test_a_watcher_that_takes_nothing_is_dropped(make_server: Make) -> None:
    server = await make_server(write_limit_s=0.2)
    async with zero_window_call(server.address, WATCH) as stuck:
        await stuck.has_headers.wait()
        await until_watched(server, 0)
        async with open_channel(server.address) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=SOON_S)
            assert (await watch.read()).status == NOT_SERVING
            server.set_serving(True)
            assert (await watch.read()).status == SERVING, "one that reads stays"
            watch.cancel()


async def test_there_is_a_limit_on_watchers(make_server: Make) -> None:
    server = await make_server(max_watchers=2)
    async with open_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watches = [stub.Watch(health_pb2.HealthCheckRequest(service="a"), timeout=SOON_S) for _ in range(2)]
        assert [(await watch.read()).status for watch in watches] == [UNKNOWN, UNKNOWN]
        for name, code in (("", grpc.StatusCode.RESOURCE_EXHAUSTED), ("x" * 257, grpc.StatusCode.INVALID_ARGUMENT)):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Watch(health_pb2.HealthCheckRequest(service=name), timeout=SOON_S).read()
            assert refused.value.code() is code
        watches[0].cancel()
        await until_watched(server, 1)
        again = stub.Watch(health_pb2.HealthCheckRequest(), timeout=SOON_S)
        assert (await again.read()).status == NOT_SERVING
        again.cancel()
        watches[1].cancel()


async def test_list_and_check_need_no_credential(make_server: Make, repaired: Repaired) -> None:
    server = await make_server()
    server.set_serving(True)
    server.set_serving(False, "decode")
    async with open_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        listed = await stub.List(health_pb2.HealthListRequest(), timeout=SOON_S)
        assert {name: answer.status for name, answer in listed.statuses.items()} == {"": SERVING, "decode": NOT_SERVING}
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await stub.Check(health_pb2.HealthCheckRequest(service="nobody"), timeout=SOON_S)
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
    assert {name.rpartition("/")[2] for name in METHODS} == set(
        health_pb2.DESCRIPTOR.services_by_name["Health"].methods_by_name
    )
    repaired("D16", "Health/List: all statuses, with and without keys")


def test_nothing_serves_again_after_the_end() -> None:
    health = Health()
    health.set_serving(True)
    health.end()
    health.set_serving(True)
    assert health._statuses == {"": NOT_SERVING}
