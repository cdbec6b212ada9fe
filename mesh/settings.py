"""Settings: one frozen dataclass per component, filled from flags, environment and a TOML file.

A component declares its settings with `setting(...)` and loads them with `load_settings`. Precedence: flag,
environment, file, default. The origin of each value is kept, so that a service can log, at start, every value and where
it came from. No service reads a setting from the environment elsewhere.

The TOML file has one table per component, and top-level keys that apply to all components.
"""

import argparse
import difflib
import json
import os
import re
import tomllib
import types
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeGuard, TypeVar, get_args, get_type_hints

from mesh.domain.errors import ConfigurationError

T = TypeVar("T")

ENV_PREFIX = "TANDEM_"
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})

SHORT_NAMES: Mapping[str, str] = {"prefill_worker": "prefill", "decode_worker": "decode"}
"""Alternative table names, as in `--set decode.KEY=VALUE`."""
_PARTS: Mapping[str, tuple[str, ...]] = {"switchable_worker": ("prefill_worker", "decode_worker")}
"""Components that also have the tables of others, in which a setting must not have two values."""
COMPONENTS = (
    "up",
    "router",
    "gateway",
    "prefill_worker",
    "decode_worker",
    "rank_worker",
    "switchable_worker",
    *SHORT_NAMES.values(),
    "handler",
    "client",
    "bench",
    "probe",
)
"""Tables that a settings file may contain."""
_JSON_SETTINGS = ("rope_scaling", "handler_properties")  # settings with JSON text; the file may have a table instead
# Names with at least this similarity count as misspellings. No two real settings are so similar, except _ALIKE.
_NEAR = 0.88
_ALIKE = frozenset({"router", "routers", "header_timeout_s", "leader_timeout_s"})
_METAVARS = {
    "per_s": "N",
    "s": "SECONDS",
    "timeout": "SECONDS",
    "bytes": "BYTES",
    "port": "PORT",
    "host": "HOST",
    "hosts": "HOST,...",
    "address": "HOST:PORT",
    "listen": "HOST:PORT",
    "router": "HOST:PORT",
    "leader": "HOST:PORT",
    "endpoint": "URL",
    "url": "URL",
    "origin": "URL,...",
    "model": "MODEL",
    "adapter": "NAME=FOLDER",
    "dir": "FOLDER",
    "cache": "FOLDER",
    "ledger": "FOLDER",
    "partition": "FOLDER",
    "file": "FILE",
    "table": "FILE",
    "cert": "FILE",
    "key": "FILE",
    "ca": "FILE",
    "handler": "FILE",
    "cpu_list": "CORES",
    "cores": "CORES",
    "rope_scaling": "JSON",
    "tensor_parallel": "N|max",
    "pipeline_parallel": "N|max",
    "transports": "NAME,...",
    "on": "ray[://HOST:PORT]",
}
"""Names of values in `--help`, by the endings of their settings' names."""
_METAVARS_BY_TYPE: Mapping[object, str] = {int: "N", float: "X", str: "NAME"}

BARE = "true"
"""The value of a flag without one, as in `--colocated`."""


def setting(default: Any, about: str, *, env: Sequence[str] = (), secret: bool = False) -> Any:
    """Declare a field of a settings class. `env` adds variable names besides TANDEM_<NAME>. Secrets have no flag and
    are never shown. A field with default `...` is required.
    """
    metadata = {"about": about, "env": tuple(env), "secret": secret}
    return field(default=MISSING if default is ... else default, metadata=metadata, repr=not secret)


@dataclass(frozen=True, slots=True)
class Resolved(Generic[T]):
    """Settings with the origin of each value."""

    values: T
    origins: Mapping[str, str]

    def describe(self) -> dict[str, str]:
        """Return `{name: "value (origin)"}` for the log, with secrets masked."""
        description: dict[str, str] = {}
        for f in fields(self.values):  # type: ignore[arg-type]
            value = getattr(self.values, f.name)
            if f.metadata.get("secret") and value:
                value = "***"
            description[f.name] = f"{value} ({self.origins[f.name]})"
        return description


def load_settings(
    cls: type[T],
    argv: Sequence[str],
    *,
    prog: str,
    environ: Mapping[str, str] | None = None,
    flag_origins: Mapping[str, str] = types.MappingProxyType({}),
    names: Collection[str] = (),
) -> Resolved[T]:
    """Create a `cls`. Raises ConfigurationError, which names the setting, its origin and the expected value.

    `--config FILE` names a TOML file: top-level keys apply to all components, keys in table `[prog]` to this one.
    Unknown keys in that table and misspelt names are errors. `flag_origins` overrides the origin of flags that the
    caller has filled in itself. `names` lists all settings of the component if `cls` has only some of them, as when
    `tandem up` looks for one setting of the gateway.
    """
    environ = os.environ if environ is None else environ
    hints = get_type_hints(cls)
    all_names = {*hints, *names}
    flags = _parse_flags(cls, hints, argv, prog)
    config_path = flags.pop("config", None) or environ.get(env_name("config"))
    from_file = read_settings_file(config_path, prog, all_names) if config_path else {}
    refuse_misspelt(environ, all_names)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for f in fields(cls):  # type: ignore[arg-type]
        raw_value = _find(f, flags, environ, from_file)
        if raw_value is not None:
            raw, origin = raw_value
            if f.name in flags:
                origin = flag_origins.get(f.name, origin)
            values[f.name], origins[f.name] = _convert(f.name, raw, hints[f.name], origin), origin
        elif f.default is MISSING:
            raise ConfigurationError(f"{f.name} is not set: give {flag_name(f.name)} or {_env_names(f)[0]}")
        else:
            values[f.name], origins[f.name] = f.default, "default"
    try:
        return Resolved(cls(**values), types.MappingProxyType(origins))
    except ConfigurationError as error:
        raise ConfigurationError(f"{error}{_mentioned_origins(str(error), origins)}") from error


