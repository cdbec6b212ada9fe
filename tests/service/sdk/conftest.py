"""A fake router for tests without an event loop."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from tests.fakes.sdk_router import FakeRouter, Script
from tests.waiting import LIMIT_S


@pytest.fixture
def threaded_router() -> Iterator[FakeRouter]:
    """A fake router on an event loop of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> FakeRouter:
        running = FakeRouter(Script())
        await running.start()
        await running.set_serving(True)
        return running

    try:
        running = asyncio.run_coroutine_threadsafe(start(), loop).result(LIMIT_S)
        try:
            yield running
        finally:
            asyncio.run_coroutine_threadsafe(running.stop(), loop).result(LIMIT_S)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
