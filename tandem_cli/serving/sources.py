"""Reads keys from a serving.properties file and from the environment."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import javaproperties

from mesh.domain.errors import ConfigurationError
from tandem_cli.serving.conversions import number
from tandem_cli.serving.knobs import KNOBS, ROPE_NAMES, Knob

_OPTION = "OPTION_"
_SERVING = "SERVING_"
_SPECIAL_NAMES = {"OPTION_ENTRYPOINT": "option.entryPoint", "OPTION_ENGINE": "engine"}


@dataclass(frozen=True, slots=True)
class Entry:
    """A key with its value. `origin` is a file or variable; `folder` is the folder of the file, "" for a variable."""

    key: str
    value: str
    origin: str
    folder: str = ""

    @property
    def label(self) -> str:
        """The key with its origin, for messages."""
        return self.key if self.key == self.origin else f"{self.key} ({self.origin})"


def read_properties(path: str) -> dict[str, Entry]:
    """Read a file in Java's properties format. Raises ConfigurationError."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        entries = javaproperties.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot read {path}: {error}") from error
    name, folder = Path(path).name, str(Path(path).parent)
    return {key: Entry(key, value.strip(), name, folder) for key, value in entries.items()}


def read_options(environ: Mapping[str, str]) -> dict[str, Entry]:
    """Keys from OPTION_* variables: OPTION_FOO_BAR is option.foo_bar. Empty variables count as unset."""
    return {
        entry.key: entry
        for entry in (
            Entry(_SPECIAL_NAMES.get(name, f"option.{name.removeprefix(_OPTION).lower()}"), value.strip(), name)
            for name, value in environ.items()
            if name.startswith(_OPTION) and value.strip()
        )
    }


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """SERVING_* variables that are not in the table."""
    known_names = {name for knob in KNOBS for name in knob.env}
    return [name for name in environ if name.startswith(_SERVING) and environ[name].strip() and name not in known_names]


def find(knob: Knob, layers: tuple[Mapping[str, Entry], ...], environ: Mapping[str, str]) -> Entry | None:
    """The entry for a knob, from the first layer that has one, else from a variable. Raises ConfigurationError if names
    of the knob in one layer contradict each other.
    """
    for layer in layers:
        entries = [layer[key] for key in (knob.key, *knob.also) if key in layer]
        if entries:
            return _require_agreement(entries)
    entries = [Entry(name, environ[name].strip(), name) for name in knob.env if environ.get(name, "").strip()]
    return _require_agreement(entries) if entries else None


def with_rope_scaling(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Join TGI's ROPE_SCALING and ROPE_FACTOR to one variable, in JSON. As in TGI, a factor alone means linear scaling.

    Raises ConfigurationError.
    """
    kind, factor = (environ.get(name, "").strip() for name in ROPE_NAMES[:2])
    if kind.startswith("{") or not (kind or factor):
        return environ
    scaling = {"rope_type": kind or "linear", "factor": number(factor or "1", "ROPE_FACTOR: ")}
    joined_name = " and ".join(name for name, value in zip(ROPE_NAMES[:2], (kind, factor), strict=True) if value)
    return {name: value for name, value in environ.items() if name not in ROPE_NAMES} | {
        joined_name: json.dumps(scaling)
    }


def known_keys() -> Iterator[str]:
    """All names of keys in serving.properties that the table contains."""
    for knob in KNOBS:
        yield from (knob.key, *knob.also)


def _require_agreement(entries: list[Entry]) -> Entry:
    """The first entry. Raises ConfigurationError if another one has a different value."""
    for other in entries[1:]:
        if other.value != entries[0].value:
            raise ConfigurationError(
                f"{entries[0].key}={entries[0].value} and {other.key}={other.value} contradict each other: "
                "set one of them"
            )
    return entries[0]
