"""Recipes: what shall be tried, and the limits that the choice must keep. docs/optimize.md describes the file."""

import argparse
import re
import tomllib
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from mesh.domain.errors import ConfigurationError
from mesh.setting_checks import require_above_zero
from mesh.settings import suggestion
from tandem_cli.optimization.candidates import PRECISIONS, SPECULATIONS, Layout

AUTO = "auto"
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s)")
_MS = {"ms": 1.0, "s": 1000.0}
_WHOLE = ("concurrency", "output_tokens", "max_prompts")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Empty lists stand for what fits the machine and the model. Durations are in milliseconds, losses are shares. The
    constructor raises ConfigurationError.
    """

    precisions: tuple[str, ...] = ()
    speculation: tuple[str, ...] = ()
    draft_model: str = ""
    workers: tuple[Layout, ...] = ()
    slo_ttft: float | None = None
    slo_itl: float | None = None
    max_quality_loss: float = 0.01
    price_per_hour: float | None = None
    concurrency: int = 8
    output_tokens: int = 128
    max_prompts: int = 256

    def __post_init__(self) -> None:
        _require_known("precision", self.precisions, PRECISIONS)
        _require_known("speculation", self.speculation, SPECULATIONS)
        if "draft" in self.speculation and not self.draft_model:
            raise ConfigurationError("speculation draft needs draft_model: --draft-model, or draft_model in the recipe")
        require_above_zero(self, *_WHOLE, "slo_ttft", "slo_itl", "price_per_hour")
        if not 0 <= self.max_quality_loss < 1:
            raise ConfigurationError(f"max_quality_loss must be in [0, 1), got {self.max_quality_loss:g}")

    def speculations(self, *, has_mtp: bool) -> tuple[str, ...]:
        """The kinds to try. A draft model that is named is tried, and a layer that the checkpoint has for drafts."""
        mtp, draft = ["mtp"] if has_mtp else [], ["draft"] if self.draft_model else []
        return self.speculation or ("none", "ngram", *mtp, *draft)


def read_recipe(args: argparse.Namespace) -> Recipe:
    """The recipe of the file, if there is one, with the flags of `tandem optimize`. Raises ConfigurationError."""
    recipe = Recipe() if args.recipe == AUTO else parse_recipe(Path(args.recipe))
    names = {field.name for field in fields(Recipe)}
    flags = {name: value for name, value in vars(args).items() if name in names and value is not None}
    return replace(recipe, **flags)


def parse_recipe(path: Path) -> Recipe:
    """Read a recipe in TOML. Raises ConfigurationError that names the file and the key."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"cannot read the recipe {path}: {error}") from error
    names = {field.name for field in fields(Recipe)}
    for name in content.keys() - names:
        raise ConfigurationError(f"{path}: there is no key {name}{suggestion(name, names)}")
    try:
        return Recipe(**{name: _converted(name, value) for name, value in content.items()})
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from error


def duration_ms(text: str) -> float:
    """A duration such as 500ms or 0.5s, in milliseconds. Raises ConfigurationError."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ConfigurationError(f"a duration needs a unit, as in 500ms or 0.5s, got {text!r}")
    return float(match[1]) * _MS[match[2]]


def _converted(name: str, value: Any) -> Any:
    if name in ("precisions", "speculation"):
        if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
            about = "without the key, all that fit are tried"
            raise ConfigurationError(f"{name} must be a list of names, got {value!r}; {about}")
        return tuple(value)
    if name == "workers":
        if not isinstance(value, list) or not value:
            raise ConfigurationError("workers must be a list of tables such as {prefill = 1, decode = 2}")
        return tuple(map(Layout.parse, value))
    if name in ("slo_ttft", "slo_itl"):
        return duration_ms(str(value))
    wanted: tuple[type, ...] = (str,) if name == "draft_model" else (int,) if name in _WHOLE else (int, float)
    if not isinstance(value, wanted) or isinstance(value, bool):
        raise ConfigurationError(f"{name} must be a {'text' if wanted == (str,) else 'number'}, got {value!r}")
    return value


def _require_known(kind: str, names: tuple[str, ...], known: tuple[str, ...]) -> None:
    for name in names:
        if name not in known:
            raise ConfigurationError(
                f"there is no {kind} {name!r}{suggestion(name, known)}; known are {', '.join(known)}"
            )
