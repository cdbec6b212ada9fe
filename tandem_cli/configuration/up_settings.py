"""Settings of `tandem up` and of the services that it starts: the roles that have each setting, and unknown names."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import Field, dataclass, fields

from decode_worker.settings import DecodeSettings
from gateway.settings import GatewaySettings
from mesh.domain.errors import ConfigurationError
from mesh.setting_checks import require_above_zero, require_at_least
from mesh.settings import ENV_PREFIX, check_settings_file, env_name, flag_name, refuse_misspelt, setting, suggestion
from prefill_worker.settings import PrefillSettings
from router.settings import RouterSettings
from tandem_cli.configuration.low_code_keys import SECRET_VARIABLES, knob_of
from tandem_cli.connection import ConnectionSettings
from tandem_cli.load_test.endpoints import OpenAISettings

ROLES: Mapping[str, tuple[str, type]] = {
    "router": ("router", RouterSettings),
    "prefill": ("prefill_worker", PrefillSettings),
    "decode": ("decode_worker", DecodeSettings),
    "gateway": ("gateway", GatewaySettings),
}
"""Module and settings class of each role."""
SWITCHABLE = "switchable_worker"
"""Module of workers with both roles of workers."""

# Settings of services that `tandem up` sets itself, and does not accept as flags.
_SET_BY_UP = frozenset(
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

_OF_MODEL = {"model": "model", "name": "name", "revision": "revision", "host": "", "port": "", "cpu_list": ""}
_OF_WORKERS = {
    **_OF_MODEL,
    "worker_id": "",
    "registry_address": "",
    "num_threads": "threads_per_worker",
    "model_loading_timeout": "model_loading_timeout",
    "core_table": "",
    "lent_cores": "",
}
REPLACED: Mapping[str, Mapping[str, str]] = {
    "router": {
        **_OF_MODEL,
        "host": "host",
        "port": "port",
        "registry_port": "",
        "expect_prefill": "prefill",
        "expect_decode": "decode",
    },
    "prefill_worker": _OF_WORKERS,
    "decode_worker": _OF_WORKERS,
    "gateway": {"host": "http_host", "port": "http_port", "router": ""},
}
"""Settings that each service always gets from `tandem up`, and the setting of `tandem up` to use instead, or ""."""

# Kubernetes sets these for every service in a namespace: a service named tandem adds TANDEM_PORT_80_TCP and others.
_KUBERNETES = re.compile(r"TANDEM_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP)(_\w+)?)")
# Pace belongs to tandem_cli.load_test.paced, http to examples/http, and up_parent is mesh.process.PARENT_ENV.
_OTHER_NAMES = {"config", "pace", "http", "up_parent"}
_FLAGS_ONLY = ("set", "serving_properties")
"""Options of `tandem up` that are no settings: neither variables nor lines of a settings file set them."""
_RAY_CLIENT = re.compile(r"ray://[^/\s]+:\d+")

DEFAULT_HTTP_PORT = 8080


@dataclass(frozen=True, kw_only=True)
class UpSettings:
    """Settings of `tandem up` itself. The constructor raises ConfigurationError for values out of range."""

    model: str = setting(
        "tandem-small",
        "model folder, org/name on the Hugging Face hub, s3://bucket/prefix, or name of a bundled model; several need "
        "names, as in NAME=MODEL",
        env=("MODEL_ID", "HF_MODEL_ID"),
    )
    name: str = setting("", "served model name; default: name of the model without path or organisation")
    revision: str = setting("", "branch, tag or commit on the hub", env=("HF_MODEL_REVISION", "HF_REVISION"))
    model_cache: str = setting("~/.cache/tandem", "folder for copies of models from S3")
    partition: str = setting(
        "",
        "folder for the model's weights as workers map them: written before the start unless they are there, then "
        "served (see `tandem partition`)",
    )
    prefill: int = setting(1, "number of prefill workers of each model")
    decode: int = setting(1, "number of decode workers of each model")
    max_prefill: int | None = setting(
        None, "with `on`: up to this many prefill workers, as the router advises; default: as many as `prefill`"
    )
    max_decode: int | None = setting(
        None, "with `on`: up to this many decode workers, as the router advises; default: as many as `decode`"
    )
    switchable: bool = setting(
        False, "workers can change their roles while they run (see `tandem switch`); implied by switch_roles"
    )
    colocated: bool = setting(False, "start no prefill workers: decode workers compute prompts too")
    host: str = setting("127.0.0.1", "address that clients connect to")
    port: int = setting(50051, "port that clients connect to; 0 picks a free port", env=("PORT",))
    routers: int = setting(1, "number of routers, on consecutive ports; several routers need registry_url")
    registry_url: str = setting(
        "",
        "redis://... or rediss://...: Redis through which several routers share workers and permits; set a URL with a "
        "password in the environment, because flags are visible to other users",
    )
    http_host: str = setting("127.0.0.1", "address that HTTP clients connect to")
    http_port: int | None = setting(
        None,
        "port of the HTTP gateway, which serves the pages and OpenAI's API; 0 picks a free port; default: "
        f"{DEFAULT_HTTP_PORT} if it is free, else no HTTP",
    )
    no_http: bool = setting(False, "serve no HTTP, unless http_port is set")
    metrics_port: int | None = setting(
        None,
        "metrics port of the first router; other routers and workers use the next ports; 0 picks free ports; default: "
        "no metrics",
    )
    threads_per_worker: int | None = setting(
        None, "maximum number of cores of a worker; default: an equal share of all cores"
    )
    model_loading_timeout: float | None = setting(
        None,
        "seconds within which all services must be ready, downloads included; also applies to restarted workers; "
        "default: as long as the start makes progress",
        env=("OPTION_MODEL_LOADING_TIMEOUT",),
    )
    log_dir: str = setting(
        "", "folder for the logs of services; default: a temporary folder, which is kept after failures and warnings"
    )
    on: str = setting(
        "",
        "where workers run: ray, the Ray cluster that this machine is part of, or RAY_ADDRESS; ray://HOST:PORT, a Ray "
        "cluster through Ray Client; default: on this machine",
    )
    no_restart: bool = setting(False, "do not restart services that exit; stop when no router is left")
    no_fork: bool = setting(
        False,
        "execute each service as a program of its own; default: on Linux, fork all from one process that has imported "
        "their modules, which is faster and takes less memory",
    )
    mesh_key: str = setting("", "secret that all services of the mesh share; default: a new random secret", secret=True)

    def __post_init__(self) -> None:
        require_at_least(self, 0, "prefill")
        require_at_least(self, 1, "decode", "threads_per_worker", "routers")
        for name in ("port", "http_port", "metrics_port"):
            if not 0 <= (getattr(self, name) or 0) <= 65535:
                raise ConfigurationError(f"{name} must be in [0, 65535], got {getattr(self, name)}")
        highest = 65536 - self.routers
        for name in ("port", "metrics_port"):
            if (first := getattr(self, name)) and first > highest:
                raise ConfigurationError(
                    f"{name} must be <= {highest}, got {first}: {self.routers} routers use consecutive ports"
                )
        if self.on not in ("", "ray") and not _RAY_CLIENT.fullmatch(self.on):
            raise ConfigurationError(f"on must be ray or ray://HOST:PORT, got {self.on!r}")
        self._check_limits()
        require_above_zero(self, "model_loading_timeout")

    def _check_limits(self) -> None:
        for name, start in (("prefill", self.num_prefill), ("decode", self.decode)):
            limit = getattr(self, f"max_{name}")
            if limit is None:
                continue
            if not self.on or self.switchable:
                raise ConfigurationError(f"max_{name} needs --on ray, and workers that are not switchable")
            if not 0 < start <= limit:
                raise ConfigurationError(f"max_{name} must be >= {name}, which is {start} and not 0, got {limit}")

    @property
    def router_ports(self) -> range:
        return ports_from(self.port, self.routers)

    @property
    def num_prefill(self) -> int:
        return 0 if self.colocated else self.prefill


def ports_from(first: int, count: int) -> range:
    """Consecutive ports; none if the system chooses them."""
    return range(first, first + count) if first else range(0)


@dataclass(frozen=True, kw_only=True)
class HandlerChoice:
    """The gateway setting `handler`. If it is set, unknown keys of serving.properties belong to the handler."""

    handler: str = setting("", "your own model.py")


def passed_on() -> dict[str, dict[str, Field[object]]]:
    """Settings of services that are also flags of `tandem up`: by name, the field in each role that has it."""
    excluded = _SET_BY_UP | {field.name for field in fields(UpSettings)}
    settings_by_name: dict[str, dict[str, Field[object]]] = {}
    for role, (_, settings_class) in ROLES.items():
        for field in fields(settings_class):
            if field.name not in excluded and not field.metadata["secret"]:
                settings_by_name.setdefault(field.name, {})[role] = field
    return settings_by_name


def roles_of() -> dict[str, list[str]]:
    """The roles that have each setting of `passed_on()`, by name."""
    return {name: list(field_by_role) for name, field_by_role in passed_on().items()}


def split_secrets(role: str, environ: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Split `environ` for a service of `role` into public variables and its secrets. Secrets of other roles, and the
    credentials of clients, which no service uses, are dropped.
    """
    secret_names = _secret_names(ROLES[role][1])
    classes = [
        UpSettings,
        ConnectionSettings,
        OpenAISettings,
        *(settings_class for _, settings_class in ROLES.values()),
    ]
    all_names = {name for settings_class in classes for name in _secret_names(settings_class)} | SECRET_VARIABLES
    public = {name: value for name, value in environ.items() if name not in all_names}
    return public, {name: environ[name] for name in secret_names if name in environ}


