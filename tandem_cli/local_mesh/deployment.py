"""A deployment of a mesh: its models with their folders, workers and cores, and the services with their flags.

Nothing is started here. `prepare_models` downloads models, once, before any service starts.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from checkpoint.source import ModelSource, Progress, split_models
from mesh.domain.errors import ConfigurationError
from mesh.domain.host import Cores, format_cores, local_address
from mesh.settings import Resolved, as_flags, load_settings
from router.settings import RouterSettings
from tandem_cli.configuration.low_code_values import flag
from tandem_cli.configuration.up_settings import UpSettings, for_both, module_and_settings, split_by_role
from tandem_cli.local_mesh.hardware import (
    CoreAssignment,
    assign_cores,
    assign_gpus,
    available_cores,
    num_gpus,
    num_sharing,
    worker_devices,
)
from tandem_cli.model_files.model_folders import find_model

_MODEL_OVERRIDE = re.compile(r"([\w.-]+)/(.+)")
_WORKER_ROLES = ("prefill", "decode")
_COUNTS = ("prefill", "decode", "colocated")
_STOP_MARGIN_S = 50.0
"""A service on a busy machine may need this long to stop besides the time for running work."""

_NOWHERE = "127.0.0.1:1"

Values = Mapping[str, Mapping[str, str]]
"""Settings by role and name."""


@dataclass(frozen=True, slots=True)
class Service:
    """One process to run. A service without cores may use all cores."""

    name: str
    role: str
    flags: tuple[str, ...]
    cores: Cores = ()
    program: str = ""
    """The name of its program, if that is not the role."""

    def listening_at(self, **addresses: str) -> "Service":
        """The same service with fixed ports, taken from `addresses` by setting: `port`, `registry_port`,
        `metrics_port`.

        A restarted service must keep its address, even if its port was chosen by the system at first.
        """
        ports = {name: address.rpartition(":")[2] for name, address in addresses.items() if address}
        return replace(self, flags=(*self.flags, *as_flags(**ports)))


@dataclass(frozen=True, slots=True)
class ModelDeployment:
    """Folder and workers of one model. `values` are settings for the workers of this model only."""

    name: str
    folder: str
    cores: CoreAssignment
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
class Deployment:
    """All services of one mesh. Flags of workers contain the registry address, which is known once the router
    listens.
    """

    settings: UpSettings
    models: tuple[ModelDeployment, ...]
    pin: bool = True
    core_table: Path | None = None
    config: str | None = None
    values: Values = field(default_factory=dict)
    device_values: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Settings of each worker, by name, that follow from the devices of all."""
    value_origins: Values = field(default_factory=dict)
    """The key or variable that each entry of `values` comes from, unless it comes from a flag."""
    decode_host: str = "127.0.0.1"
    """Where decode workers listen. All other workers listen on loopback."""
    registry_host: str = ""
    """Where workers on other machines register; "" for none."""
    download_s: float = 0.0
    """How much of `model_loading_timeout` has passed, if it is set."""

    @property
    def has_prefill(self) -> bool:
        """True if any model has prefill workers."""
        return any(model.cores.prefill for model in self.models)

    @property
    def programs(self) -> list[str]:
        """Names of the services' programs, in the order of their start."""
        gateway = [] if self.settings.http_port is None else ["gateway"]
        workers = [*(["prefill"] if self.has_prefill else []), "decode"]
        return ["router", *(["switchable"] if self.settings.switchable else workers), *gateway]

    def router(self, number: int = 0) -> Service:
        """Router `number`. Every router serves all models."""
        settings = self.settings
        port = settings.port + number if settings.port else 0
        router_settings = {"host": settings.host, "port": port, "registry_port": 0}
        if self.registry_host:
            router_settings["registry_host"] = self.registry_host
        flags = self._flags({**self._served(), **router_settings, **self.values.get("router", {})})
        expected = as_flags(
            expect_prefill=sum(len(model.cores.prefill) for model in self.models),
            expect_decode=sum(len(model.cores.decode) for model in self.models),
        )
        cores = self.models[0].cores.router if self.pin else ()
        pinned = as_flags(cpu_list=format_cores(cores)) if cores else ()
        name = "router" if settings.routers == 1 else f"router-{number}"
        return Service(name, "router", (*flags, *expected, *pinned, *self._metrics_port(number)), cores)

    def routers(self) -> list[Service]:
        """All routers, on consecutive ports."""
        return [self.router(number) for number in range(self.settings.routers)]

    def workers(self, registry_address: str = _NOWHERE) -> list[Service]:
        """The workers of all models, in the order of the models; prefill workers come first. Without an address they
        cannot be started, but their settings can be resolved.
        """
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
        tls = router.load_public_tls()
        if tls is not None:
            gateway_settings |= {
                "router_tls": True,
                "router_tls_ca": router.public_tls_cert,
                "router_tls_name": tls.latest.name,
            }
        routers = ",".join(map(local_address, router_addresses))
        flags = as_flags(**self._config(), router=routers, **gateway_settings, **self.values.get("gateway", {}))
        return Service("gateway", "gateway", (*flags, "--follow-stdin"))

    def with_cores_for_ranks(self, environ: Mapping[str, str], available: Sequence[int]) -> "Deployment":
        """The same deployment, with cores for each rank: a worker of N ranks gets N times the cores of a worker with
        one rank, if `available` has enough.

        Raises ConfigurationError as `resolve` does.
        """
        workers = self.worker_settings(environ)
        prefill, decode = (
            [settings.num_local_ranks for worker, settings in workers if worker.role == role] for role in _WORKER_ROLES
        )
        if max(*prefill, *decode, 1) == 1:
            return self
        cores = assign_cores(
            available,
            num_prefill=len(prefill),
            num_decode=len(decode),
            ranks=[*prefill, *decode],
            max_per_worker=self.settings.threads_per_worker,
        ).split([(len(model.cores.prefill), len(model.cores.decode)) for model in self.models])
        models = (replace(model, cores=assigned) for model, assigned in zip(self.models, cores, strict=True))
        return replace(self, models=tuple(models))

    def on_devices(self, environ: Mapping[str, str]) -> "Deployment":
        """The same deployment, with GPUs for the workers that ask for any, as far as there are enough. Workers on one
        device share its KV memory equally, unless their settings say otherwise.

        Raises ConfigurationError as `resolve` does.
        """
        workers = {worker.name: settings for worker, settings in self.worker_settings(environ)}
        asked = {name: (settings.device, settings.num_local_ranks) for name, settings in workers.items()}
        chosen = assign_gpus(asked, num_gpus(environ))
        devices = {name: worker_devices(chosen.get(name, asked[name][0]), asked[name][1]) for name in workers}
        values: dict[str, dict[str, object]] = {name: {"device": device} for name, device in chosen.items()}
        for name, settings in workers.items():
            if not settings.kv_memory_shares:
                num_workers = max(num_sharing(device, devices.values()) for device in devices[name])
                values.setdefault(name, {})["kv_memory_shares"] = num_workers
        return replace(self, device_values=values)

    def resolve(self, service: Service, environ: Mapping[str, str]) -> Any:
        """The settings that `service` will load. Raises the same ConfigurationError that the service would raise."""
        return self._load(service, environ).values

    def worker_settings(self, environ: Mapping[str, str]) -> list[tuple[Service, Any]]:
        """Each worker with the settings that it will load. Raises ConfigurationError as `resolve` does."""
        return [(worker, self.resolve(worker, environ)) for worker in self.workers()]

    def stop_limit_s(self, service: Service, environ: Mapping[str, str]) -> float:
        """Seconds after SIGTERM in which `service` should exit: the time for running work, and some more."""
        settings = self.resolve(service, environ)
        grace_s: float = settings.drain_grace_s if service.role in _WORKER_ROLES else settings.grace_s
        return grace_s + _STOP_MARGIN_S

    def origins(self, service: Service, environ: Mapping[str, str]) -> Mapping[str, str]:
        """The origin of each setting of `service`, by name. Raises ConfigurationError as `resolve` does."""
        return self._load(service, environ).origins

    def _load(self, service: Service, environ: Mapping[str, str]) -> Resolved[Any]:
        module, settings = module_and_settings(service.role, is_switchable=service.program == "switchable")
        origins = self.value_origins.get(service.role, {})
        return load_settings(settings, service.flags, prog=module, environ=environ, flag_origins=origins)

    def _worker(self, model: ModelDeployment, assignment: tuple[str, int, Cores], registry_address: str) -> Service:
        role, number, cores = assignment
        name = f"{role}-{number}" if len(self.models) == 1 else f"{model.name}-{role}-{number}"
        host = self.decode_host if role == "decode" else "127.0.0.1"
        worker_settings = {"worker_id": name, "registry_address": registry_address, "host": host, "port": 0}
        settings = {"model": model.folder, "name": model.name, **worker_settings}
        program = "switchable" if self.settings.switchable else ""
        if program:
            settings |= {"role": role, **for_both(self.values), **for_both(model.values)}
        else:
            settings |= {**self.values.get(role, {}), **model.values.get(role, {})}
        flags = self._flags(settings)
        limit_s = self.settings.model_loading_timeout
        extra_flags = as_flags(num_threads=len(cores))
        extra_flags += as_flags(model_loading_timeout=limit_s) if limit_s is not None else ()
        extra_flags += as_flags(**self.device_values.get(name, {}))
        if self.pin:
            extra_flags += as_flags(cpu_list=format_cores(cores))
        lent = model.cores.lent_to(role, number)
        if self.pin and self.core_table is not None and lent:
            extra_flags += as_flags(core_table=self.core_table, lent_cores=format_cores(lent))
        return Service(name, role, (*flags, *extra_flags), cores if self.pin else (), program)

    def _metrics_port(self, index: int) -> tuple[str, ...]:
        """The metrics port of service number `index`, counted from the routers through the workers."""
        first = self.settings.metrics_port
        return () if first is None else as_flags(metrics_port=first + index if first else 0)

    def _served(self) -> dict[str, str]:
        """The router settings `model` and `name`."""
        if len(self.models) == 1:
            return {"model": self.models[0].folder, "name": self.models[0].name}
        return {"model": ",".join(f"{model.name}={model.folder}" for model in self.models), "name": ""}

    def _flags(self, settings: Mapping[str, object]) -> tuple[str, ...]:
        # The revision in the environment is for the hub; services get folders.
        return (*as_flags(**{**self._config(), "revision": "", **settings}), "--follow-stdin")

    def _config(self) -> dict[str, str]:
        return {"config": self.config} if self.config else {}


