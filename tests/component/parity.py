"""Compares the engine to Hugging Face transformers; shared by the CPU and the GPU tests."""

import copy
import inspect
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.loading.load_runner import load_model_runner
from engine.model_runner import ModelRunner
from engine.runner_settings import RunnerSettings
from tests.component.checkpoints import VOCAB_SIZE
from tests.component.driving import Driver, Run
from tests.component.remote_families import load_reference
from tests.fakes.requests import make_request
from tests.made_once import is_shared

TOLERANCE = 1e-4
NUM_TOP = 3
NUM_NEW = 10
# The first fits in the windows and trained lengths of the small models, grows beyond them; the others begin beyond.
PROMPT_LENGTHS = (9, 28, 45)


@dataclass(frozen=True)
class Expected:
    """What transformers says: log-probs [num_prompt_tokens + NUM_NEW - 1, vocab_size], and the greedy tokens."""

    prompt: list[int]
    token_ids: list[int]
    logprobs: torch.Tensor


def prompts() -> list[list[int]]:
    generator = random.Random(7)
    return [[generator.randrange(VOCAB_SIZE) for _ in range(length)] for length in PROMPT_LENGTHS]


@torch.no_grad()
def expect(model: Any, prompt: list[int], num_new: int = NUM_NEW, forced: Sequence[int] = ()) -> Expected:
    """Greedy generation with transformers' own cache, or its log-probs for the tokens `forced`. Copies the model:
    dynamic RoPE keeps state between calls.
    """
    model = copy.deepcopy(model)
    # Transformers calls it `cache` from 5.24 on, and warns of the older names.
    names = inspect.signature(model.forward).parameters
    argument = next((name for name in ("cache", "cache_params") if name in names), "past_key_values")
    ids, cache, token_ids, rows, options = torch.tensor([prompt]), None, [], [], {}
    for _ in range(num_new):
        if type(model).__name__ == "BambaForCausalLM":  # which counts positions from 0 in every call, unless it is told
            past = len(prompt) + len(token_ids) - ids.shape[1]
            options = {"position_ids": torch.arange(past, past + ids.shape[1])[None]}
        out = model(ids, **{argument: cache}, use_cache=True, **options)
        cache = getattr(out, argument)
        rows.append(out.logits[0].log_softmax(-1))
        token_ids.append(int(rows[-1][-1].argmax()))
        ids = torch.tensor([forced[len(token_ids) - 1 : len(token_ids)] or token_ids[-1:]])
    return Expected(prompt, token_ids, torch.cat(rows))


@lru_cache(maxsize=2)
def expect_prompts(model_dir: Path) -> list[Expected]:
    """What the model in this folder says to each of the prompts. Models that several files test are asked once per run:
    the first process keeps the answers beside the folder.
    """
    kept = model_dir.with_name(f"{model_dir.name}.expected")
    if kept.exists():
        return [Expected(**each) for each in torch.load(kept)]
    model = load_reference(model_dir)
    expected = [expect(model, prompt) for prompt in prompts()]
    if is_shared(model_dir):
        partly = kept.with_suffix(f".{os.getpid()}")
        torch.save([vars(each) for each in expected], partly)
        partly.rename(kept)
    return expected


def run_mixed(runner: ModelRunner) -> list[Run]:
    """The prompts in chunks, beside each other and beside decodes, in scattered blocks."""
    driver = Driver(runner)
    options = {"max_new_tokens": NUM_NEW, "prompt_logprobs": True, "top_logprobs": NUM_TOP}
    first, second, third = (driver.add(make_request(f"r{i}", p, **options)) for i, p in enumerate(prompts()))
    driver.step((first, 7))
    driver.step((first, 2), (second, 5))
    driver.step((first, 1), (second, 13), (third, 11))
    driver.step((first, 1), (second, 10), (third, 2))
    driver.step((first, 1), (second, 1), (third, 32))
    driver.finish(first, second, third)
    return [first, second, third]


def require_same(run: Run, expected: Expected, tolerance: float = TOLERANCE) -> None:
    """Same greedy tokens, same log-probs of prompt and output, same most likely tokens."""
    assert run.token_ids == expected.token_ids
    require_prompt_logprobs(run, expected, tolerance)
    first = len(expected.prompt) - 1
    for i, token in enumerate(run.tokens):
        row = expected.logprobs[first + i]
        assert token.logprob == pytest.approx(float(row[token.id]), abs=tolerance)
        assert [top.logprob for top in token.top] == pytest.approx(row.topk(NUM_TOP).values.tolist(), abs=tolerance)
        assert [top.id for top in token.top] == row.topk(NUM_TOP).indices.tolist()


def require_prompt_logprobs(run: Run, expected: Expected, tolerance: float) -> None:
    rows = expected.logprobs[: len(expected.prompt) - 1]
    wanted = rows.gather(1, torch.tensor(expected.prompt[1:])[:, None])[:, 0].tolist()
    assert [p.logprob for p in run.prompt_logprobs] == pytest.approx(wanted, abs=tolerance)
    for scored, row in zip(run.prompt_logprobs, rows, strict=True):
        assert [top.logprob for top in scored.top] == pytest.approx(row.topk(NUM_TOP).values.tolist(), abs=tolerance)


def logprob_differences(runs: list[Run], expected: list[Run]) -> tuple[float, float]:
    """The mean and the largest difference between log-probs of the same prompts' tokens."""
    pairs = [
        abs(ours.logprob - theirs.logprob)
        for run, other in zip(runs, expected, strict=True)
        for ours, theirs in zip(run.prompt_logprobs, other.prompt_logprobs, strict=True)
    ]
    return sum(pairs) / len(pairs), max(pairs)


def check_parity(model_dir: Path, runner: ModelRunner) -> None:
    """Mixed batches give what transformers gives for each prompt alone."""
    for run, expected in zip(run_mixed(runner), expect_prompts(model_dir), strict=True):
        require_same(run, expected)


def half_tolerance(family: str, dtype: str) -> float:
    """How far log-probs in half precision may be from those in fp32. transformers' own are further away."""
    near = 0.3 if dtype == "bfloat16" else 0.05
    return 3 * near if family == "gemma2" else near


def check_half_precision(model_dir: Path, settings: RunnerSettings, tolerance: float) -> None:
    """Prompt log-probs are near those of fp32; greedy tokens may differ after a near tie."""
    for run, expected in zip(run_mixed(load_model_runner(settings)), expect_prompts(model_dir), strict=True):
        require_prompt_logprobs(run, expected, tolerance)
