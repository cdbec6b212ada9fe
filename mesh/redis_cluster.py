"""A Redis Cluster as the registry: all keys of a mesh have one hash tag, so they lie in one slot, on one server.

A connection asks the servers of the URL which of them has that slot, and goes there: as with sentinels, nothing else of
the mesh knows of the cluster. Messages reach subscribers at any server. A server that no longer has the slot
says so; the connection ends then, and the next one asks again.
"""

from collections.abc import Sequence
from typing import Any
from urllib.parse import SplitResult, urlunsplit

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.connection import Connection, SSLConnection, parse_url
from redis.crc import key_slot
from redis.exceptions import AskError, ClusterDownError, ReadOnlyError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError

TAG = "{tandem}"
_SLOT = key_slot(TAG.encode())
_PORT = 6379
_NOT_HERE = (AskError, ClusterDownError, ReadOnlyError)
"""Answers of servers that do not have the slot, or not for writing. MOVED is an AskError, too."""

Address = tuple[str, int]


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
            async with Redis(host=host, port=port, **options) as redis:
                ranges = await redis.execute_command("CLUSTER", "SLOTS")  # type: ignore[no-untyped-call]
        except (RedisError, OSError, TimeoutError) as error:
            failure = error
            continue
        for first, last, (owner, owner_port, *_), *_ in ranges:
            if first <= _SLOT <= last:
                name = owner.decode() if isinstance(owner, bytes) else owner
                return name or host, int(owner_port)  # a server that does not know its own address
    raise failure


def open_slot(url: SplitResult, options: dict[str, Any], *, tls: bool) -> Redis:
    """Return a client for USER:PASSWORD@HOST:PORT,HOST:PORT; user, password and TLS are those of all servers. Raises
    ValueError."""
    login, at, addresses = url.netloc.rpartition("@")
    servers = []
    known: dict[str, Any] = {}
    for address in addresses.split(","):
        plain = url._replace(scheme="rediss" if tls else "redis", netloc=f"{login}{at}{address}")
        known = dict(parse_url(urlunsplit(plain)))
        servers.append((known.pop("host", ""), int(known.pop("port", _PORT))))
    if known.pop("db", 0) or not all(host for host, _ in servers):
        raise ValueError("a cluster has database 0 only, or a host is missing")
    known.pop("connection_class", None)
    known = {**options, **known}
    asking = {**known, "ssl": True} if tls else known
    pool = ConnectionPool(_ToSlotWithTls if tls else _ToSlot, servers=servers, asking=asking, **known)
    return Redis.from_pool(pool)


def is_clustered(redis: Redis) -> bool:
    """Whether this client belongs to a cluster."""
    return issubclass(redis.connection_pool.connection_class, _ToSlot)