@dataclass(frozen=True, slots=True)
class Overrides:
    """The values of `--set`: those for all models, and those for one model (MODEL/ROLE.KEY=VALUE)."""

    for_all: list[str]
    by_model: Mapping[str, list[str]]

    @classmethod
    def read(cls, options: Sequence[str]) -> "Overrides":
        for_all: list[str] = []
        by_model: dict[str, list[str]] = {}
        for override in options:
            path, is_pair, value = override.partition("=")
            match = _MODEL_OVERRIDE.fullmatch(path)
            if match:
                by_model.setdefault(match[1], []).append(f"{match[2]}{is_pair}{value}")
            else:
                for_all.append(override)
        return cls(for_all, by_model)


def prepare_models(
    settings: UpSettings, overrides: Overrides, on_progress: Callable[[str], Progress]
) -> tuple[ModelDeployment, ...]:
    """Find or download all models, and divide the cores among their workers. Raises ConfigurationError.

    `on_progress(model name)` returns the callback for the progress of that model's download.
    """
    sources = _sources(settings)
    unknown = overrides.by_model.keys() - sources.keys()
    if unknown:
        raise ConfigurationError(f"--set {min(unknown)}/...: no model has this name; there are {', '.join(sources)}")
    settings_by_model = {name: _model_settings(settings, overrides.by_model.get(name, ())) for name in sources}
    cores = _share_cores(settings, [counts for counts, _ in settings_by_model.values()])
    return tuple(
        ModelDeployment(name, str(find_model(source, on_progress(name))), assigned, settings_by_model[name][1])
        for (name, source), assigned in zip(sources.items(), cores, strict=True)
    )


