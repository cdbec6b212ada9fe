"""The Redis registry, through which several routers share workers: connections and key names.

With a single router, workers register through a gRPC stream instead (worker/registration.py).

Connections have short timeouts, no hidden retries, bounded backoff and few log lines. Messages are signed
(mesh/signed_messages.py).

In a Redis Cluster all keys of a mesh have one hash tag, so they lie in one slot, on one server. A connection asks the
servers of the URL which of them has that slot, and goes there: as with sentinels, nothing else of the mesh knows of the
cluster. Messages reach subscribers at any server. A server that no longer has the slot says so; the connection ends
then, and the next one asks again.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast
from urllib.parse import SplitResult, urlsplit, urlunsplit

import structlog
from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.connection import Connection, SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import AskError, ClusterDownError, ReadOnlyError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError

from mesh.domain.errors import ConfigurationError
from mesh.logs import LogLimit
from mesh.rpc.credentials import MeshKey
from mesh.tasks import Backoff, require_not_cancelled, until_ended

log = structlog.get_logger(__name__)

FAILURES = (RedisError, OSError, TimeoutError)
"""Errors of an unreachable or misbehaving Redis. No process exits because of them."""

PREFIX = "tandem:"
"""Prefix of every key and channel: an ACL needs `~tandem:* &tandem:*`. In a cluster it is `{tandem}:` (`name_in`)."""

HEARTBEATS = f"{PREFIX}beats"
WORKERS = f"{PREFIX}workers"
TRAFFIC = f"{PREFIX}traffic"
"""The key with the shares of requests that revisions get, as an operator has told one of the routers."""
RECORD_TTL_S = 5.0

_PLAIN = ("redis", "rediss")
_SENTINEL_PORT = 26379
_BY_SENTINEL = {f"{scheme}+sentinel": scheme for scheme in _PLAIN}

_BY_CLUSTER = {f"{scheme}+cluster": scheme for scheme in _PLAIN}

_TIMEOUT_S = 1.0
_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 1.0
TAG = "{tandem}"
_SLOT = key_slot(TAG.encode())
_PORT = 6379
_NOT_HERE = (AskError, ClusterDownError, ReadOnlyError)
"""Answers of servers that do not have the slot, or not for writing. MOVED is an AskError, too."""
Address = tuple[str, int]


def require_registry(url: str, key: MeshKey | None) -> MeshKey:
    """Return `key`. Raises ConfigurationError if `url` is not a Redis URL, or if there is no key to sign with."""
    try:
        scheme = urlsplit(url).scheme
    except ValueError:  # brackets of its host do not match
        scheme = ""
    if scheme not in (*_PLAIN, *_BY_SENTINEL, *_BY_CLUSTER):
        raise ConfigurationError(
            "registry_url must be redis://HOST:PORT/DB, redis+sentinel://HOST:PORT,HOST:PORT/SERVICE/DB, "
            "redis+cluster://HOST:PORT,HOST:PORT, one of these with rediss, or empty"
        )
    if key is None:
        raise ConfigurationError("registry_url needs a mesh key: records in Redis are signed; set TANDEM_MESH_KEY")
    return key


def open_redis(url: str, *, timeout_s: float = _TIMEOUT_S) -> Redis:
    """Return a client that connects on demand, an async context manager. Raises ConfigurationError for a bad URL."""
    times = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
    options: dict[str, Any] = {**times, "retry": Retry(NoBackoff(), 0), "protocol": 2}
    try:
        parts = urlsplit(url)
        if parts.scheme in _BY_SENTINEL:
            return _open_master(parts, options)
        if parts.scheme in _BY_CLUSTER:
            return _open_slot(parts, options)
        return _Client.from_url(url, **options)
    except ValueError:
        # The text of the error may contain a part of the password.
        raise ConfigurationError(
            "registry_url cannot be used: it must be redis://USER:PASSWORD@HOST:PORT/DB, "
            "with special characters of the password percent-encoded"
        ) from None


class _Client(Redis):
    """Closes all its connections, also if it is cancelled meanwhile: redis would forget those, and leave their sockets
    open until they are collected as garbage. It is the context of one block.
    """

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        await until_ended(self._close(close_connection_pool))

    async def _close(self, close_connection_pool: bool | None) -> None:
        await super().aclose(close_connection_pool)


class _Master(_Client):
    """A client of the server that the sentinels name when it connects. It closes its connections to them, too."""

    async def _close(self, close_connection_pool: bool | None) -> None:
        try:
            await super()._close(close_connection_pool)
        finally:
            pool = self.connection_pool
            assert isinstance(pool, SentinelConnectionPool)
            await pool.sentinel_manager.aclose()


def _servers_in(url: SplitResult, default_port: int) -> tuple[list[Address], dict[str, Any]]:
    """Return the servers of redis://USER:PASSWORD@HOST:PORT,HOST:PORT/DB and the options that hold for all of them, as
    redis names them. Raises ValueError."""
    login, at, addresses = url.netloc.rpartition("@")
    servers: list[Address] = []
    options: dict[str, Any] = {}
    for address in addresses.split(","):
        options = dict(parse_url(urlunsplit(url._replace(netloc=f"{login}{at}{address}"))))
        servers.append((options.pop("host", ""), int(options.pop("port", default_port))))
    if not all(host for host, _ in servers):
        raise ValueError("a host is missing")
    if options.pop("connection_class", None) is not None:
        options["ssl"] = True
    return servers, options


def _open_master(url: SplitResult, options: dict[str, Any]) -> Redis:
    """Return a client of SERVICE's master. User, password and TLS are those of the servers and of the sentinels. Raises
    ValueError."""
    service, _, database = url.path.strip("/").partition("/")
    sentinels, parsed = _servers_in(url._replace(scheme=_BY_SENTINEL[url.scheme], path=database), _SENTINEL_PORT)
    if not service:
        raise ValueError("the name of the service is missing")
    number = parsed.pop("db", 0)
    parsed = {**options, **parsed}  # as in Redis.from_url
    sentinel = Sentinel(sentinels, sentinel_kwargs=parsed, **parsed)  # type: ignore[no-untyped-call]
    return cast(Redis, sentinel.master_for(service, redis_class=_Master, db=number))


def name_in(redis: Redis, name: str) -> str:
    """A key or channel as this client's Redis has it."""
    return f"{TAG}:{name.removeprefix(PREFIX)}" if _is_clustered(redis) else name


