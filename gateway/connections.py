"""The connections of the HTTP server, and their limits.

    opened ──headers within header_timeout_s──▶ answering ──▶ idle ──headers──▶ answering ...
A connection is closed, and its unsent bytes are dropped, if the headers of a request take longer than that, or if the
client reads nothing for `slow_reader_s`: its kernel acknowledges no byte. At the connection limit, a new connection
evicts the one that has been without a request longest, so clients that send nothing cannot lock out others. A
connection that ends while a body still comes is closed for sending only, and the rest is dropped for at most
`header_timeout_s`: the kernel resets a connection that is closed with bytes unread, and the client loses its answer.

A client that has left and a client that has closed only its sending half look the same: both send FIN. They differ in
their reply to data, because the kernel of a client that has left replies with a reset. So while an answer is awaited,
its first bytes, which are always the same, are sent ahead one at a time. A reset cancels the request; without one the
client gets its answer. A client that sends FIN at any other time has left.

TLS lies between a connection and its TCP socket. A connection counts, and must send headers in time, from the moment it
is accepted, so clients that begin no handshake have the same limits. Over TLS every FIN is a client that has left:
asyncio ends a TLS connection with either half. The server says goodbye (close_notify), and waits for no reply. A client
whose first byte begins no handshake speaks plain HTTP, and is told to use HTTPS.
"""

import asyncio
import contextlib
import fcntl
import socket
import ssl
import struct
import termios
from asyncio.sslproto import SSLProtocol
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import h11
import structlog
from starlette.responses import PlainTextResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from mesh.logs import LogLimit
from mesh.public_tls import CertificateReloader

TlsContext = CertificateReloader[ssl.SSLContext]

log = structlog.get_logger(__name__)

LOG_LINES_PER_S = 0.1
_CHECKS_PER_LIMIT = 10
_MAX_INTERVAL_S = 1.0
# Every answer begins with these bytes. Several are needed if proxies in between pass FIN and bytes on one by one.
_ANSWER_START = b"HTTP/1.1 "
_FIRST_PROBE_S, _MAX_PROBE_S = 0.01, 1.0
# While the server does not wait for it, a client may leave bytes in the kernel unread for `slow_reader_s` times this.
# One that has vanished acknowledges nothing either.
_PATIENCE = 2
# The kernel itself drops the unread bytes of a closed connection after about this long.
_KERNEL_S = 300.0
_INT = struct.Struct("i")
# SO_LINGER with 0 s: on close the kernel drops its unsent bytes.
_NO_LINGER = struct.pack("ii", 1, 0)
# asyncio's own limits on both ends of a TLS connection; `Connection.is_overdue` has better ones.
_NO_LIMIT_S = 1e6
# The first byte of a TLS connection: a record of the handshake (RFC 8446, section 5.1).
_HANDSHAKE = 22
_PLAIN_HTTP_REFUSED = PlainTextResponse(
    "This port speaks HTTPS: begin the address with https://\n", 400, {"connection": "close"}
)


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The limits on connections, as described in GatewaySettings."""

    max_connections: int
    header_timeout_s: float
    slow_reader_s: float

    @property
    def interval_s(self) -> float:
        """Seconds between two checks of all connections."""
        return min(_MAX_INTERVAL_S, min(self.header_timeout_s, self.slow_reader_s) / _CHECKS_PER_LIMIT)


class Connections:
    """The open connections of one server, over TLS if `tls` is given. `_without_request` begins with the one that has
    been idle longest.
    """

    def __init__(self, limits: ConnectionLimits, tls: TlsContext | None = None) -> None:
        self._limits = limits
        self._tls = tls
        self._all: set[Connection] = set()
        self._without_request: dict[Connection, None] = {}
        self._log_limit = LogLimit(burst=1, lines_per_s=LOG_LINES_PER_S)
        self._late_s = 0.0

    def __len__(self) -> int:
        return len(self._all)

    @property
    def protocol(self) -> type[asyncio.Protocol]:
        """A connection factory for uvicorn's `http` option."""
        return cast(type[asyncio.Protocol], self._create)

    def _create(self, **options: Any) -> asyncio.BaseProtocol:
        connection = Connection(self, **options)
        return connection if self._tls is None else _FirstByte(connection, self, self._tls)

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

    def lost(self, connection: "Connection", age_s: float) -> None:
        """Its socket is about to be closed. The kernel keeps unread bytes only as long as a client of an open one
        may leave them. It counts from when the client's window was first full, even if the client has read since then,
        so the connection's age is added.
        """
        self.closed(connection)
        limit_s = age_s + _PATIENCE * self._limits.slow_reader_s
        if hasattr(socket, "TCP_USER_TIMEOUT") and limit_s < _KERNEL_S:
            with contextlib.suppress(OSError):
                wire = connection.wire.get_extra_info("socket")
                wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * limit_s))

    def now_s(self) -> float:
        """The loop's time without the periods in which it had no core to run on: they count against no client."""
        return asyncio.get_running_loop().time() - self._late_s

    async def watch(self) -> None:
        """Check all connections until cancelled, and close those that are overdue."""
        while True:
            due_s = asyncio.get_running_loop().time() + self._limits.interval_s
            await asyncio.sleep(self._limits.interval_s)
            self._late_s += max(0.0, asyncio.get_running_loop().time() - due_s)
            for connection in list(self._all):
                if connection.is_overdue(self.now_s(), self._limits):
                    self._drop(connection)
                    if connection.awaits_headers and self._log_limit.admit("headers") is not None:
                        limit_s = self._limits.header_timeout_s
                        log.warning("closing connections whose request does not come in time", header_timeout_s=limit_s)

    def drop_handshakes(self) -> None:
        """Close connections without TLS yet. uvicorn does not know them, and asyncio's server waits for their end."""
        for connection in list(self._all):
            if connection.scheme is None:
                self._drop(connection)

    def _drop(self, connection: "Connection") -> None:
        """Close the descriptor in the loop's next iteration; `close` alone would wait for the client to read."""
        self.closed(connection)
        wire = connection.wire
        if wire.get_write_buffer_size():
            wire.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            wire.abort()
        else:
            wire.close()


