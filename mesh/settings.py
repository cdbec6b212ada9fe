"""Settings: one frozen dataclass per component, filled from flags, environment and a TOML file.

A component declares its settings with `setting(...)` and loads them with `load_settings`. Precedence: flag,
environment, file, default. The origin of each value is kept, so that a service can log once, at start, what holds and
why. This module is the only place that reads the environment.
"""

import argparse
import os
import tomllib
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args, get_type_hints

from mesh.domain.errors import ConfigurationError

T = TypeVar("T")

_ENV_PREFIX = "TANDEM_"
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


def setting(default: Any, about: str, *, env: Sequence[str] = (), secret: bool = False) -> Any:
    """A settings field. `env` adds variable names beside TANDEM_<NAME>; secrets have no flag and are never shown.

    Pass `...` as default for a value that must be given.
    """
    metadata = {"about": about, "env": tuple(env), "secret": secret}
    return field(metadata=metadata) if default is ... else field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class Resolved(Generic[T]):
    """Settings and where each value came from."""

    values: T
    origins: Mapping[str, str]

    def describe(self) -> dict[str, str]:
        """`{name: "value (origin)"}` for the log; secrets hidden."""
        shown: dict[str, str] = {}
        for f in fields(self.values):  # type: ignore[arg-type]
            value = getattr(self.values, f.name)
            if f.metadata.get("secret") and value:
                value = "***"
            shown[f.name] = f"{value} ({self.origins[f.name]})"
        return shown


def load_settings(
    cls: type[T], argv: Sequence[str], *, prog: str, environ: Mapping[str, str] | None = None
) -> Resolved[T]:
    """Fill `cls`. Raises ConfigurationError that names the setting, its origin and what was expected.

    `--config FILE` names a TOML file: keys at its top level hold for all components, those in
    table `[prog]` for this one.
    """
    environ = os.environ if environ is None else environ
    hints = get_type_hints(cls)
    flags = _parse_flags(cls, hints, argv, prog)
    from_file = _read_file(flags.pop("config", None) or environ.get("TANDEM_CONFIG"), prog)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for f in fields(cls):  # type: ignore[arg-type]
        found = _find(f, flags, environ, from_file)
        if found is not None:
            raw, origin = found
            values[f.name], origins[f.name] = _convert(f.name, raw, hints[f.name], origin), origin
        elif f.default is MISSING:
            raise ConfigurationError(f"{f.name} is not set: give {_flag(f.name)} or {_env_names(f)[0]}")
        else:
            values[f.name], origins[f.name] = f.default, "default"
    return Resolved(cls(**values), types.MappingProxyType(origins))


def _find(
    f: Any, flags: Mapping[str, str], environ: Mapping[str, str], from_file: Mapping[str, Any]
) -> tuple[Any, str] | None:
    if f.name in flags:
        return flags[f.name], f"flag {_flag(f.name)}"
    for name in _env_names(f):
        if environ.get(name):  # empty counts as unset
            return environ[name], f"environment {name}"
    if f.name in from_file:
        return from_file[f.name], "file"
    return None


def _env_names(f: Any) -> tuple[str, ...]:
    return (_ENV_PREFIX + f.name.upper(), *f.metadata.get("env", ()))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _parse_flags(cls: type, hints: Mapping[str, Any], argv: Sequence[str], prog: str) -> dict[str, str]:
    parser = argparse.ArgumentParser(prog=f"python -m {prog}", allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("--config", help="TOML file with settings")
    for f in fields(cls):
        if f.metadata.get("secret"):
            continue
        default = "required" if f.default is MISSING else f"default {f.default}"
        about = f"{f.metadata['about']} ({default}; env {', '.join(_env_names(f))})".replace("%", "%%")
        bare: dict[str, Any] = {"nargs": "?", "const": "true"} if hints[f.name] is bool else {}
        parser.add_argument(_flag(f.name), dest=f.name, help=about, metavar="VALUE", **bare)
    return vars(parser.parse_args(list(argv)))


def _read_file(path: str | None, prog: str) -> dict[str, Any]:
    if not path:
        return {}
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"cannot read the settings file {path}: {error}") from error
    own = content.get(prog, {})
    if not isinstance(own, dict):
        raise ConfigurationError(f"{prog} in the settings file {path} must be a table: [{prog}]")
    return {key: value for key, value in content.items() if not isinstance(value, dict)} | own


def _convert(name: str, raw: Any, hint: Any, origin: str) -> Any:
    kinds = [kind for kind in get_args(hint) or (hint,) if kind is not type(None)]
    try:
        return _to_bool(raw) if kinds[0] is bool else kinds[0](raw)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigurationError(f"{name} must be {kinds[0].__name__}, got {raw!r} (from {origin})") from error


def _to_bool(raw: Any) -> bool:
    text = str(raw).lower()
    if text not in _TRUE | _FALSE:
        raise ValueError(text)
    return text in _TRUE
