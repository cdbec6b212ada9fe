"""`python -m gateway`: puts the gateway together and serves it."""

import contextlib
import sys

import tandem
from gateway.app import build_app
from gateway.backend import build_backend
from gateway.server import serving
from gateway.settings import GatewaySettings
from mesh.process import ServiceProgram, announce, until_stopped


async def serve(settings: GatewaySettings) -> None:
    """Run until told to stop."""
    # No retries: a refusal is the client's to hear at once. Another router is asked all the same.
    async with tandem.AsyncClient(settings.router, tls=_tls(settings), max_retries=0) as client:
        backend = build_backend(settings, client)
        handler = contextlib.nullcontext() if backend.handler is None else backend.handler.running()
        async with handler, serving(build_app(backend), settings) as address:
            announce("listening", address=address)
            announce("ready")
            await until_stopped(settings)


def _tls(settings: GatewaySettings) -> tandem.Tls | bool:
    if not settings.router_tls:
        return False
    return tandem.Tls(settings.router_tls_ca or None, settings.router_tls_name or None)


if __name__ == "__main__":
    sys.exit(ServiceProgram("gateway", GatewaySettings, serve).main())
