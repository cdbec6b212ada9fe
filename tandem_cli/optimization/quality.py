"""How far a precision is from the base: next-token distributions of both, as workers compute them, on the user's
questions and their references, or the base's own answers where there are none.
"""

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engine.load_runner import load_model_runner
from engine.model_runner import ModelRunner
from engine.quantizer.quality import Quality, QualityMeter
from engine.runner_settings import RunnerSettings
from engine.sequence import SequenceState
from mesh.domain.request import SamplingParams, SequenceSpec

_PLACES_AT_ONCE = 128
_MAX_TOKENS = 1024
"""Tokens of a question and its answer; what is longer is cut."""
_MAX_PROMPTS = 64


@dataclass(frozen=True, slots=True)
class Judged:
    """A question and its answer as token ids; tokens from `first` on are the answer's."""

    token_ids: tuple[int, ...]
    first: int


def compare(base: RunnerSettings, other: RunnerSettings, judged: Sequence[Judged]) -> Quality:
    """Load both models, and compare them on the first prompts. Raises ConfigurationError."""
    chosen = [cut for cut in map(_cut, judged[:_MAX_PROMPTS]) if len(cut.token_ids) > cut.first]
    longest = max(len(sample.token_ids) for sample in chosen)
    models = [_load(settings, longest) for settings in dict.fromkeys((base, other))]
    runners = models if len(models) == 2 else models * 2
    meter = QualityMeter()
    for sample in chosen:
        prompt = _sequence(sample.token_ids, runners[0].kv_cache.layout.block_size)
        for start in range(sample.first - 1, len(sample.token_ids) - 1, _PLACES_AT_ONCE):
            rows = range(start, min(start + _PLACES_AT_ONCE, len(sample.token_ids) - 1))
            following = torch.tensor(sample.token_ids[rows.start + 1 : rows.stop + 1])
            base_logits, other_logits = (runner.prompt_logits(prompt, rows).cpu().clone() for runner in runners)
            meter.add(following, base_logits, other_logits)
    del models, runners
    gc.collect()  # two models, before meshes are started
    return meter.quality(len(chosen))


def runner_settings(model_dir: Path, settings: dict[str, str], num_blocks: int | None = None) -> RunnerSettings:
    """The settings of a runner with the arithmetic of a candidate, whose settings are those of `tandem up`."""
    dtype, quantize = settings.get("dtype", "auto"), settings.get("quantize", "none")
    return RunnerSettings(model_dir, "auto", dtype=dtype, quantize=quantize, num_blocks=num_blocks)


def _cut(judged: Judged) -> Judged:
    """Keep the answer, and as much before it as fits."""
    answer = judged.token_ids[judged.first :][: _MAX_TOKENS // 2]
    prompt = judged.token_ids[: judged.first][-(_MAX_TOKENS - len(answer)) :]
    return Judged((*prompt, *answer), len(prompt))


def _load(settings: RunnerSettings, num_tokens: int) -> ModelRunner:
    return load_model_runner(replace(settings, num_blocks=num_tokens // settings.block_size + 2))


def _sequence(token_ids: tuple[int, ...], block_size: int) -> SequenceState:
    sampling = SamplingParams(max_new_tokens=1, seed=0)
    sequence = SequenceState(SequenceSpec("quality", 0, token_ids, len(token_ids), sampling))
    sequence.block_table = list(range(len(token_ids) // block_size + 1))
    return sequence
