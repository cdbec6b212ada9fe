"""The models that `tandem up` serves: their folders, and each one's workers, settings and share of the cores."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cli.cores import CorePlan, assign_cores
from cli.services import ModelPlan, split_by_role
from cli.serving.conversions import flag
from cli.up_settings import UpSettings, find_model
from mesh.domain.errors import ConfigurationError
from mesh.model_source import ModelSource, Progress, split_models

_OF_MODEL = re.compile(r"([\w.-]+)/(.+)")
_WORKER_ROLES = ("prefill", "decode")
_COUNTS = ("prefill", "decode", "colocated")


@dataclass(frozen=True, slots=True)
class Overrides:
    """`--set` for all models, and for single ones: MODEL/ROLE.KEY=VALUE."""

    for_all: list[str]
    by_model: Mapping[str, list[str]]

    @classmethod
    def read(cls, given: Sequence[str]) -> "Overrides":
        """Sort them."""
        for_all: list[str] = []
        by_model: dict[str, list[str]] = {}
        for override in given:
            path, is_pair, value = override.partition("=")
            found = _OF_MODEL.fullmatch(path)
            if found:
                by_model.setdefault(found[1], []).append(f"{found[2]}{is_pair}{value}")
            else:
                for_all.append(override)
        return cls(for_all, by_model)


def plan_models(
    settings: UpSettings, overrides: Overrides, on_progress: Callable[[str], Progress]
) -> tuple[ModelPlan, ...]:
    """Find all models, downloaded if need be, and share the cores out. Raises ConfigurationError.

    `on_progress` gives the bar of a download by the model's name.
    """
    sources = _sources(settings)
    unknown = overrides.by_model.keys() - sources.keys()
    if unknown:
        raise ConfigurationError(f"--set {min(unknown)}/...: no model has this name; there are {', '.join(sources)}")
    own = {name: _own_settings(settings, overrides.by_model.get(name, ())) for name in sources}
    cores = _share_cores(settings, [counts for counts, _ in own.values()])
    return tuple(
        ModelPlan(name, str(find_model(source, on_progress(name))), plan, own[name][1])
        for (name, source), plan in zip(sources.items(), cores, strict=True)
    )


def find_draft(values: dict[str, str], settings: UpSettings) -> None:
    """Put the folder of a draft model in the place of its name."""
    if draft_model := values.get("draft_model"):
        values["draft_model"] = str(find_model(ModelSource(draft_model, cache_dir=settings.model_cache)))


def join_models(given: Sequence[str]) -> str:
    """`--model`, perhaps repeated, as one setting. Raises ConfigurationError if one of several has no name."""
    if len(given) > 1 and not all(split_models(each)[0][0] for each in given):
        raise ConfigurationError(f"several models need names, as in --model NAME=MODEL, got {' and '.join(given)}")
    return ",".join(given)


def available_cores() -> Sequence[int]:
    """Cores this process may use, where the system says; else all."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return range(os.cpu_count() or 1)


def _sources(settings: UpSettings) -> dict[str, ModelSource]:
    models = split_models(settings.model)
    if settings.name and len(models) > 1:
        raise ConfigurationError("--name is for one model: several are named as in --model NAME=MODEL")
    found = {}
    for name, model in models:
        source = ModelSource(model, settings.revision, settings.model_cache)
        found[name or settings.name or source.short_name] = source
    return found


def _own_settings(settings: UpSettings, overrides: Sequence[str]) -> tuple[UpSettings, dict[str, dict[str, str]]]:
    """The numbers of a model's workers, and what else only they have."""
    counts = [override.removeprefix("up.") for override in overrides if override.startswith("up.")]
    values = split_by_role({}, [override for override in overrides if not override.startswith("up.")])
    for role in values:
        if values[role] and role not in _WORKER_ROLES:
            raise ConfigurationError(f"--set: all models share the {role}, so no model has settings of its own there")
    find_draft(values["decode"], settings)
    numbers: dict[str, Any] = dict(_count(each) for each in counts)
    return replace(settings, **numbers), values


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


def _share_cores(settings: UpSettings, of_models: Sequence[UpSettings]) -> list[CorePlan]:
    counts = [(each.num_prefill, each.decode) for each in of_models]
    all_cores = assign_cores(
        available_cores(),
        num_prefill=sum(prefill for prefill, _ in counts),
        num_decode=sum(decode for _, decode in counts),
        max_per_worker=settings.threads_per_worker,
    )
    return all_cores.split(counts)
