"""Which processes make up a mesh, and their flags. Pure: starts nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cli.cores import CorePlan
from cli.up_settings import UpSettings
from decode_worker.settings import DecodeSettings
from gateway.settings import GatewaySettings
from mesh.cores import Cores
from mesh.domain.errors import ConfigurationError
from mesh.settings import Resolved, load_settings
from prefill_worker.settings import PrefillSettings
from router.settings import RouterSettings

ROLES: Mapping[str, tuple[str, type]] = {
    "router": ("router", RouterSettings),
    "prefill": ("prefill_worker", PrefillSettings),
    "decode": ("decode_worker", DecodeSettings),
    "gateway": ("gateway", GatewaySettings),
}
"""Module and settings of each role."""

# What the supervisor decides itself.
_OWN = frozenset(
    {
        "worker_id",
        "registry_address",
        "registry_host",
        "registry_port",
        "advertise_host",
        "expect_prefill",
        "expect_decode",
        "router",
        "router_tls",
        "router_tls_ca",
        "router_tls_name",
        "cpu_list",
        "core_table",
        "lent_cores",
        "num_threads",
        "follow_stdin",
        "log_json",
    }
)

_LOOPBACK = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]", "::": "[::1]"}

Values = Mapping[str, Mapping[str, str]]
"""Settings by role and name."""


@dataclass(frozen=True, slots=True)
class Service:
    """One process to run. Without cores it may run on all."""

    name: str
    role: str
    flags: tuple[str, ...]
    cores: Cores = ()


def passed_on() -> dict[str, tuple[str, Any]]:
    """Settings of the services that `tandem up` takes as its own flags: name to (roles that have it, field)."""
    own = _OWN | {each.name for each in fields(UpSettings)}
    found: dict[str, tuple[str, Any]] = {}
    for role, (_, settings) in ROLES.items():
        for each in fields(settings):
            if each.name not in own and not each.metadata["secret"]:
                roles = found[each.name][0] + "," if each.name in found else ""
                found[each.name] = (roles + role, each)
    return found


def roles_of() -> dict[str, list[str]]:
    """The roles that have each of those settings."""
    return {name: roles.split(",") for name, (roles, _) in passed_on().items()}


def split_by_role(given: Mapping[str, str], overrides: Sequence[str]) -> dict[str, dict[str, str]]:
    """Hand each setting to the roles that have it; `overrides` ("role.key=value") go to one role and win."""
    values: dict[str, dict[str, str]] = {role: {} for role in ROLES}
    known = passed_on()
    for name, value in given.items():
        for role in known[name][0].split(","):
            values[role][name] = value
    for override in overrides:
        path, is_pair, value = override.partition("=")
        role, _, key = path.partition(".")
        name = key.replace("-", "_")
        if not is_pair or role not in ROLES:
            raise ConfigurationError(f"--set wants ROLE.KEY=VALUE with a role of {', '.join(ROLES)}, got {override!r}")
        if role not in known.get(name, ("",))[0].split(","):
            raise ConfigurationError(f"--set {override}: {role} has no setting {key}")
        values[role][name] = value
    return values


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """One model's folder and workers. `values` are settings that only its workers have."""

    name: str
    folder: str
    cores: CorePlan
    values: Values = field(default_factory=dict)

    @property
    def placed(self) -> list[tuple[str, int, Cores]]:
        """Role, number and cores of each worker, prefill first."""
        return [
            (role, number, cores)
            for role, all_cores in (("prefill", self.cores.prefill), ("decode", self.cores.decode))
            for number, cores in enumerate(all_cores)
        ]


