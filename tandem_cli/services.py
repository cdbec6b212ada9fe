"""The processes of a mesh and their flags. Pure: starts nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from decode_worker.settings import DecodeSettings
from gateway.settings import GatewaySettings
from mesh.domain.errors import ConfigurationError
from mesh.domain.host import Cores
from mesh.settings import Resolved, load_settings, suggestion
from prefill_worker.settings import PrefillSettings
from router.settings import RouterSettings
from tandem_cli.cores import CorePlan, format_cores
from tandem_cli.up_settings import UpSettings

ROLES: Mapping[str, tuple[str, type]] = {
    "router": ("router", RouterSettings),
    "prefill": ("prefill_worker", PrefillSettings),
    "decode": ("decode_worker", DecodeSettings),
    "gateway": ("gateway", GatewaySettings),
}
"""Module and settings class of each role."""

# Settings that `tandem up` computes itself, and does not accept as flags.
_COMPUTED_SETTINGS = frozenset(
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

_ANY_DEVICE = "auto"
_DEVICES = {"cuda": "cuda:0"}

_LOOPBACK = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]", "::": "[::1]"}

Values = Mapping[str, Mapping[str, str]]
"""Settings by role and name."""


@dataclass(frozen=True, slots=True)
class Service:
    """One process to run. A service without cores may use all cores."""

    name: str
    role: str
    flags: tuple[str, ...]
    cores: Cores = ()

    def listening_at(self, **addresses: str) -> "Service":
        """The same service with fixed ports, taken from `addresses` by setting: `port`, `registry_port`,
        `metrics_port`.

        A restarted service must keep its address, even if its port was chosen by the system at first.
        """
        ports = {name: address.rpartition(":")[2] for name, address in addresses.items() if address}
        return replace(self, flags=(*self.flags, *_flags(**ports)))


def passed_on() -> dict[str, tuple[str, Any]]:
    """Settings of services that are also flags of `tandem up`: name to (roles that have it, dataclass field)."""
    excluded = _COMPUTED_SETTINGS | {setting.name for setting in fields(UpSettings)}
    settings_by_name: dict[str, tuple[str, Any]] = {}
    for role, (_, settings_class) in ROLES.items():
        for setting in fields(settings_class):
            if setting.name not in excluded and not setting.metadata["secret"]:
                roles = settings_by_name[setting.name][0] + "," if setting.name in settings_by_name else ""
                settings_by_name[setting.name] = (roles + role, setting)
    return settings_by_name


def roles_of() -> dict[str, list[str]]:
    """The roles that have each setting of `passed_on()`, by name."""
    return {name: roles.split(",") for name, (roles, _) in passed_on().items()}


def split_secrets(role: str, environ: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Split `environ` for a service of `role` into public variables and its secrets. Secrets of other roles are
    dropped.
    """
    secret_names, all_names = _secret_names(role), {name for other_role in ROLES for name in _secret_names(other_role)}
    public = {name: value for name, value in environ.items() if name not in all_names}
    return public, {name: environ[name] for name in secret_names if name in environ}


def _secret_names(role: str) -> set[str]:
    secrets = [secret for secret in fields(ROLES[role][1]) if secret.metadata["secret"]]
    return {name for secret in secrets for name in (f"TANDEM_{secret.name.upper()}", *secret.metadata["env"])}