def _secret_names(settings_class: type) -> set[str]:
    secrets = [secret for secret in fields(settings_class) if secret.metadata["secret"]]
    return {name for secret in secrets for name in (env_name(secret.name), *secret.metadata["env"])}


def split_by_role(settings: Mapping[str, str], overrides: Sequence[str]) -> dict[str, dict[str, str]]:
    """Assign each setting to the roles that have it. `overrides` ("role.key=value") apply to one role and take
    precedence. Raises ConfigurationError.
    """
    values: dict[str, dict[str, str]] = {role: {} for role in ROLES}
    roles_by_setting = roles_of()
    for name, value in settings.items():
        for role in roles_by_setting[name]:
            values[role][name] = value
    for override in overrides:
        path, is_pair, value = override.partition("=")
        role, _, key = path.partition(".")
        name = key.replace("-", "_")
        if not is_pair or role not in ROLES:
            raise ConfigurationError(f"--set needs ROLE.KEY=VALUE with a role of {', '.join(ROLES)}, got {override!r}")
        if role not in roles_by_setting.get(name, ()):
            role_settings = [each for each, roles in roles_by_setting.items() if role in roles]
            raise ConfigurationError(f"--set {override}: {role} has no setting {key}{suggestion(name, role_settings)}")
        values[role][name] = value
    return values