@dataclass(frozen=True, slots=True)
class MeshPlan:
    """All services of one mesh. The workers' flags need the registry's address, known once the router listens."""

    settings: UpSettings
    models: tuple[ModelPlan, ...]
    pin: bool = True
    core_table: Path | None = None
    config: str | None = None
    values: Values = field(default_factory=dict)

    @property
    def has_prefill(self) -> bool:
        """Some model has prefill workers."""
        return any(model.cores.prefill for model in self.models)

    def router(self) -> Service:
        """The router: one for all models."""
        settings = self.settings
        own = {"host": settings.host, "port": settings.port, "registry_port": 0}
        flags = self._flags("router", {**self._served(), **own})
        expected = _flags(
            expect_prefill=sum(len(model.cores.prefill) for model in self.models),
            expect_decode=sum(len(model.cores.decode) for model in self.models),
        )
        cores = self.models[0].cores.router if self.pin else ()
        pinned = _flags(cpu_list=_listed(cores)) if cores else ()
        return Service("router", "router", (*flags, *expected, *pinned, *self._metrics_port(0)), cores)

    def workers(self, registry_address: str) -> list[Service]:
        """The workers, model by model, prefill first."""
        workers = (self._worker(model, place, registry_address) for model in self.models for place in model.placed)
        return [
            replace(worker, flags=(*worker.flags, *self._metrics_port(place)))
            for place, worker in enumerate(workers, start=1)
        ]

    def gateway(self, router_address: str, router: RouterSettings) -> Service | None:
        """The HTTP gateway for a router with these settings, if one is wanted."""
        settings = self.settings
        if settings.http_port is None:
            return None
        own: dict[str, Any] = {"host": settings.http_host, "port": settings.http_port}
        identity = router.load_public_tls()
        if identity is not None:
            own |= {"router_tls": True, "router_tls_ca": router.public_tls_cert, "router_tls_name": identity.name}
        flags = _flags(**self._config(), router=_reachable(router_address), **own, **self.values.get("gateway", {}))
        return Service("gateway", "gateway", (*flags, "--follow-stdin"))

    def resolve(self, service: Service, environ: Mapping[str, str]) -> Any:
        """The settings that `service` will find. Raises ConfigurationError as it would itself."""
        return self._load(service, environ).values

    def origins(self, service: Service, environ: Mapping[str, str]) -> Mapping[str, str]:
        """Where each of those settings comes from. Raises ConfigurationError as `resolve` does."""
        return self._load(service, environ).origins

    def _load(self, service: Service, environ: Mapping[str, str]) -> Resolved[Any]:
        module, settings = ROLES[service.role]
        return load_settings(settings, service.flags, prog=module, environ=environ)

    def _worker(self, model: ModelPlan, place: tuple[str, int, Cores], registry_address: str) -> Service:
        role, number, cores = place
        name = f"{role}-{number}" if len(self.models) == 1 else f"{model.name}-{role}-{number}"
        own = {"worker_id": name, "registry_address": registry_address, "host": "127.0.0.1", "port": 0}
        given = {"model": model.folder, "name": model.name, **own}
        flags = self._flags(role, given, model.values.get(role, {}))
        placed = _flags(num_threads=len(cores), model_loading_timeout=self.settings.model_loading_timeout)
        if self.pin:
            placed += _flags(cpu_list=_listed(cores))
        lent = model.cores.lent_to(role, number)
        if self.pin and self.core_table is not None and lent:
            placed += _flags(core_table=self.core_table, lent_cores=_listed(lent))
        return Service(name, role, (*flags, *placed), cores if self.pin else ())

    def _metrics_port(self, place: int) -> tuple[str, ...]:
        """The port for figures of the service at this place: the router, then the workers."""
        first = self.settings.metrics_port
        return () if first is None else _flags(metrics_port=first + place if first else 0)

    def _served(self) -> dict[str, str]:
        """The router's settings for the models."""
        if len(self.models) == 1:
            return {"model": self.models[0].folder, "name": self.models[0].name}
        return {"model": ",".join(f"{model.name}={model.folder}" for model in self.models), "name": ""}

    def _flags(
        self, role: str, own: Mapping[str, Any], of_model: Mapping[str, str] = MappingProxyType({})
    ) -> tuple[str, ...]:
        # What is in the environment for the hub has had its effect: services get folders.
        flags = _flags(**{**self._config(), "revision": "", **own, **self.values.get(role, {}), **of_model})
        return (*flags, "--follow-stdin")

    def _config(self) -> dict[str, str]:
        return {"config": self.config} if self.config else {}


def _reachable(address: str) -> str:
    """Where something that listens on all addresses is reached on this machine."""
    host, _, port = address.rpartition(":")
    return f"{_LOOPBACK.get(host, host)}:{port}"


def _flags(**values: Any) -> tuple[str, ...]:
    return tuple(f"--{name.replace('_', '-')}={value}" for name, value in values.items())


def _listed(cores: Cores) -> str:
    return ",".join(map(str, cores))
