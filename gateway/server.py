"""The HTTP server, which is uvicorn: limits, and an orderly stop."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator

import uvicorn
from starlette.applications import Starlette

from gateway.settings import GatewaySettings
from mesh.domain.errors import ConfigurationError

_BACKLOG = 1024
_MAX_HEADER_BYTES = 64 << 10
_KEEP_ALIVE_S = 75


class _Server(uvicorn.Server):
    """Signals are the process's own business: see mesh/process.py."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave them alone."""
        yield


@contextlib.asynccontextmanager
async def serving(app: Starlette, settings: GatewaySettings) -> AsyncIterator[str]:
    """Serve while the block runs; yields host:port. Then running answers get `grace_s`. Raises ConfigurationError."""
    with _listen(settings) as listener:
        async with serving_at(app, listener, settings.grace_s):
            yield _address(listener)


@contextlib.asynccontextmanager
async def serving_at(app: Starlette, listener: socket.socket, grace_s: float) -> AsyncIterator[None]:
    """The same at a socket that listens already."""
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(grace_s)),
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield
    finally:
        server.should_exit = True
        await task


def _listen(settings: GatewaySettings) -> socket.socket:
    """Bound at once, so that the address is known before anything is served."""
    host = settings.host.strip("[]")
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
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
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
