"""Facts that a deployment takes from the settings of its services."""

from collections.abc import Mapping
from dataclasses import replace

from mesh.domain.errors import ConfigurationError
from mesh.domain.host import is_loopback
from router.settings import RouterSettings
from tandem_cli.deployment import Deployment

_ANY_ADDRESS = ("0.0.0.0", "[::]")


def with_switchable(deployment: Deployment, environ: Mapping[str, str]) -> Deployment:
    """Make all workers switchable if the router is to let them change their roles. Raises ConfigurationError."""
    router: RouterSettings = deployment.resolve(deployment.router(), environ)
    settings = deployment.settings
    if not (settings.switchable or router.switch_roles):
        return deployment
    if settings.on:
        name = "switch_roles" if router.switch_roles else "switchable"
        raise ConfigurationError(f"{name} and on={settings.on} do not fit: workers on Ray have one role each")
    return replace(deployment, settings=replace(settings, switchable=True))


def with_decode_host(deployment: Deployment, environ: Mapping[str, str]) -> Deployment:
    """Let decode workers listen where ranks of prefill workers on other machines, which send KV themselves, reach them:
    at the address that these ranks dial. Raises ConfigurationError.
    """
    workers = [(worker.role, deployment.resolve(worker, environ)) for worker in deployment.workers("127.0.0.1:1")]
    hosts = {
        settings.listen_for_ranks().host for role, settings in workers if role == "prefill" and settings.rank_listen
    }
    if not (far := sorted(host for host in hosts if not is_loopback(host))):
        return deployment
    if far[0] in _ANY_ADDRESS:
        raise ConfigurationError(
            f"prefill.rank_listen must name an address of this machine, not {far[0]}: ranks on other machines send KV "
            "to the decode workers, which listen there, too"
        )
    return replace(deployment, decode_host=far[0])
