"""Where the services of a mesh listen: the port for HTTP, ports that two services would share, and proxies."""

import os
from dataclasses import replace
from itertools import combinations

from mesh.domain.errors import ConfigurationError
from mesh.domain.host import is_loopback, is_unspecified
from mesh.rpc.server import require_free
from tandem_cli.configuration.up_settings import DEFAULT_HTTP_PORT, UpSettings, ports_from
from tandem_cli.local_mesh.deployment import Deployment
from tandem_cli.local_mesh.display import Display

NO_GRPC_PROXY, NO_PROXY = "no_grpc_proxy", "no_proxy"  # gRPC reads the second if the first is not set


def with_http(settings: UpSettings, display: Display) -> UpSettings:
    """The settings with a port for HTTP, unless they have one, want none, or its port is taken."""
    if settings.http_port is not None or settings.no_http:
        return settings
    if DEFAULT_HTTP_PORT not in settings.router_ports and _is_free(settings.http_host, DEFAULT_HTTP_PORT):
        return replace(settings, http_port=DEFAULT_HTTP_PORT)
    display.line(
        f"no HTTP, because port {DEFAULT_HTTP_PORT} is taken: choose another with --http-port PORT, or 0", "yellow"
    )
    return settings


def _is_free(host: str, port: int) -> bool:
    try:
        require_free(host, port)
    except ConfigurationError:
        return False
    return True


def require_distinct_ports(deployment: Deployment, metrics_host: str) -> None:
    """Raise ConfigurationError if two services are to listen at the same port of one address."""
    settings = deployment.settings
    first, num_services = settings.metrics_port or 0, settings.routers + len(deployment.workers())
    listeners = (
        ("port", settings.host, settings.router_ports),
        ("http_port", settings.http_host, ports_from(settings.http_port or 0, 1)),
        ("metrics_port", metrics_host, ports_from(first, num_services)),
    )
    for (one, host, ports), (other, other_host, other_ports) in combinations(listeners, 2):
        meet = host == other_host or is_unspecified(host) or is_unspecified(other_host)
        if meet and (shared := set(ports) & set(other_ports)):
            raise ConfigurationError(f"{one} and {other} give two services the port {min(shared)}: choose another")


def reach_directly(host: str) -> None:
    """Let gRPC reach the mesh's routers without the HTTP proxy of the environment, here and in the gateway. The SDK
    does so for loopback addresses only.
    """
    if not is_loopback(host):
        others = os.environ.get(NO_GRPC_PROXY) or os.environ.get(NO_PROXY, "")
        os.environ[NO_GRPC_PROXY] = ",".join(filter(None, (others, host.strip("[]"))))
