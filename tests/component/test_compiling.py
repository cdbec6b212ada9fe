"""What is compiled, what is not and why, and the folder of compiled code."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from engine.kernels.cpu import compiler
from engine.kernels.cpu.compiler import jit
from engine.load_runner import load_model_runner
from engine.models.cpu_support import why_not_compiled
from engine.models.read_config import load_config
from engine.resolve import kv_layout
from tests.component.arms import load_arm, settings
from tests.component.checkpoints import OTHER_FAMILIES
from tests.component.parity import check_parity, run_mixed

Checkpoint = Callable[[str], Path]


def double(x: int) -> int:
    return x + x


@pytest.mark.parametrize(
    ("changes", "layout_changes", "reason"),
    [
        ({"activation": "gelu"}, {}, "activation gelu"),
        ({"hidden_size": 72}, {}, "hidden_size 72, not a multiple of 16"),
        ({"intermediate_size": 100}, {}, "intermediate_size 100, not a multiple of 16"),
        ({}, {"head_dim": 24}, "heads of 24, not a multiple of 16"),
        ({}, {"block_size": 8}, "blocks of 8 tokens, not a multiple of 16"),
        ({}, {"dtype": "bfloat16"}, "KV in bfloat16, not float32, float16, int8"),
    ],
)
def test_what_is_not_compiled(
    checkpoint: Checkpoint,
    changes: dict[str, object],
    layout_changes: dict[str, object],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.kernels.cpu.machine.cpu_flags", lambda: {"avx2", "f16c", "fma"})
    config = load_config(checkpoint("llama"))
    layout = kv_layout(config, settings(checkpoint("llama")))
    assert why_not_compiled(config, layout) is None
    changed = replace(config, **changes), replace(layout, **layout_changes)  # type: ignore[arg-type]
    assert why_not_compiled(*changed) == reason


def test_families_that_are_llama_once_loaded_are_compiled(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.kernels.cpu.machine.cpu_flags", lambda: {"avx2", "f16c", "fma"})
    reasons = {}
    for family in OTHER_FAMILIES:
        config = load_config(checkpoint(family))
        reasons[family] = why_not_compiled(config, kv_layout(config, settings(checkpoint(family))))
    compiled = {family for family, reason in reasons.items() if reason is None}
    assert compiled == {"phi3", "phi3-longrope", "glm", "chatglm", "internlm", "internlm2", "internlm3", "baichuan-7b"}
    assert reasons["gpt2"] == "activation gelu_new"
    assert reasons["baichuan-13b"] == "positions alibi"
    assert reasons["glm4"] == "block sandwich"
    assert reasons["starcoder2"] == "activation gelu_pytorch_tanh"
    assert str(reasons["mixtral"]).startswith("experts ")


def test_other_cpus_run_the_eager_decoder(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    model_dir = checkpoint("llama")
    config, layout = load_config(model_dir), kv_layout(load_config(model_dir), settings(model_dir))
    monkeypatch.setattr("engine.kernels.cpu.machine.cpu_flags", lambda: {"avx", "f16c"})
    assert why_not_compiled(config, layout) == "the CPU has no avx2, fma"
    runner = load_model_runner(settings(model_dir))
    assert runner.attention_backend == "torch"
    check_parity(model_dir, runner)


def test_int8_without_amx_says_the_same(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    with_amx = run_mixed(load_arm(checkpoint("qwen2"), "compiled", quantize="int8"))
    for user in ("engine.kernels.cpu.machine", "engine.models.compiled_decoder"):
        monkeypatch.setattr(f"{user}.has_amx", lambda: False)
    without = run_mixed(load_arm(checkpoint("qwen2"), "compiled", quantize="int8"))
    assert [run.tokens for run in without] == [run.tokens for run in with_amx]


@pytest.fixture
def cache_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder that numba is told to keep its code in."""
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path / "base"))
    compiler._cache_dir.cache_clear()
    yield tmp_path / "base"
    compiler._cache_dir.cache_clear()


def test_code_is_kept_in_a_folder_of_this_version(cache_base: Path) -> None:
    assert jit(double)(21) == 42
    assert list(cache_base.glob("compiled-*/*/test_compiling.double*.nbi"))


def test_a_folder_that_cannot_be_written_is_done_without(cache_base: Path) -> None:
    cache_base.touch()
    assert jit(double)(21) == 42
    assert not list(Path(__file__).parent.glob("__pycache__/*.nbi")), "code that no version tells apart"
