"""How every part of the mesh talks to Redis: short timeouts, no hidden retries, bounded backoff, few log lines."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

import structlog
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from mesh.domain.errors import ConfigurationError
from mesh.rpc.credentials import MeshKey

log = structlog.get_logger(__name__)

FAILURES = (RedisError, OSError, TimeoutError)
"""What a Redis that is away, or not itself, looks like. Nothing ever exits because of these."""

PREFIX = "tandem:"
"""Of every key and channel: an ACL needs `~tandem:* &tandem:*`."""

_TIMEOUT_S = 1.0
_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 1.0


def require_registry(url: str, key: MeshKey | None) -> MeshKey:
    """Raise ConfigurationError unless `url` names a Redis, and there is a key to sign with."""
    if urlsplit(url).scheme not in ("redis", "rediss"):
        raise ConfigurationError("registry_url must be redis://HOST:PORT/DB or rediss://..., or empty")
    if key is None:
        raise ConfigurationError("registry_url needs a mesh key: records in Redis are signed; set TANDEM_MESH_KEY")
    return key


def open_redis(url: str, *, timeout_s: float = _TIMEOUT_S) -> Redis:
    """A client that connects on demand. Use it as an async context manager. Raises ConfigurationError."""
    try:
        return Redis.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )
    except ValueError as error:
        raise ConfigurationError(f"registry_url cannot be used: {error}") from error


async def stay_connected(url: str, what: str, stay: Callable[[Redis], Awaitable[None]]) -> None:
    """Run `stay(client)` until cancelled, again after every failure. `what` is for the log; the URL may hold a
    password and is never logged."""
    backoff_s, log_limit = _FIRST_BACKOFF_S, LogLimit()
    while True:
        require_not_cancelled()
        started_s = time.monotonic()
        try:
            async with open_redis(url) as redis:
                await stay(redis)
        except FAILURES as error:
            if log_limit.allows(type(error).__name__):
                log.warning("redis is away", what=what, error=str(error) or type(error).__name__)
        if time.monotonic() - started_s > _MAX_BACKOFF_S:
            backoff_s = _FIRST_BACKOFF_S
        await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
        backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)


def require_not_cancelled() -> None:
    """Raise CancelledError if this task has been cancelled and has not noticed: before Python 3.12, asyncio.wait_for,
    in which redis writes, forgets a cancellation that comes as it ends. Call it in every loop around redis.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


class LogLimit:
    """At most one log line a second for each cause. Causes come from a fixed set, so this stays small."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next_s: dict[str, float] = {}

    def allows(self, cause: str) -> bool:
        """True if a line about `cause` may be written now."""
        now_s = self._clock()
        if now_s < self._next_s.get(cause, now_s):
            return False
        self._next_s[cause] = now_s + 1
        return True
