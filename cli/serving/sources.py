"""Where keys come from: a serving.properties file and the environment."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import javaproperties

from cli.serving.knobs import KNOBS, Knob
from mesh.domain.errors import ConfigurationError

_OPTION = "OPTION_"
_SPECIAL_NAMES = {"OPTION_ENTRYPOINT": "option.entryPoint", "OPTION_ENGINE": "engine"}


@dataclass(frozen=True, slots=True)
class Given:
    """A key that somebody has set; `folder` is its file's, "" without a file."""

    key: str
    value: str
    origin: str
    folder: str = ""


def read_properties(path: str) -> dict[str, Given]:
    """Java's format. Raises ConfigurationError."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        entries = javaproperties.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot read {path}: {error}") from error
    name, folder = Path(path).name, str(Path(path).parent)
    return {key: Given(key, value.strip(), name, folder) for key, value in entries.items()}


def read_options(environ: Mapping[str, str]) -> dict[str, Given]:
    """OPTION_FOO_BAR is option.foo_bar; empty ones count as unset."""
    return {
        given.key: given
        for given in (
            Given(_SPECIAL_NAMES.get(name, f"option.{name.removeprefix(_OPTION).lower()}"), value.strip(), name)
            for name, value in environ.items()
            if name.startswith(_OPTION) and value.strip()
        )
    }


def find(knob: Knob, layers: tuple[Mapping[str, Given], ...], environ: Mapping[str, str]) -> Given | None:
    """Who sets this knob: the first layer that does, else a variable. Raises ConfigurationError."""
    for layer in layers:
        found = [layer[key] for key in (knob.key, *knob.also) if key in layer]
        if found:
            return _agreed(found)
    found = [Given(name, environ[name].strip(), name) for name in knob.env if environ.get(name, "").strip()]
    return _agreed(found) if found else None


def known_keys() -> Iterator[str]:
    """All names in serving.properties that the table has."""
    for knob in KNOBS:
        yield from (knob.key, *knob.also)


def _agreed(found: list[Given]) -> Given:
    """The first, if the others say the same."""
    for other in found[1:]:
        if other.value != found[0].value:
            raise ConfigurationError(
                f"{found[0].key}={found[0].value} and {other.key}={other.value} contradict each other: set one of them"
            )
    return found[0]
