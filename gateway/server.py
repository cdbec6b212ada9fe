"""The HTTP server: uvicorn with limits on connections and a graceful stop.

uvicorn has none of the limits of connections.py, and takes every FIN for a client that has left. It parses HTTP,
discards the rest of a refused body if the connection stays open, and closes idle connections.
"""

import asyncio
import contextlib
import logging
import resource
import socket
from collections.abc import AsyncIterator, Coroutine, Iterator

import structlog
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from gateway.connections import LOG_LINES_PER_S, ConnectionLimits, Connections, TlsContext
from gateway.settings import GatewaySettings
from mesh.domain.errors import ConfigurationError
from mesh.domain.host import join_host
from mesh.logs import LogLimit
from mesh.process import run_for_life
from mesh.process_limits import raise_open_files
from mesh.tasks import cancel_all

log = structlog.get_logger(__name__)

# asyncio accepts up to this many connections per loop iteration; out of descriptors, it fails as many times a second.
_BACKLOG = 128
# Descriptors for calls of the router, files, and connections that are accepted while others are being closed.
_RESERVED_FILES = 2 * _BACKLOG
_SEND_BUFFER_BYTES = 128 << 10
_MAX_HEADER_BYTES = 64 << 10
_KEEP_ALIVE_S = 75


class _Server(uvicorn.Server):
    """Installs no signal handlers: mesh/process.py handles signals. A stop waits for no handshake."""

    def __init__(self, config: uvicorn.Config, connections: Connections | None) -> None:
        super().__init__(config)
        self._connections = connections

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        if self._connections is not None:
            self._connections.drop_handshakes()
        await super().shutdown(sockets)


@contextlib.asynccontextmanager
async def serving(app: Starlette, settings: GatewaySettings) -> AsyncIterator[str]:
    """Serve while the block runs, then let running answers finish within `grace_s`. Yields host:port.

    Raises ConfigurationError if the address cannot be bound, or the certificate cannot be used.
    """
    tls = settings.load_public_tls()
    limits = ConnectionLimits(
        max_connections=_affordable_connections(settings.max_connections),
        header_timeout_s=settings.header_timeout_s,
        slow_reader_s=settings.slow_reader_s,
    )
    with _listen(settings) as listener:
        async with serving_at(app, listener, settings.grace_s, limits, tls):
            yield join_host(*listener.getsockname()[:2])


@contextlib.asynccontextmanager
async def serving_at(
    app: Starlette,
    listener: socket.socket,
    grace_s: float,
    limits: ConnectionLimits | None = None,
    tls: TlsContext | None = None,
) -> AsyncIterator[None]:
    """Serve at a socket that already listens. `limits` is None if the clients are trusted, and speak no TLS."""
    connections = None if limits is None else Connections(limits, tls)
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
    server = _Server(config, connections)
    with _rate_limited_logs():
        watches = [] if connections is None else [run_for_life(connections.watch())]
        watches += [] if tls is None else [run_for_life(tls.follow())]
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield
        finally:
            server.should_exit = True
            try:
                await task
            finally:
                for watch in watches:
                    watch.cancel()


def _affordable_connections(max_connections: int) -> int:
    """Return `max_connections`, or fewer if the process cannot get the descriptors."""
    files = raise_open_files()
    if files == resource.RLIM_INFINITY or files >= max_connections + _RESERVED_FILES:
        return max_connections
    affordable = max(files - _RESERVED_FILES, files // 2)
    log.warning("too few file descriptors for max_connections, raise ulimit -n", connections=affordable, files=files)
    return affordable


@contextlib.contextmanager
def _rate_limited_logs() -> Iterator[None]:
    """Limit the rate of log lines that clients can cause: invalid HTTP, and a lack of file descriptors."""
    loop = asyncio.get_running_loop()
    limit = LogLimit(burst=1, lines_per_s=LOG_LINES_PER_S)

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
    try:
        listener.bind((host, settings.port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        reason = (error.strerror or str(error)).lower()
        raise ConfigurationError(f"cannot listen on {settings.host}:{settings.port}, {reason}") from error
    return listener


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
        await cancel_all([working, disconnecting])


async def _until_disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
