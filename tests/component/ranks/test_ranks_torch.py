"""Tensor-parallel ranks of the eager decoder, which sum by gloo, say what transformers says. Most are threads."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.loading.load_runner import load_model_runner
from engine.model_runner import ModelRunner
from engine.ranks.launch import load_ranked_runner
from mesh.domain.errors import ConfigurationError
from mesh.domain.kv import Degrees
from tests.component.arms import settings
from tests.component.checkpoints import families_by_layers
from tests.component.parity import check_parity, expect_prompts, half_tolerance, require_prompt_logprobs, run_mixed
from tests.component.ranks.ranked import ranked_runner

Checkpoint = Callable[[str], Path]

ONE_KV_HEAD = {"llama-multi-query", "gpt-bigcode", "falcon-7b", "deepseek-v2", "deepseek-v3", "glm4-moe-lite"}
ONE_KV_HEAD |= {"youtu", "minicpm3", "mistral4"}


@pytest.mark.parametrize("family", families_by_layers(*ONE_KV_HEAD))
def test_two_ranks_of_every_family(checkpoint: Checkpoint, family: str) -> None:
    with ranked_runner(checkpoint(family), Degrees(2, 2), enforce_eager=True) as runner:
        check_parity(checkpoint(family), runner)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom-6-heads"])
@pytest.mark.parametrize("degrees", [Degrees(3), Degrees(4)], ids=str)
def test_unequal_and_many_ranks(checkpoint: Checkpoint, family: str, degrees: Degrees) -> None:
    with ranked_runner(checkpoint(family), degrees, enforce_eager=True) as runner:
        check_parity(checkpoint(family), runner)


@pytest.mark.parametrize("family", sorted(ONE_KV_HEAD))
def test_stages_of_models_with_one_kv_head(checkpoint: Checkpoint, family: str) -> None:
    with ranked_runner(checkpoint(family), Degrees(1, 2), enforce_eager=True) as runner:
        check_parity(checkpoint(family), runner)


@pytest.mark.parametrize("family", sorted(ONE_KV_HEAD))
def test_more_ranks_than_kv_heads(checkpoint: Checkpoint, family: str) -> None:
    with pytest.raises(ConfigurationError, match=r"tensor_parallel 2 does not fit 1 KV heads: .* or rank_memory own"):
        load_ranked_runner(settings(checkpoint(family), tensor_parallel=2), on_lost=pytest.fail)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(checkpoint: Checkpoint, dtype: str) -> None:
    model_dir = checkpoint("qwen3")
    with ranked_runner(model_dir, Degrees(2, 2), dtype=dtype, enforce_eager=True) as runner:
        for run, expected in zip(run_mixed(runner), expect_prompts(model_dir), strict=True):
            require_prompt_logprobs(run, expected, half_tolerance("qwen3", dtype))


def test_kv_is_that_of_one_rank(checkpoint: Checkpoint) -> None:
    """So it can be sent to workers with another number of ranks."""
    changes = {"enforce_eager": True}
    alone = load_model_runner(settings(checkpoint("qwen2-moe"), **changes))
    run_mixed(alone)
    with ranked_runner(checkpoint("qwen2-moe"), Degrees(2, 2), **changes) as runner:
        run_mixed(runner)
        torch.testing.assert_close(_kv(runner), _kv(alone), atol=1e-4, rtol=1e-4)


def _kv(runner: ModelRunner) -> torch.Tensor:
    cache = runner.kv_cache
    kv = bytearray(cache.payload_bytes(cache.num_blocks, cache.layout.whole))
    cache.read_blocks(range(cache.num_blocks), cache.layout.whole, kv)
    return torch.frombuffer(kv, dtype=torch.float32)


def test_processes(checkpoint: Checkpoint) -> None:
    model_dir = checkpoint("mixtral")
    command = [sys.executable, "-m", "tests.component.ranks.ranked", str(model_dir)]
    answer = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=300).stdout
    assert json.loads(answer) == [expected.token_ids for expected in expect_prompts(model_dir)]


def test_gpus_share_no_memory(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(ConfigurationError, match=r"2 on cuda does not fit rank_memory shared: .* use auto"):
        load_ranked_runner(settings(checkpoint("llama"), tensor_parallel=2, device="cuda"), on_lost=pytest.fail)