class Connection(H11Protocol):
    """One connection. `_awaited_s` is when its wait for headers, or for the rest of a refused body, began. `wire` is
    its TCP connection; `transport` is the same or, from the end of the handshake on, TLS over it.
    """

    wire: asyncio.Transport

    def __init__(self, others: Connections, **options: Any) -> None:
        super().__init__(**options)
        self._others = others
        self._awaited_s: float | None = None
        self._is_ending = False
        self._written_bytes = self._taken_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        super().connection_made(transport)
        if self._awaited_s is None:
            self.accepted(transport)

    def accepted(self, wire: asyncio.Transport) -> None:
        """The TCP connection is open. From now on the client has `header_timeout_s`, TLS handshake included."""
        self.wire = wire
        self._accepted_s = self._awaited_s = self._took_s = self._others.now_s()
        self._others.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.leave()
        super().connection_lost(exc)

    def leave(self) -> None:
        """The TCP connection has ended, whether it had a TLS handshake or not."""
        self._others.lost(self, self._others.now_s() - self._accepted_s)

    def data_received(self, data: bytes) -> None:
        if self._awaited_s is None and not self._is_answering:
            self._awaited_s = self._others.now_s()
        if not self._is_ending:
            super().data_received(data)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return True if the connection stays open until the answer has been sent, or the client resets it."""
        if self._has_tls or not self._is_answering or self.cycle.more_body or self.cycle.response_started:
            return False
        self.cycle.keep_alive = False
        self._probe(cast(_AnswerTransport, self.cycle.transport), _FIRST_PROBE_S)
        return True

    def end(self) -> None:
        """Close the connection once the written bytes are sent. The rest of an unfinished body is read and dropped. TLS
        cannot close one half meanwhile, so a client that ignores the answer's length waits for `header_timeout_s`.
        """
        if self.cycle.more_body:
            self._is_ending, self._awaited_s = True, self._others.now_s()
            self.flow.resume_reading()
            if self.transport.can_write_eof():
                self.transport.write_eof()
        else:
            self.transport.close()

    def _probe(self, answer: "_AnswerTransport", interval_s: float) -> None:
        """Close the connection if the client has reset it, else provoke a reset and look again after `interval_s`."""
        if self.transport.is_closing():
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        if not self.cycle.response_started:
            answer.send_ahead()
        self.loop.call_later(interval_s, self._probe, answer, min(2 * interval_s, _MAX_PROBE_S))

    def _should_upgrade(self) -> bool:
        """Java's client offers HTTP/2 with each request. uvicorn would warn of each offer."""
        return False

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is before:
            return
        self._awaited_s = None
        self.cycle.transport = _AnswerTransport(self)
        self._others.has_request(self)
        if _has_two_lengths(self.headers):
            self.cycle.keep_alive = False

    def on_response_complete(self) -> None:
        if not self.transport.is_closing():
            self._others.awaits_request(self)
            self._awaited_s = self._others.now_s() if self.conn.their_state is h11.SEND_BODY else None
        super().on_response_complete()

    def is_overdue(self, now_s: float, limits: ConnectionLimits) -> bool:
        """True if the client has sent or read nothing for too long. Stateful: call it periodically."""
        if self._awaited_s is not None and now_s - self._awaited_s > limits.header_timeout_s:
            return True
        if self.scheme is None:  # the handshake is not over
            return False
        is_closing = self.transport.is_closing()
        unsent_bytes = self.wire.get_write_buffer_size()
        if is_closing and not unsent_bytes:  # TLS would wait for the client's goodbye
            return True
        if self._has_tls and not is_closing:
            unsent_bytes += self.transport.get_write_buffer_size()
        # What was taken, not what is left: an answer in pieces may fill the buffers to the same mark after each read.
        untaken_bytes = unsent_bytes + _num_unacknowledged(self.wire)
        taken_bytes = self._written_bytes - untaken_bytes
        if not untaken_bytes or taken_bytes > self._taken_bytes:
            self._took_s = now_s
        self._taken_bytes = taken_bytes
        must_be_read = self.flow.write_paused or is_closing or not self._is_answering
        return now_s - self._took_s > limits.slow_reader_s * (1 if must_be_read else _PATIENCE)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send a part of an answer."""
        self._written_bytes += len(data)
        self.transport.write(data)

    @property
    def awaits_headers(self) -> bool:
        """True while a request, or the rest of one that was refused, is due; on a new connection, too."""
        return self._awaited_s is not None and not self._is_answering

    @property
    def _has_tls(self) -> bool:
        return self.scheme == "https"

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete


class _FirstByte(asyncio.Protocol):
    """A TCP connection whose client has sent nothing yet. The first byte tells TLS from plain HTTP, sent by mistake."""

    def __init__(self, above: Connection, others: Connections, tls: TlsContext) -> None:
        self._above, self._others, self._tls = above, others, tls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._wire = transport
        self._above.accepted(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._others.closed(self._above)

    def data_received(self, data: bytes) -> None:
        if data[0] != _HANDSHAKE:
            self._above.app = _PLAIN_HTTP_REFUSED
            self._wire.set_protocol(self._above)
            self._above.connection_made(self._wire)
            self._above.data_received(data)
            return
        layer = _TlsLayer(self._above, self._tls.latest)
        self._wire.set_protocol(layer)
        layer.connection_made(self._wire)
        layer.feed(data)


class _TlsLayer(SSLProtocol):
    """TLS below one connection. asyncio's own option `ssl` reports a connection only after its handshake, so clients
    could hold any number of descriptors by beginning none. `loop.start_tls` cannot take bytes that were already read.
    """

    max_size = 16 << 10
    """Bytes of the buffer that each connection has from its first byte on; asyncio's own has 256 KiB."""

    def __init__(self, above: Connection, context: ssl.SSLContext) -> None:
        options: dict[str, Any] = {"waiter": None, "ssl_handshake_timeout": _NO_LIMIT_S}
        super().__init__(above.loop, above, context, server_side=True, ssl_shutdown_timeout=_NO_LIMIT_S, **options)
        self._above = above

    def feed(self, data: bytes) -> None:
        """Take bytes that were read before this layer was there."""
        for start in range(0, len(data), self.max_size):
            piece = data[start : start + self.max_size]
            self.get_buffer(len(piece))[: len(piece)] = piece
            self.buffer_updated(len(piece))

    def connection_lost(self, exc: BaseException | None) -> None:
        self._above.leave()  # asyncio tells it only if the handshake is over
        super().connection_lost(exc)


