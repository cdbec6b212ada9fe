"""Members of quantization_config that several methods have. Each function raises ConfigurationError."""

import re
from collections.abc import Mapping
from fnmatch import translate
from typing import Any

from mesh.domain.errors import ConfigurationError

RawConfig = Mapping[str, Any]


def require(raw: RawConfig, name: str, *accepted: object, default: object = None) -> Any:
    value = raw.get(name, default)
    value = value.lower() if isinstance(value, str) else value
    if not any(value == each and type(value) is type(each) for each in accepted):  # 4.0 and True are no sizes
        listed = ", ".join(map(str, accepted))
        raise ConfigurationError(f"{name} {value!r:.100} is not supported; supported: {listed}")
    return value


def flag(raw: RawConfig, name: str, *, default: bool) -> bool:
    value = default if raw.get(name) is None else raw[name]
    if not isinstance(value, bool):
        raise ConfigurationError(f"{name} must be true or false, got {value!r:.100}")
    return value


def member(raw: RawConfig, name: str) -> RawConfig:
    value = raw.get(name)
    if not isinstance(value, dict):
        raise ConfigurationError(f"{name:.100} must be an object, got {value!r:.100}")
    return value


def group_size(raw: RawConfig) -> int:
    """Inputs that share a scale; 0: all of them."""
    size = raw.get("group_size")
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < -1 or size == 0):
        raise ConfigurationError(f"group_size must be > 0, or -1 for one group, got {size!r:.100}")
    return size if size and size > 0 else 0


def block_sizes(raw: RawConfig, name: str) -> tuple[int, int]:
    """Rows and inputs that share a scale: a list, or a text such as 128x128."""
    value = raw.get(name)
    sizes = [int(size) for size in value.split("x") if size.isdecimal()] if isinstance(value, str) else value
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise ConfigurationError(f"{name} must be two sizes above 0, rows and inputs, got {value!r:.100}")
    return sizes[0], sizes[1]


def target_names(targets: object, name: str = "targets") -> tuple[str, ...]:
    """Names of modules, and patterns of names."""
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise ConfigurationError(f"{name} must be a list of strings, got {targets!r:.100}")
    for target in targets:
        try:
            re.compile(target.removeprefix("re:") if target.startswith("re:") else "")
        except re.error as error:
            raise ConfigurationError(f"{name}: {target!r:.100} is no regular expression: {error}") from error
    return tuple(targets)


def wildcard_names(names: object, name: str) -> tuple[str, ...]:
    """Names of modules, of which some have wildcards as those of a shell: these become one pattern, which is searched
    faster than thousands.
    """
    targets = target_names(names, name)
    patterns = [translate(target) for target in targets if any(sign in target for sign in "*?[")]
    plain = tuple(target for target in targets if not any(sign in target for sign in "*?["))
    return (*plain, f"re:{'|'.join(patterns)}") if patterns else plain