def _mentioned_origins(message: str, origins: Mapping[str, str]) -> str:
    """Format the origins of the settings that `message` mentions, except defaults."""
    names = [name for name in origins if origins[name] != "default" and re.search(rf"\b{name}\b", message)]
    return f" ({', '.join(f'{name} from {origins[name]}' for name in names)})" if names else ""


def _find(
    f: Field[object], flags: Mapping[str, str], environ: Mapping[str, str], from_file: Mapping[str, object]
) -> tuple[object, str] | None:
    """Return the raw value of field `f` and its origin, None if it is not set."""
    if f.name in flags:
        return flags[f.name], f"flag {flag_name(f.name)}"
    for name in _env_names(f):
        if environ.get(name):  # empty counts as unset
            return environ[name], f"environment {name}"
    if f.name in from_file:
        return from_file[f.name], "file"
    return None


def _env_names(f: Field[object]) -> tuple[str, ...]:
    return (env_name(f.name), *f.metadata.get("env", ()))


def env_name(name: str) -> str:
    """The variable of a setting."""
    return ENV_PREFIX + name.upper()


def flag_name(name: str) -> str:
    """The flag of a setting."""
    return "--" + name.replace("_", "-")


def as_flags(**settings: object) -> tuple[str, ...]:
    """Settings with their values, as flags."""
    return tuple(f"{flag_name(name)}={value}" for name, value in settings.items())