class _AnswerTransport(asyncio.Transport):
    """The transport of one answer, whose first bytes may be sent ahead."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection
        self._num_ahead = 0

    def send_ahead(self) -> None:
        """Send one more byte of the answer's start, if there is one."""
        byte = _ANSWER_START[self._num_ahead : self._num_ahead + 1]
        self._connection.write(byte)
        self._num_ahead += len(byte)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send the answer without the bytes that were sent ahead; nothing to a client that has gone, because asyncio
        would log each write until the answer is told.
        """
        if not self._connection.wire.is_closing():
            self._connection.write(data[self._num_ahead :])
        self._num_ahead = 0

    def close(self) -> None:
        self._connection.end()

    def is_closing(self) -> bool:
        return self._connection.transport.is_closing()


def _num_unacknowledged(wire: asyncio.Transport) -> int:
    """Bytes that the client's kernel has not acknowledged; 0 where ours does not tell."""
    try:
        answer = fcntl.ioctl(wire.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(_INT.size))
    except (OSError, ValueError):  # ValueError: the socket is closed
        return 0
    return int(_INT.unpack(answer)[0])


def _has_two_lengths(headers: Sequence[tuple[bytes, bytes]]) -> bool:
    """True for content-length beside transfer-encoding, a sign of request smuggling (RFC 9112, section 6.1)."""
    return {b"content-length", b"transfer-encoding"} <= {name for name, _ in headers}
