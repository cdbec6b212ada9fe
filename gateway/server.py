"""The HTTP server: uvicorn with limits on connections and a graceful stop.

    opened ──headers within header_timeout_s──▶ answering ──▶ idle ──headers──▶ answering ...
A connection is closed, and its unsent bytes are dropped, if the headers of a request take longer than that, or if the
client reads nothing for `slow_reader_s`. At the connection limit, a new connection evicts the one that has been without
a request longest, so clients that send nothing cannot lock out others. A connection that ends while a body still comes
is closed for sending only, and the rest is dropped for at most `header_timeout_s`: the kernel resets a connection that
is closed with bytes unread, and the client loses its answer.

A client that has left and a client that has closed only its sending half look the same: both send FIN. They differ in
their reply to data, because the kernel of a client that has left replies with a reset. So while an answer is awaited,
its first bytes, which are always the same, are sent ahead one at a time. A reset cancels the request; without one the
client gets its answer. A client that sends FIN at any other time has left.

uvicorn has none of these limits, and takes every FIN for a client that has left. It parses HTTP, discards the rest of a
refused body if the connection stays open, and closes idle connections.
"""

import asyncio
import contextlib
import logging
import resource
import socket
import struct
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import h11
import structlog
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from uvicorn.protocols.http.h11_impl import H11Protocol

from gateway.settings import GatewaySettings
from mesh.domain.errors import ConfigurationError
from mesh.domain.host import join_host
from mesh.logs import LogLimit
from mesh.process import run_for_life

log = structlog.get_logger(__name__)

# asyncio accepts up to this many connections per loop iteration; out of descriptors, it fails as many times a second.
_BACKLOG = 128
# Descriptors for calls of the router, files, and connections that are accepted while others are being closed.
_RESERVED_FILES = 2 * _BACKLOG
_SEND_BUFFER_BYTES = 128 << 10
_MAX_HEADER_BYTES = 64 << 10
_KEEP_ALIVE_S = 75
_LOG_LINES_PER_S = 0.1
_CHECKS_PER_LIMIT = 10
_MAX_INTERVAL_S = 1.0
# Every answer begins with these bytes. Several are needed if proxies in between pass FIN and bytes on one by one.
_ANSWER_START = b"HTTP/1.1 "
_FIRST_PROBE_S, _MAX_PROBE_S = 0.01, 1.0
# SO_LINGER on, 0 s: on close the kernel drops its unsent bytes, too.
_NO_LINGER = struct.pack("ii", 1, 0)


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