def _parse_flags(cls: type, hints: Mapping[str, object], argv: Sequence[str], prog: str) -> dict[str, str]:
    parser = _FlagParser(prog=f"python -m {prog}", allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings")
    for f in fields(cls):
        if not f.metadata.get("secret"):
            note = f"env {', '.join(_env_names(f))}"
            parser.add_argument(flag_name(f.name), **flag_options(f, note))
    flags, unknown = parser.parse_known_args(list(argv))
    if unknown:
        parser.error(_describe_unknown(unknown[0].partition("=")[0], cls))
    return vars(flags)


def _describe_unknown(word: str, cls: type) -> str:
    if not word.startswith("-"):
        return f"unexpected argument {word!r}"
    secrets = {flag_name(f.name): _env_names(f)[0] for f in fields(cls) if f.metadata.get("secret")}
    if word in secrets:
        return f"there is no option {word}, which other users would see; set {secrets[word]}, or write it into a file"
    flags = [flag_name(f.name) for f in fields(cls) if not f.metadata.get("secret")]
    return f"there is no option {word}{suggestion(word, flags)}"


class _FlagParser(argparse.ArgumentParser):
    """Reports an error in one line: the usage text of a service has a hundred."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see: {self.prog} --help)\n")


def flag_options(f: Field[Any], note: str = "") -> dict[str, Any]:
    """Keyword arguments with which argparse declares the flag of setting `f`. `note` is added to its help text."""
    notes = filter(None, (_describe_default(f), note))
    about = f"{f.metadata['about']} ({'; '.join(notes)})".removesuffix(" ()").replace("%", "%%")
    optional_value: dict[str, Any] = {"nargs": "?", "const": BARE} if f.type is bool else {}
    return {"dest": f.name, "help": about, "metavar": _metavar(f), **optional_value}


def _describe_default(f: Field[Any]) -> str:
    """Empty where the default is nothing: the text about such a setting says what happens then."""
    if f.default is MISSING:
        return "required"
    if f.default is None or f.default == "":
        return ""
    return f"default {str(f.default).lower() if isinstance(f.default, bool) else f.default}"


def _metavar(f: Field[Any]) -> str:
    """The name of the value in `--help`, from the ending of the setting's name, else from its type."""
    if f.type is bool:
        return "true|false"
    by_name = (metavar for ending, metavar in _METAVARS.items() if f"_{f.name}".endswith(f"_{ending}"))
    kinds = [kind for kind in get_args(f.type) or (f.type,) if kind is not type(None)]
    return next(by_name, "") or _METAVARS_BY_TYPE[kinds[0]]


def refuse_misspelt(environ: Mapping[str, str], names: Collection[str]) -> None:
    """Raise ConfigurationError for a variable whose name is close to a known setting. Other unknown variables are
    allowed, because other components use the prefix too."""
    for variable in environ:
        name = variable.removeprefix(ENV_PREFIX).lower()
        if variable.startswith(ENV_PREFIX) and name not in names and (near := near_name(name, names)):
            raise ConfigurationError(f"{variable} is unknown: did you mean {env_name(near)}?")


def _convert(name: str, raw: object, hint: object, origin: str) -> object:
    kind = next(kind for kind in get_args(hint) or (hint,) if kind is not type(None))
    try:
        if kind is bool:
            return _to_bool(raw)
        if kind is str:
            return _to_text(raw)
        if isinstance(raw, bool) or (kind is int and isinstance(raw, float)):  # TOML's, which Python would convert
            raise ValueError(raw)
        return kind(raw)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigurationError(f"{name} must be {kind.__name__}, got {raw!r} (from {origin})") from error


def _to_text(raw: object) -> str:
    """A TOML value as a flag would give it: lists with commas, tables as JSON."""
    if isinstance(raw, dict):
        return json.dumps(raw)
    if isinstance(raw, list):
        return ",".join(map(_to_text, raw))
    return str(raw).lower() if isinstance(raw, bool) else str(raw)


def is_bool(text: str) -> bool:
    """Whether `text` spells a boolean."""
    return text.lower() in _TRUE | _FALSE


def _to_bool(raw: object) -> bool:
    text = str(raw)
    if not is_bool(text):
        raise ValueError(text)
    return text.lower() in _TRUE


def near_name(name: str, candidates: Iterable[str]) -> str | None:
    """Return the known name that `name` misspells, None if there is none."""
    if name in _ALIKE:
        return None
    return next(iter(difflib.get_close_matches(name, candidates, n=1, cutoff=_NEAR)), None)


def suggestion(name: str, candidates: Collection[str]) -> str:
    """Return "; did you mean ...?" or "". More tolerant than `near_name`, because `name` is known to be wrong."""
    matches = difflib.get_close_matches(name, candidates, n=1, cutoff=0.6)
    return f"; did you mean {matches[0]}?" if matches else ""


def read_settings_file(path: str, component: str, names: Collection[str]) -> dict[str, object]:
    """Return the values for `component`, whose settings are `names`.

    Raises ConfigurationError for an unknown table, an unknown key in the component's table, and a top-level key that
    misspells one of `names`. Other top-level keys may be settings of other components.
    """
    content = _parse(path)
    _check_tables(path, content)
    values = {key: value for key, value in content.items() if not _is_table(value, key)}
    if component in values:
        raise ConfigurationError(f"{component} in the settings file {path} must be a table: [{component}]")
    for key in values.keys() - set(names):
        if near := near_name(key, names):
            raise ConfigurationError(f"the settings file {path} has an unknown key {key}; did you mean {near}?")
    return values | _table(path, content, component, names)


def check_settings_file(path: str, names: Mapping[str, Collection[str]]) -> dict[str, Collection[str]]:
    """Return the keys that the file has for each component, and for all under "". Raises ConfigurationError for a key
    that no component has. `names` maps components to their settings.
    """
    content = _parse(path)
    _check_tables(path, content)
    keys: dict[str, Collection[str]] = {
        component: _table(path, content, component, settings) for component, settings in names.items()
    }
    all_names = {name for settings in names.values() for name in settings}
    for key, value in content.items():
        if key not in all_names and not _is_table(value, key):
            raise ConfigurationError(f"the settings file {path} has an unknown key {key}{suggestion(key, all_names)}")
    return keys | {"": [key for key, value in content.items() if not _is_table(value, key)]}


def _parse(path: str) -> dict[str, object]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"cannot read the settings file {path}: {error}") from error


def _check_tables(path: str, content: Mapping[str, object]) -> None:
    for key, value in content.items():
        if isinstance(value, dict) and key not in (*COMPONENTS, *_JSON_SETTINGS):
            raise ConfigurationError(
                f"the settings file {path} has an unknown table [{key}]{suggestion(key, COMPONENTS)}"
                f" (tables: {', '.join(COMPONENTS)})"
            )


def _is_table(value: object, key: str) -> TypeGuard[dict[str, object]]:
    """Return True for a component's table. `router`, `prefill` and `decode` are also names of settings."""
    return key in COMPONENTS and isinstance(value, dict)


def _table(path: str, content: Mapping[str, object], component: str, names: Collection[str]) -> dict[str, object]:
    """Return the component's table, merged with the table of its short name and with those of its parts."""
    merged: dict[str, object] = {}
    origins: dict[str, str] = {}
    tables = (component, *_PARTS.get(component, ()))
    for title in filter(None, (*tables, *map(SHORT_NAMES.get, tables))):
        table = content.get(title, {})
        for key, value in table.items() if _is_table(table, title) else ():
            if key not in names:
                raise ConfigurationError(
                    f"the settings file {path} has an unknown key {key} in [{title}]{suggestion(key, names)}"
                )
            origins.setdefault(key, title)
            if merged.setdefault(key, value) != value and origins[key] != title:  # nan is unlike itself
                raise ConfigurationError(
                    f"the settings file {path} has {key} in [{origins[key]}] and in [{title}], with different values"
                )
    return merged
