"""The Redis registry, through which several routers share workers: connections and key names.

With a single router, workers register through a gRPC stream instead (worker/agent.py).

Connections have short timeouts, no hidden retries, bounded backoff and few log lines. Messages are signed
(mesh/sealed_messages.py).
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

import structlog
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from mesh.domain.errors import ConfigurationError
from mesh.logs import LogLimit
from mesh.retry import Backoff, require_not_cancelled
from mesh.rpc.credentials import MeshKey

log = structlog.get_logger(__name__)

FAILURES = (RedisError, OSError, TimeoutError)
"""Errors of an unreachable or misbehaving Redis. No process exits because of them."""

PREFIX = "tandem:"
"""Prefix of every key and channel: an ACL needs `~tandem:* &tandem:*`."""

HEARTBEATS = f"{PREFIX}beats"
WORKERS = f"{PREFIX}workers"
RECORD_TTL_S = 5.0

_TIMEOUT_S = 1.0
_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 1.0


def require_registry(url: str, key: MeshKey | None) -> MeshKey:
    """Return `key`. Raises ConfigurationError if `url` is not a Redis URL, or if there is no key to sign with."""
    if urlsplit(url).scheme not in ("redis", "rediss"):
        raise ConfigurationError("registry_url must be redis://HOST:PORT/DB or rediss://..., or empty")
    if key is None:
        raise ConfigurationError("registry_url needs a mesh key: records in Redis are signed; set TANDEM_MESH_KEY")
    return key


def open_redis(url: str, *, timeout_s: float = _TIMEOUT_S) -> Redis:
    """Return a client that connects on demand, an async context manager. Raises ConfigurationError for a bad URL."""
    try:
        return Redis.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )
    except ValueError:
        # The text of the error may contain a part of the password.
        raise ConfigurationError(
            "registry_url cannot be used: it must be redis://USER:PASSWORD@HOST:PORT/DB, "
            "with special characters of the password percent-encoded"
        ) from None


async def stay_connected(url: str, purpose: str, use: Callable[[Redis], Awaitable[None]]) -> None:
    """Run `use(client)` until cancelled, and again after every failure. Failures are logged with `purpose`; the URL may
    contain a password and is never logged."""
    backoff, log_limit = Backoff(_FIRST_BACKOFF_S, _MAX_BACKOFF_S, jitter=0.5), LogLimit(burst=1)
    while True:
        require_not_cancelled()
        started_s = time.monotonic()
        try:
            async with open_redis(url) as redis:
                await use(redis)
        except FAILURES as error:
            if log_limit.admit(type(error).__name__) is not None:
                log.warning("redis is away", what=purpose, error=str(error) or type(error).__name__)
        await asyncio.sleep(backoff.next_s(time.monotonic() - started_s))


def record_key(worker_id: str) -> str:
    """The key that holds the worker's newest heartbeat."""
    return f"{PREFIX}worker:{worker_id}"


def ask_channel(worker_id: str) -> str:
    """The channel on which routers request a snapshot from the worker, or refuse it."""
    return f"{PREFIX}asks:{worker_id}"
