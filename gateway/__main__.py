"""`python -m gateway`: constructs the gateway and serves it."""

import sys

import tandem
from gateway.app import build_app
from gateway.backend import build_backend
from gateway.server import serving
from gateway.settings import GatewaySettings
from mesh.metrics import watching_loop
from mesh.process import ServiceProgram, tell_parent, until_stopped
from mesh.public_tls import warn_of_open_keys


async def serve(settings: GatewaySettings) -> None:
    """Serve until SIGTERM, then finish running answers within `grace_s`."""
    # No retries: clients see a refusal at once. If a router is unreachable, the SDK still tries the next one.
    async with tandem.AsyncClient(settings.router, tls=_tls(settings), max_retries=0) as client:
        backend = build_backend(settings, client)
        app, registry = build_app(backend), backend.metrics.registry
        async with backend.running(), watching_loop(registry), serving(app, settings) as address:
            _warn_of_open_keys(settings)
            tell_parent("listening", address=address)
            tell_parent("ready")
            await until_stopped(settings)


def _warn_of_open_keys(settings: GatewaySettings) -> None:
    if not settings.allow_anonymous:
        warn_of_open_keys(settings.host, settings)


def _tls(settings: GatewaySettings) -> tandem.Tls | bool:
    if not settings.router_tls:
        return False
    return tandem.Tls(settings.router_tls_ca or None, settings.router_tls_name or None)


if __name__ == "__main__":
    sys.exit(ServiceProgram("gateway", GatewaySettings, serve).main())
