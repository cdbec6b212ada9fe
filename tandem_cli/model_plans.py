"""Plans the models that `tandem up` serves: folder, workers, settings and cores of each model."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from checkpoint.source import ModelSource, Progress, split_models
from mesh.domain.errors import ConfigurationError
from tandem_cli.cores import CorePlan, assign_cores
from tandem_cli.services import ModelPlan, split_by_role
from tandem_cli.serving.conversions import flag
from tandem_cli.up_settings import UpSettings, find_model

_MODEL_OVERRIDE = re.compile(r"([\w.-]+)/(.+)")
_WORKER_ROLES = ("prefill", "decode")
_COUNTS = ("prefill", "decode", "colocated")


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


def plan_models(
    settings: UpSettings, overrides: Overrides, on_progress: Callable[[str], Progress]
) -> tuple[ModelPlan, ...]:
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
        ModelPlan(name, str(find_model(source, on_progress(name))), plan, settings_by_model[name][1])
        for (name, source), plan in zip(sources.items(), cores, strict=True)
    )


def find_draft(values: dict[str, str], settings: UpSettings) -> None:
    """Replace the name of a draft model in `values` by its folder. Downloads the model if necessary."""
    if draft_model := values.get("draft_model"):
        values["draft_model"] = str(find_model(ModelSource(draft_model, cache_dir=settings.model_cache)))


def join_models(models: Sequence[str]) -> str:
    """Join the values of a repeated `--model` into one setting. Several models need names, or ConfigurationError is
    raised.
    """
    if len(models) > 1 and not all(split_models(model)[0][0] for model in models):
        raise ConfigurationError(f"several models need names, as in --model NAME=MODEL, got {' and '.join(models)}")
    return ",".join(models)


def available_cores() -> Sequence[int]:
    """Cores that this process may use; all cores where the system has no affinity."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return range(os.cpu_count() or 1)


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
        raise ConfigurationError(f"--set MODEL/up.{override}: want one of {', '.join(_COUNTS)}")
    if name == "colocated":
        try:
            return name, flag(value or "true")
        except ConfigurationError as error:
            raise ConfigurationError(f"--set MODEL/up.{override}: {error}") from None
    if not value.isdecimal():
        raise ConfigurationError(f"--set MODEL/up.{override}: want a number")
    return name, int(value)


def _share_cores(settings: UpSettings, settings_of_models: Sequence[UpSettings]) -> list[CorePlan]:
    counts = [(model.num_prefill, model.decode) for model in settings_of_models]
    all_cores = assign_cores(
        available_cores(),
        num_prefill=sum(prefill for prefill, _ in counts),
        num_decode=sum(decode for _, decode in counts),
        max_per_worker=settings.threads_per_worker,
    )
    return all_cores.split(counts)
