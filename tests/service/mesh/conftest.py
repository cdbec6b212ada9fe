"""Redis for those tests that want it."""

from collections.abc import AsyncIterator

import pytest

from tests.fakes.redis_server import RedisServer, running_redis


@pytest.fixture
async def redis_server() -> AsyncIterator[RedisServer]:
    async with running_redis() as server:
        yield server