def split_by_role(settings: Mapping[str, str], overrides: Sequence[str]) -> dict[str, dict[str, str]]:
    """Assign each setting to the roles that have it. `overrides` ("role.key=value") apply to one role and take
    precedence. Raises ConfigurationError.
    """
    values: dict[str, dict[str, str]] = {role: {} for role in ROLES}
    roles_by_setting = passed_on()
    for name, value in settings.items():
        for role in roles_by_setting[name][0].split(","):
            values[role][name] = value
    for override in overrides:
        path, is_pair, value = override.partition("=")
        role, _, key = path.partition(".")
        name = key.replace("-", "_")
        if not is_pair or role not in ROLES:
            raise ConfigurationError(f"--set needs ROLE.KEY=VALUE with a role of {', '.join(ROLES)}, got {override!r}")
        if role not in roles_by_setting.get(name, ("",))[0].split(","):
            role_settings = [setting for setting, (roles, _) in roles_by_setting.items() if role in roles.split(",")]
            raise ConfigurationError(f"--set {override}: {role} has no setting {key}{suggestion(name, role_settings)}")
        values[role][name] = value
    return values


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """Folder and workers of one model. `values` are settings for the workers of this model only."""

    name: str
    folder: str
    cores: CorePlan
    values: Values = field(default_factory=dict)

    @property
    def worker_assignments(self) -> list[tuple[str, int, Cores]]:
        """Role, number and cores of each worker, prefill first."""
        return [
            (role, number, cores)
            for role, all_cores in (("prefill", self.cores.prefill), ("decode", self.cores.decode))
            for number, cores in enumerate(all_cores)
        ]


