"""Cancellations that come at an unlucky moment: they are not lost, and leave nothing half done."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from mesh.metrics import watching_loop
from mesh.rpc.server import start_serving
from router.garbage import collecting_rarely
from tests.waiting import LIMIT_S


@pytest.mark.parametrize("background", [lambda: watching_loop(CollectorRegistry()), collecting_rarely])
async def test_while_a_background_task_is_ended(background: Callable[[], AbstractAsyncContextManager[None]]) -> None:
    leaving = asyncio.Event()

    async def use() -> None:
        async with background():
            await asyncio.sleep(0)  # it begins
            leaving.set()

    using = asyncio.create_task(use())
    async with asyncio.timeout(LIMIT_S):
        await leaving.wait()
        assert not using.done()  # it waits for the end of the background task
        using.cancel()
        await asyncio.wait([using])
    assert using.cancelled()


class SlowServer:
    """A grpc.aio.Server that starts when it may."""

    def __init__(self) -> None:
        self.may_start = asyncio.Event()
        self.has_started = False

    async def start(self) -> None:
        await self.may_start.wait()
        self.has_started = True


async def test_twice_while_a_server_starts() -> None:
    server: Any = SlowServer()
    starting = asyncio.create_task(start_serving(server))
    for _ in range(2):
        await asyncio.sleep(0)
        starting.cancel()
    await asyncio.sleep(0)
    server.may_start.set()
    async with asyncio.timeout(LIMIT_S):
        await asyncio.wait([starting])
    assert starting.cancelled()
    assert server.has_started