def find_draft(values: dict[str, str], settings: UpSettings) -> None:
    """Replace the name of a draft model in `values` by its folder. Downloads the model if necessary; workers on other
    machines do that themselves.
    """
    if draft_model := values.get("draft_model"):
        source = ModelSource(draft_model, cache_dir=settings.model_cache)
        if not (settings.on and source.is_remote):
            values["draft_model"] = str(find_model(source))


def join_models(models: Sequence[str]) -> str:
    """Join the values of a repeated `--model` into one setting. Several models need names, or ConfigurationError is
    raised.
    """
    if len(models) > 1 and not all(split_models(model)[0][0] for model in models):
        raise ConfigurationError(f"several models need names, as in --model NAME=MODEL, got {' and '.join(models)}")
    return ",".join(models)


def _sources(settings: UpSettings) -> dict[str, ModelSource]:
    models = split_models(settings.model)
    if settings.name and len(models) > 1:
        raise ConfigurationError("--name works with one model only: name several with --model NAME=MODEL")
    sources = {}
    for name, model in models:
        source = ModelSource(model, settings.revision, settings.model_cache)
        sources[name or settings.name or source.short_name] = source
    return sources


def _model_settings(settings: UpSettings, overrides: Sequence[str]) -> tuple[UpSettings, dict[str, dict[str, str]]]:
    """The settings with the worker counts of one model, and the settings that only its workers have."""
    count_overrides = [override.removeprefix("up.") for override in overrides if override.startswith("up.")]
    values = split_by_role({}, [override for override in overrides if not override.startswith("up.")])
    for role in values:
        if values[role] and role not in _WORKER_ROLES:
            raise ConfigurationError(f"--set: the {role} serves all models, so it has no settings for one model")
    find_draft(values["decode"], settings)
    counts: dict[str, Any] = dict(_count(override) for override in count_overrides)
    return replace(settings, **counts), values


def _count(override: str) -> tuple[str, int | bool]:
    name, _, value = override.partition("=")
    if name not in _COUNTS:
        raise ConfigurationError(f"--set MODEL/up.{override}: expected one of {', '.join(_COUNTS)}")
    if name == "colocated":
        try:
            return name, flag(value or "true")
        except ConfigurationError as error:
            raise ConfigurationError(f"--set MODEL/up.{override}: {error}") from None
    if not value.isdecimal():
        raise ConfigurationError(f"--set MODEL/up.{override}: expected a number")
    return name, int(value)


def _share_cores(settings: UpSettings, settings_of_models: Sequence[UpSettings]) -> list[CoreAssignment]:
    counts = [(model.num_prefill, model.decode) for model in settings_of_models]
    all_cores = assign_cores(
        available_cores(),
        num_prefill=sum(prefill for prefill, _ in counts),
        num_decode=sum(decode for _, decode in counts),
        max_per_worker=settings.threads_per_worker,
    )
    return all_cores.split(counts)