def cause_of(error: BaseException) -> str:
    """Describe an error of Redis for a log."""
    if isinstance(error, MasterNotFoundError):
        return "the sentinels name no master"  # its own text shows the clients
    return str(error) or type(error).__name__


async def stay_connected(url: str, purpose: str, use: Callable[[Redis], Awaitable[None]]) -> None:
    """Run `use(client)`, and again after every failure, until it returns. Failures are logged with `purpose`; the URL
    may contain a password and is never logged."""
    backoff, log_limit = Backoff(_FIRST_BACKOFF_S, _MAX_BACKOFF_S, jitter=0.5), LogLimit(burst=1)
    while True:
        require_not_cancelled()
        started_s = time.monotonic()
        try:
            async with open_redis(url) as redis:
                await use(redis)
                return
        except FAILURES as error:
            if log_limit.admit(type(error).__name__) is not None:
                log.warning("redis is away", what=purpose, error=cause_of(error))
        await asyncio.sleep(backoff.next_s(time.monotonic() - started_s))


def record_key(worker_id: str) -> str:
    """The key that holds the worker's newest heartbeat."""
    return f"{PREFIX}worker:{worker_id}"


def ask_channel(worker_id: str) -> str:
    """The channel on which routers request a snapshot from the worker, or refuse it."""
    return f"{PREFIX}asks:{worker_id}"


class _ToSlot(Connection):
    """A connection to the server that has the slot now. `servers`: those of the URL, some of which may be away."""

    def __init__(self, *, servers: Sequence[Address], asking: dict[str, Any], **options: Any) -> None:
        super().__init__(**options)
        self._servers = servers
        self._asking = asking

    async def connect(self) -> None:
        if not self.is_connected:
            self.host, self.port = await _owner(self._servers, self._asking)
        await super().connect()  # type: ignore[no-untyped-call]

    async def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return await super().read_response(*args, **options)
        except _NOT_HERE as error:
            await self.disconnect()
            raise RedisConnectionError("the cluster has moved the slot of the mesh") from error


class _ToSlotWithTls(_ToSlot, SSLConnection):
    """The same over TLS."""


async def _owner(servers: Sequence[Address], options: dict[str, Any]) -> Address:
    """Ask the servers one by one. Raises RedisError or OSError if none of them knows."""
    failure: Exception = RedisConnectionError("no server of the cluster has the slot of the mesh")
    for host, port in servers:
        try:
            async with _Client(host=host, port=port, **options) as redis:
                ranges = await redis.execute_command("CLUSTER", "SLOTS")  # type: ignore[no-untyped-call]
        except (RedisError, OSError, TimeoutError) as error:
            failure = error
            continue
        for first, last, (owner, owner_port, *_), *_ in ranges:
            if first <= _SLOT <= last:
                name = owner.decode() if isinstance(owner, bytes) else owner
                return name or host, int(owner_port)  # a server that does not know its own address
    raise failure


def _open_slot(url: SplitResult, options: dict[str, Any]) -> Redis:
    """Return a client of the server that has the slot; user, password and TLS are those of all servers. Raises
    ValueError."""
    servers, parsed = _servers_in(url._replace(scheme=_BY_CLUSTER[url.scheme]), _PORT)
    if parsed.pop("db", 0):
        raise ValueError("a cluster has database 0 only")
    tls = parsed.pop("ssl", False)
    parsed = {**options, **parsed}
    asking = {**parsed, "ssl": True} if tls else parsed
    pool = ConnectionPool(_ToSlotWithTls if tls else _ToSlot, servers=servers, asking=asking, **parsed)
    return _Client.from_pool(pool)


def _is_clustered(redis: Redis) -> bool:
    return issubclass(redis.connection_pool.connection_class, _ToSlot)