def module_and_settings(role: str, *, is_switchable: bool) -> tuple[str, type]:
    """Module and settings class of a service."""
    if not is_switchable:
        return ROLES[role]
    # Imported here, because it imports the settings of both roles: chains of imports stay short.
    from switchable_worker.settings import SwitchableSettings

    return SWITCHABLE, SwitchableSettings


def for_both(values: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """The settings of a switchable worker, from those of prefill and of decode workers. Raises ConfigurationError if a
    setting has two values.
    """
    prefill, decode = values.get("prefill", {}), values.get("decode", {})
    for name in prefill.keys() & decode.keys():
        if prefill[name] != decode[name]:
            raise ConfigurationError(
                f"{name} is {prefill[name]} for prefill workers and {decode[name]} for decode workers, but switchable "
                "workers are both"
            )
    return {**prefill, **decode}


def all_names() -> dict[str, list[str]]:
    """The setting names of each component, by the name of its table in a settings file."""
    classes = {"up": UpSettings, "client": ConnectionSettings, "bench": OpenAISettings, **dict(ROLES.values())}
    return {
        component: [field.name for field in fields(settings_class)] for component, settings_class in classes.items()
    }


def check_names(config: str | None, environ: Mapping[str, str]) -> list[str]:
    """Return warnings about unknown variables with the prefix TANDEM_. Raises ConfigurationError for unknown keys of
    the settings file, for a variable that misspells a setting of `tandem up` or of a service, started or not, and for
    keys and variables that have no effect because `tandem up` sets what they name.
    """
    names = all_names()
    config = config or environ.get(env_name("config"))
    if config:
        _refuse_replaced(config, check_settings_file(config, names))
    refuse_misspelt(environ, {name for component in ("up", *dict(ROLES.values())) for name in names[component]})
    for name, own in _replaced_everywhere().items():
        if (variable := env_name(name)) in environ:
            raise ConfigurationError(f"{variable} has no effect: {_instead(own)}")
    known_names = {name for component_names in names.values() for name in component_names} | _OTHER_NAMES
    return [_warning(variable, known_names) for variable in environ if _is_unknown(variable, known_names)]


def _refuse_replaced(path: str, keys: Mapping[str, Collection[str]]) -> None:
    """`keys`: those of the settings file, by component, and those for all under ""."""
    for component, replaced in (*REPLACED.items(), ("", _replaced_everywhere())):
        for key in keys[component]:
            if key in replaced:
                table = f" in [{component}]" if component else ""
                raise ConfigurationError(
                    f"the settings file {path} has {key}{table}, which has no effect: {_instead(replaced[key])}"
                )


def _replaced_everywhere() -> dict[str, str]:
    """The settings that neither a service nor `tandem up` itself reads."""
    own = {field.name for field in fields(UpSettings)}
    return {name: instead for each in REPLACED.values() for name, instead in each.items() if name not in own}


def _instead(own: str) -> str:
    return f"`tandem up` has {flag_name(own)} for that, or {own} in [up]" if own else "`tandem up` sets it itself"


def _is_unknown(variable: str, known_names: Collection[str]) -> bool:
    if not variable.startswith(ENV_PREFIX) or _KUBERNETES.fullmatch(variable):
        return False
    return variable.removeprefix(ENV_PREFIX).lower() not in known_names


def _warning(variable: str, known_names: Collection[str]) -> str:
    name = variable.removeprefix(ENV_PREFIX).lower()
    if name in _FLAGS_ONLY:
        return f"{variable} has no effect: {flag_name(name)} is a flag only"
    knob = knob_of(name)
    own = [target.partition(".")[2] for target in knob.targets] if knob else []
    hint = f"; here it is {env_name(own[0])}" if own else suggestion(name, known_names)
    return f"{variable} is not known and has no effect{hint}"
