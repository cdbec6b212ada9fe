"""Tensor-parallel ranks as threads of one process: every result equals that of one rank, to the bit."""

from collections.abc import Callable
from pathlib import Path

import pytest

from mesh.domain.kv import Degrees
from tests.component.arms import load_arm
from tests.component.parity import run_mixed
from tests.component.ranked import ranked_runner

FAMILIES = ["llama", "llama-tied", "llama-biases", "qwen2", "qwen3", "mistral"]
ARITHMETIC = [{}, {"kv_dtype": "float16"}, {"quantize": "int8"}, {"quantize": "int8", "kv_dtype": "float32"}]


@pytest.mark.parametrize("changes", ARITHMETIC, ids=lambda changes: "-".join(changes.values()) or "float32")
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_equal_one_rank(checkpoint: Callable[[str], Path], family: str, changes: dict[str, str]) -> None:
    model_dir = checkpoint(family)
    alone = load_arm(model_dir, "compiled", **changes)
    expected = run_mixed(alone)
    layout = alone.kv_cache.layout
    for degrees in (Degrees(2), Degrees(min(3, layout.num_kv_heads)), Degrees(1, 2), Degrees(2, 2)):
        with ranked_runner(model_dir, degrees, **changes) as runner:
            for run, theirs in zip(run_mixed(runner), expected, strict=True):
                assert run.tokens == theirs.tokens
                assert run.prompt_logprobs == theirs.prompt_logprobs
            whole = runner.kv_cache.layout.whole
            blocks = range(runner.kv_cache.num_blocks)
            ours, other = (bytearray(runner.kv_cache.payload_bytes(len(blocks), whole)) for _ in range(2))
            runner.kv_cache.read_blocks(blocks, whole, ours)
            alone.kv_cache.read_blocks(blocks, whole, other)
            assert ours == other