@dataclass(frozen=True, slots=True)
class MeshPlan:
    """All services of one mesh. Flags of workers contain the registry address, which is known once the router
    listens.
    """

    settings: UpSettings
    models: tuple[ModelPlan, ...]
    pin: bool = True
    core_table: Path | None = None
    config: str | None = None
    values: Values = field(default_factory=dict)
    memory_shares: Mapping[str, int] = field(default_factory=dict)
    """Number of workers that share the KV memory of a device, by the name of the worker."""
    value_origins: Values = field(default_factory=dict)
    """The key or variable that each entry of `values` comes from, unless it comes from a flag."""

    @property
    def has_prefill(self) -> bool:
        """True if any model has prefill workers."""
        return any(model.cores.prefill for model in self.models)

    def router(self, number: int = 0) -> Service:
        """Router `number`. Every router serves all models."""
        settings = self.settings
        port = settings.port + number if settings.port else 0
        router_settings = {"host": settings.host, "port": port, "registry_port": 0}
        flags = self._flags("router", {**self._served(), **router_settings})
        expected = _flags(
            expect_prefill=sum(len(model.cores.prefill) for model in self.models),
            expect_decode=sum(len(model.cores.decode) for model in self.models),
        )
        cores = self.models[0].cores.router if self.pin else ()
        pinned = _flags(cpu_list=format_cores(cores)) if cores else ()
        name = "router" if settings.routers == 1 else f"router-{number}"
        return Service(name, "router", (*flags, *expected, *pinned, *self._metrics_port(number)), cores)

    def routers(self) -> list[Service]:
        """All routers, on consecutive ports."""
        return [self.router(number) for number in range(self.settings.routers)]

    def workers(self, registry_address: str) -> list[Service]:
        """The workers of all models, in the order of the models; prefill workers come first."""
        workers = (
            self._worker(model, assignment, registry_address)
            for model in self.models
            for assignment in model.worker_assignments
        )
        return [
            replace(worker, flags=(*worker.flags, *self._metrics_port(index)))
            for index, worker in enumerate(workers, start=self.settings.routers)
        ]

    def gateway(self, router_addresses: Sequence[str], router: RouterSettings) -> Service | None:
        """The HTTP gateway for routers with the settings `router`; None without an HTTP port."""
        settings = self.settings
        if settings.http_port is None:
            return None
        gateway_settings: dict[str, Any] = {"host": settings.http_host, "port": settings.http_port}
        identity = router.load_public_tls()
        if identity is not None:
            gateway_settings |= {
                "router_tls": True,
                "router_tls_ca": router.public_tls_cert,
                "router_tls_name": identity.name,
            }
        routers = ",".join(map(_reachable, router_addresses))
        flags = _flags(**self._config(), router=routers, **gateway_settings, **self.values.get("gateway", {}))
        return Service("gateway", "gateway", (*flags, "--follow-stdin"))

    def sharing_memory(self, environ: Mapping[str, str]) -> "MeshPlan":
        """The same plan, in which workers on one device share its KV memory equally, unless their settings say
        otherwise.

        Raises ConfigurationError as `resolve` does.
        """
        workers = {worker.name: self.resolve(worker, environ) for worker in self.workers("127.0.0.1:1")}
        devices = {name: _DEVICES.get(settings.device, settings.device) for name, settings in workers.items()}
        shares = {
            name: sum(
                devices[name] == _ANY_DEVICE or other_device in (devices[name], _ANY_DEVICE)
                for other_device in devices.values()
            )
            for name, settings in workers.items()
            if not settings.kv_memory_shares
        }
        return replace(self, memory_shares=shares)

    def resolve(self, service: Service, environ: Mapping[str, str]) -> Any:
        """The settings that `service` will load. Raises the same ConfigurationError that the service would raise."""
        return self._load(service, environ).values

    def origins(self, service: Service, environ: Mapping[str, str]) -> Mapping[str, str]:
        """The origin of each setting of `service`, by name. Raises ConfigurationError as `resolve` does."""
        return self._load(service, environ).origins

    def _load(self, service: Service, environ: Mapping[str, str]) -> Resolved[Any]:
        module, settings = ROLES[service.role]
        origins = self.value_origins.get(service.role, {})
        return load_settings(settings, service.flags, prog=module, environ=environ, flag_origins=origins)

    def _worker(self, model: ModelPlan, assignment: tuple[str, int, Cores], registry_address: str) -> Service:
        role, number, cores = assignment
        name = f"{role}-{number}" if len(self.models) == 1 else f"{model.name}-{role}-{number}"
        worker_settings = {"worker_id": name, "registry_address": registry_address, "host": "127.0.0.1", "port": 0}
        settings = {"model": model.folder, "name": model.name, **worker_settings}
        flags = self._flags(role, settings, model.values.get(role, {}))
        extra_flags = _flags(num_threads=len(cores), model_loading_timeout=self.settings.model_loading_timeout)
        if name in self.memory_shares:
            extra_flags += _flags(kv_memory_shares=self.memory_shares[name])
        if self.pin:
            extra_flags += _flags(cpu_list=format_cores(cores))
        lent = model.cores.lent_to(role, number)
        if self.pin and self.core_table is not None and lent:
            extra_flags += _flags(core_table=self.core_table, lent_cores=format_cores(lent))
        return Service(name, role, (*flags, *extra_flags), cores if self.pin else ())

    def _metrics_port(self, index: int) -> tuple[str, ...]:
        """The metrics port of service number `index`, counted from the routers through the workers."""
        first = self.settings.metrics_port
        return () if first is None else _flags(metrics_port=first + index if first else 0)

    def _served(self) -> dict[str, str]:
        """The router settings `model` and `name`."""
        if len(self.models) == 1:
            return {"model": self.models[0].folder, "name": self.models[0].name}
        return {"model": ",".join(f"{model.name}={model.folder}" for model in self.models), "name": ""}

    def _flags(
        self, role: str, settings: Mapping[str, Any], model_settings: Mapping[str, str] = MappingProxyType({})
    ) -> tuple[str, ...]:
        # The revision in the environment is for the hub; services get folders.
        flags = _flags(**{**self._config(), "revision": "", **settings, **self.values.get(role, {}), **model_settings})
        return (*flags, "--follow-stdin")

    def _config(self) -> dict[str, str]:
        return {"config": self.config} if self.config else {}


def _reachable(address: str) -> str:
    """Replace the address of a server that listens on all interfaces by a loopback address."""
    host, _, port = address.rpartition(":")
    return f"{_LOOPBACK.get(host, host)}:{port}"


def _flags(**values: Any) -> tuple[str, ...]:
    return tuple(f"--{name.replace('_', '-')}={value}" for name, value in values.items())