class _Server(uvicorn.Server):
    """Installs no signal handlers: mesh/process.py handles signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def serving(app: Starlette, settings: GatewaySettings) -> AsyncIterator[str]:
    """Serve while the block runs, then let running answers finish within `grace_s`. Yields host:port.

    Raises ConfigurationError if the address cannot be bound.
    """
    limits = ConnectionLimits(
        max_connections=_affordable_connections(settings.max_connections),
        header_timeout_s=settings.header_timeout_s,
        slow_reader_s=settings.slow_reader_s,
    )
    with _listen(settings) as listener:
        async with serving_at(app, listener, settings.grace_s, limits):
            yield _address(listener)


@contextlib.asynccontextmanager
async def serving_at(
    app: Starlette, listener: socket.socket, grace_s: float, limits: ConnectionLimits | None = None
) -> AsyncIterator[None]:
    """Serve at a socket that already listens. `limits` is None if the clients are trusted."""
    connections = None if limits is None else Connections(limits)
    config = uvicorn.Config(
        app,
        http="h11" if connections is None else connections.protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=_BACKLOG,
        h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(grace_s)),
    )
    server = _Server(config)
    with _rate_limited_logs():
        watching = None if connections is None else run_for_life(connections.watch())
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield
        finally:
            server.should_exit = True
            await task
            if watching is not None:
                watching.cancel()


def _affordable_connections(max_connections: int) -> int:
    """Return `max_connections`, or fewer if the process cannot get the descriptors. Raises its soft limit first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = max_connections + _RESERVED_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return max_connections
    affordable = max(soft - _RESERVED_FILES, soft // 2)
    log.warning("too few file descriptors for max_connections, raise ulimit -n", connections=affordable, files=soft)
    return affordable


@contextlib.contextmanager
def _rate_limited_logs() -> Iterator[None]:
    """Limit the rate of log lines that clients can cause: invalid HTTP, and a lack of file descriptors."""
    loop = asyncio.get_running_loop()
    limit = LogLimit(burst=1, lines_per_s=_LOG_LINES_PER_S)

    def is_admitted(record: logging.LogRecord) -> bool:
        return limit.admit(str(record.msg)) is not None  # `msg` is the format string: uvicorn has few

    previous = loop.get_exception_handler()

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        if "socket.accept()" in str(context.get("message", "")):
            if limit.admit("accept") is not None:
                log.error("connections cannot be accepted", reason=str(context.get("exception")))
        elif previous is not None:
            previous(loop, context)
        else:
            loop.default_exception_handler(context)

    loop.set_exception_handler(handle)
    logging.getLogger("uvicorn.error").addFilter(is_admitted)
    try:
        yield
    finally:
        logging.getLogger("uvicorn.error").removeFilter(is_admitted)
        loop.set_exception_handler(previous)


def _listen(settings: GatewaySettings) -> socket.socket:
    """Bind and listen, so that the address is known before the first request. Raises ConfigurationError."""
    host = settings.host.strip("[]")
    # asyncio sets TCP_NODELAY only on sockets with an explicit protocol; without it a body may wait 40 ms for an ACK.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Accepted connections inherit it: the kernel buffers little for a client that does not read.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # bounds how long the kernel keeps unsent data of closed connections
        milliseconds = max(1, round(2000 * settings.slow_reader_s))
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
    try:
        listener.bind((host, settings.port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        reason = (error.strerror or str(error)).lower()
        raise ConfigurationError(f"cannot listen on {settings.host}:{settings.port}, {reason}") from error
    return listener


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return join_host(host, port)


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
        self._is_ending = False
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
        if not self._is_ending:
            super().data_received(data)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return True if the connection stays open until the answer has been sent, or the client resets it."""
        if not self._is_answering or self.cycle.more_body or self.cycle.response_started:
            return False
        self.cycle.keep_alive = False
        self._probe(cast(_AnswerTransport, self.cycle.transport), _FIRST_PROBE_S)
        return True

    def end(self) -> None:
        """Close the connection behind the bytes written. The rest of an unfinished body is read and dropped."""
        if self.cycle.more_body:
            self._is_ending, self._awaited_s = True, self.loop.time()
            self.flow.resume_reading()
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


class _AnswerTransport(asyncio.Transport):
    """The transport of one answer, whose first bytes may be sent ahead."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection
        self._num_ahead = 0

    def send_ahead(self) -> None:
        """Send one more byte of the answer's start, if there is one."""
        byte = _ANSWER_START[self._num_ahead : self._num_ahead + 1]
        self._connection.transport.write(byte)
        self._num_ahead += len(byte)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send the answer without the bytes that were sent ahead."""
        self._connection.transport.write(data[self._num_ahead :])
        self._num_ahead = 0

    def close(self) -> None:
        self._connection.end()

    def is_closing(self) -> bool:
        return self._connection.transport.is_closing()


def _has_two_lengths(headers: Sequence[tuple[bytes, bytes]]) -> bool:
    """True for content-length beside transfer-encoding, a sign of request smuggling (RFC 9112, section 6.1)."""
    return {b"content-length", b"transfer-encoding"} <= {name for name, _ in headers}


async def cancel_on_disconnect(coroutine: Coroutine[object, object, Response], request: Request) -> Response:
    """Return the response of the coroutine. If the client disconnects first, cancel it and raise ClientDisconnect.

    The request's body must have been read already: this consumes the messages that follow it.
    """
    working = asyncio.create_task(coroutine)
    disconnecting = asyncio.create_task(_until_disconnected(request))
    try:
        await asyncio.wait((working, disconnecting), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, disconnecting):
            task.cancel()
        await asyncio.gather(working, disconnecting, return_exceptions=True)


async def _until_disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
