"""The TOML settings file: one table per component, and top-level keys that apply to all components."""

import difflib
import tomllib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from mesh.domain.errors import ConfigurationError

SHORT_NAMES: Mapping[str, str] = {"prefill_worker": "prefill", "decode_worker": "decode"}
"""Alternative table names, as in `--set decode.KEY=VALUE`."""
COMPONENTS = (
    "up",
    "router",
    "gateway",
    "prefill_worker",
    "decode_worker",
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
_ALIKE = frozenset({"router", "routers"})


def near_name(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that `name` misspells, None if there is none."""
    if name in _ALIKE:
        return None
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=_NEAR)), None)


def suggestion(name: str, known: Collection[str]) -> str:
    """Return "; did you mean ...?" or "". More tolerant than `near_name`, because `name` is known to be wrong."""
    matches = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {matches[0]}?" if matches else ""


def read_settings_file(path: str, component: str, names: Collection[str]) -> dict[str, Any]:
    """Return the values for `component`, whose settings are `names`.

    Raises ConfigurationError for an unknown table, an unknown key in the component's table, and a top-level key that
    misspells one of `names`. Other top-level keys may be settings of other components.
    """
    content = _parse(path)
    _check_tables(path, content)
    values = {key: value for key, value in content.items() if not _is_table(key, value)}
    if component in values:
        raise ConfigurationError(f"{component} in the settings file {path} must be a table: [{component}]")
    for key in values.keys() - set(names):
        if near := near_name(key, names):
            raise ConfigurationError(f"the settings file {path} has an unknown key {key}; did you mean {near}?")
    return values | _table(path, content, component, names)


def check_settings_file(path: str, names: Mapping[str, Collection[str]]) -> None:
    """Raise ConfigurationError for a key that no component has. `names` maps components to their settings."""
    content = _parse(path)
    _check_tables(path, content)
    for component, settings in names.items():
        _table(path, content, component, settings)
    all_names = {name for settings in names.values() for name in settings}
    for key, value in content.items():
        if key not in all_names and not _is_table(key, value):
            raise ConfigurationError(f"the settings file {path} has an unknown key {key}{suggestion(key, all_names)}")


def _parse(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"cannot read the settings file {path}: {error}") from error


def _check_tables(path: str, content: Mapping[str, Any]) -> None:
    for key, value in content.items():
        if isinstance(value, dict) and key not in (*COMPONENTS, *_JSON_SETTINGS):
            raise ConfigurationError(
                f"the settings file {path} has an unknown table [{key}]{suggestion(key, COMPONENTS)}"
                f" (tables: {', '.join(COMPONENTS)})"
            )


def _is_table(key: str, value: Any) -> bool:
    """Return True for a component's table. `router`, `prefill` and `decode` are also names of settings."""
    return key in COMPONENTS and isinstance(value, dict)


def _table(path: str, content: Mapping[str, Any], component: str, names: Collection[str]) -> dict[str, Any]:
    """Return the component's table, merged with the table of its short name."""
    merged: dict[str, Any] = {}
    for title in filter(None, (component, SHORT_NAMES.get(component))):
        table = content.get(title, {})
        for key, value in table.items() if _is_table(title, table) else ():
            if key not in names:
                raise ConfigurationError(
                    f"the settings file {path} has an unknown key {key} in [{title}]{suggestion(key, names)}"
                )
            if merged.setdefault(key, value) != value:
                raise ConfigurationError(
                    f"the settings file {path} has {key} in [{component}] and in [{title}], with different values"
                )
    return merged
