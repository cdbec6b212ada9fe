"""Limits on HTTP connections: their number, and how long a client may keep the server waiting.

    opened ──headers within header_timeout_s──▶ answering ──▶ idle ──headers──▶ answering ...
A connection is closed, and its unsent bytes are dropped, if the headers of a request take longer than that, or if the
client reads nothing for `slow_reader_s`. At the connection limit, a new connection evicts the one that has been without
a request longest, so clients that send nothing cannot lock out others.

uvicorn has none of these limits. It parses HTTP, discards the rest of a refused body, and closes idle connections.
"""

import asyncio
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import h11
import structlog
from uvicorn.protocols.http.h11_impl import H11Protocol

from mesh.logs import LogLimit

log = structlog.get_logger(__name__)

_CHECKS_PER_LIMIT = 10
_MAX_INTERVAL_S = 1.0
_LOG_LINES_PER_S = 0.1
# SO_LINGER on, 0 s: on close the kernel drops its unsent bytes, too.
_NO_LINGER = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The limits of this module, as described in GatewaySettings."""

    max_connections: int
    header_timeout_s: float
    slow_reader_s: float

    @property
    def interval_s(self) -> float:
        """Seconds between two checks of all connections."""
        return min(_MAX_INTERVAL_S, min(self.header_timeout_s, self.slow_reader_s) / _CHECKS_PER_LIMIT)


class Connections:
    """The open connections of one server. `_without_request` begins with the one that has been idle longest."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._all: set[Connection] = set()
        self._without_request: dict[Connection, None] = {}
        self._log_limit = LogLimit(burst=1, lines_per_s=_LOG_LINES_PER_S)

    def __len__(self) -> int:
        return len(self._all)

    @property
    def protocol(self) -> type[asyncio.Protocol]:
        """A connection factory for uvicorn's `http` option."""
        return cast(type[asyncio.Protocol], partial(Connection, self))

    def opened(self, connection: "Connection") -> None:
        """Register a connection. At the limit, close the one that has been idle longest, which may be the new one."""
        self._all.add(connection)
        self.awaits_request(connection)
        if len(self._all) > self._limits.max_connections:
            self._drop(next(iter(self._without_request)))
            if self._log_limit.admit("limit") is not None:
                log.warning("connection limit reached, closing idle connections", limit=self._limits.max_connections)

    def awaits_request(self, connection: "Connection") -> None:
        """The connection has no request: it is new, or its request has been answered."""
        self._without_request[connection] = None

    def has_request(self, connection: "Connection") -> None:
        """The connection's request is being answered."""
        self._without_request.pop(connection, None)

    def closed(self, connection: "Connection") -> None:
        self._all.discard(connection)
        self._without_request.pop(connection, None)

    async def watch(self) -> None:
        """Check all connections until cancelled, and close those that are overdue."""
        while True:
            await asyncio.sleep(self._limits.interval_s)
            now_s = asyncio.get_running_loop().time()
            for connection in list(self._all):
                if connection.is_overdue(now_s, self._limits):
                    self._drop(connection)

    def _drop(self, connection: "Connection") -> None:
        """Close the descriptor in the loop's next iteration; `close` alone would wait for the client to read."""
        self.closed(connection)
        transport = connection.transport
        if transport.get_write_buffer_size():
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            transport.abort()
        else:
            transport.close()


class Connection(H11Protocol):
    """One connection. `_awaited_s` is when its wait for headers, or for the rest of a refused body, began."""

    def __init__(self, others: Connections, **options: Any) -> None:
        super().__init__(**options)
        self._others = others
        self._awaited_s: float | None = None
        self._unsent_bytes = 0
        self._unsent_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        super().connection_made(transport)
        self._awaited_s = self.loop.time()
        self._others.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._others.closed(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._awaited_s is None and not self._is_answering:
            self._awaited_s = self.loop.time()
        super().data_received(data)

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is before:
            return
        self._awaited_s = None
        self._others.has_request(self)
        if _has_two_lengths(self.headers):
            self.cycle.keep_alive = False

    def on_response_complete(self) -> None:
        if not self.transport.is_closing():
            self._others.awaits_request(self)
            self._awaited_s = self.loop.time() if self.conn.their_state is h11.SEND_BODY else None
        super().on_response_complete()

    def is_overdue(self, now_s: float, limits: ConnectionLimits) -> bool:
        """True if the client has sent or read nothing for too long. Stateful: call it periodically."""
        if self._awaited_s is not None and now_s - self._awaited_s > limits.header_timeout_s:
            return True
        unsent_bytes = self.transport.get_write_buffer_size()
        must_shrink = self.flow.write_paused or self.transport.is_closing() or not self._is_answering
        if not unsent_bytes or unsent_bytes < self._unsent_bytes or not must_shrink:
            self._unsent_s = now_s
        self._unsent_bytes = unsent_bytes
        return now_s - self._unsent_s > limits.slow_reader_s

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete


def _has_two_lengths(headers: Sequence[tuple[bytes, bytes]]) -> bool:
    """True for content-length beside transfer-encoding, a sign of request smuggling (RFC 9112, section 6.1)."""
    return {b"content-length", b"transfer-encoding"} <= {name for name, _ in headers}
