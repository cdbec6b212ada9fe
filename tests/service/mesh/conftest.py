"""Redis for those tests that want it."""

from collections.abc import AsyncIterator

import pytest

from tests.fakes.redis_server import RedisServer


@pytest.fixture
async def redis_server() -> AsyncIterator[RedisServer]:
    server = RedisServer()
    await server.start()
    yield server
    server.stop()
