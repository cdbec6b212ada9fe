"""What runs over Redis ends when it is cancelled, also while redis writes. It does so in asyncio.wait_for, which, in
Python 3.11, loses a cancellation that comes in the same moment as the end of the write.
"""

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import pytest
from redis.asyncio.connection import AbstractConnection

from router.admission.shared_limiter import SharedLimiter
from router.settings import RouterSettings
from router.workers.connections import RouterIdentity
from router.workers.membership import Membership
from router.workers.redis_registry import RedisCoordination, RedisRegistry
from tests.fakes.redis_server import RedisServer
from tests.fakes.router_views import no_traffic
from tests.service.mesh.test_registry import KEY, MEMBER, FakeEngine
from tests.unit.router.test_membership import INFO
from tests.waiting import LIMIT_S
from worker.redis_registration import RedisRegistration
from worker.registration import Registration


def runs(url: str) -> dict[str, Coroutine[Any, Any, None]]:
    return {
        "registration": RedisRegistration(url, KEY, Registration(INFO, FakeEngine(), MEMBER)).run(),
        "discovery": RedisRegistry(url, Membership(time.monotonic), MEMBER, no_traffic()).run(),
        "permits": SharedLimiter(url, "router-0", 4).run(),
        "role switching": acting(url),
    }


async def acting(url: str) -> None:
    """Asks as a router does that switches roles."""
    settings = RouterSettings(model="m", registry_url=url, mesh_key=KEY.secret)
    identity = RouterIdentity("router-0", MEMBER)
    coordination = RedisCoordination(settings, Membership(time.monotonic), identity, no_traffic())
    while True:
        assert await coordination.may_act("switch-roles@m", 60)


@pytest.mark.parametrize("number", range(1, 6))
@pytest.mark.parametrize("name", ["registration", "discovery", "permits", "role switching"])
async def test_a_cancellation_that_is_lost_in_a_write(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    """The write of this number lasts until it is cancelled, and hides that."""
    num_writes, lasts, write = 0, asyncio.Event(), AbstractConnection.send_packed_command

    async def written(connection: AbstractConnection, *args: Any, **options: Any) -> None:
        nonlocal num_writes
        num_writes += 1
        is_it = num_writes == number
        await write(connection, *args, **options)
        if is_it:
            lasts.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                return

    monkeypatch.setattr(AbstractConnection, "send_packed_command", written)
    programs = runs(redis_server.url)
    running = asyncio.create_task(programs.pop(name))
    for other in programs.values():
        other.close()
    async with asyncio.timeout(LIMIT_S):
        await lasts.wait()
        running.cancel()
        await asyncio.wait([running])
    assert running.cancelled()


@pytest.mark.parametrize("num_steps", range(5))
async def test_a_client_that_is_cancelled_while_it_closes(redis_server: RedisServer, num_steps: int) -> None:
    """At each step of the event loop, none of its connections stays open."""
    client, leaving = redis_server.client(), asyncio.Event()

    async def use() -> None:
        async with client as redis:
            await redis.ping()
            leaving.set()

    using = asyncio.create_task(use())
    async with asyncio.timeout(LIMIT_S):
        await leaving.wait()
        for _ in range(num_steps):
            await asyncio.sleep(0)
        using.cancel()
        await asyncio.wait([using])
    pool = client.connection_pool
    connections = [*pool._available_connections, *pool._in_use_connections]
    assert [connection.is_connected for connection in connections] == [False]
