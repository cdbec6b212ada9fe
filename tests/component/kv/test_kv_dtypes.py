"""KV in fp32, fp16 and int8: how close models stay to fp32, what goes over the wire, and what is refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from engine.kernels.cpu.machine import knows_bf16
from engine.loading.load_runner import load_model_runner
from engine.loading.resolve import kv_layout
from engine.models.read_config import load_config
from engine.runner_settings import RunnerSettings
from mesh.domain.errors import ConfigurationError, LayoutMismatch
from mesh.settings import load_settings
from prefill_worker.settings import PrefillSettings
from tests.component.arms import load_arm, settings
from tests.component.kv.kv_moves import check_round_trip
from tests.component.parity import check_parity, logprob_differences, run_mixed

Checkpoint = Callable[[str], Path]

# Of log-probs, the mean and the largest difference that rounding KV makes. Int8 arithmetic amplifies both: a value that
# moves a little may be rounded to another level.
BOUNDS = {
    ("none", "float16"): (0.0015, 0.01),
    ("none", "int8"): (0.03, 0.2),
    ("int8", "float16"): (0.06, 0.45),
    ("int8", "int8"): (0.08, 0.45),
}


@pytest.mark.parametrize("arm", ["compiled", "cpu"])
@pytest.mark.parametrize("family", ["llama-tied", "mistral", "qwen3"])
def test_models_stay_close_to_those_with_fp32_kv(checkpoint: Checkpoint, family: str, arm: str) -> None:
    for quantize in ("none", "int8"):
        model_dir = checkpoint(family)
        exact = run_mixed(load_arm(model_dir, arm, quantize=quantize, kv_dtype="float32"))
        for kv_dtype in ("float16", "int8"):
            near = run_mixed(load_arm(model_dir, arm, quantize=quantize, kv_dtype=kv_dtype))
            mean, largest = logprob_differences(near, exact)
            max_mean, max_largest = BOUNDS[quantize, kv_dtype]
            assert 0 < mean < max_mean
            assert largest < max_largest


def test_fp16_kv_of_the_torch_backend(checkpoint: Checkpoint) -> None:
    exact, near = (
        run_mixed(load_arm(checkpoint("mistral"), "torch", kv_dtype=kv_dtype)) for kv_dtype in ("float32", "float16")
    )
    assert 0 < logprob_differences(near, exact)[1] < BOUNDS["none", "float16"][1]


@pytest.mark.parametrize("arm", ["compiled", "cpu", "torch"])
def test_fp32_kv_is_exact_when_asked_for(checkpoint: Checkpoint, arm: str) -> None:
    check_parity(checkpoint("qwen2"), load_arm(checkpoint("qwen2"), arm, kv_dtype="float32"))


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("kv_dtype", ["float32", "float16", "int8", "fp8"])
def test_a_sequence_continues_on_another_runner(checkpoint: Checkpoint, kv_dtype: str, eager: bool) -> None:
    check_round_trip(settings(checkpoint("mistral"), kv_dtype=kv_dtype, enforce_eager=eager))


@pytest.mark.parametrize(
    ("changes", "kv_dtype"),
    [
        ({}, "float32"),
        ({"quantize": "int8"}, "int8"),
        ({"quantize": "int8", "block_size": 4}, "float16"),
        ({"quantize": "int8", "kv_dtype": "float32"}, "float32"),
        ({"kv_dtype": "int8"}, "int8"),
        ({"dtype": "bfloat16"}, "float16" if knows_bf16() else "float32"),
        ({"dtype": "bfloat16", "kv_dtype": "float32"}, "float32"),
        ({"dtype": "bfloat16", "enforce_eager": True}, "bfloat16"),
        ({"dtype": "bfloat16", "kv_dtype": "bfloat16"}, "bfloat16"),
        ({"quantize": "int8", "kv_dtype": "fp8"}, "fp8"),
    ],
)
def test_kv_dtype_follows_the_arithmetic(checkpoint: Checkpoint, changes: dict[str, object], kv_dtype: str) -> None:
    model_dir = checkpoint("llama")
    assert kv_layout(load_config(model_dir), settings(model_dir, **changes)).dtype == kv_dtype


def test_workers_with_other_kv_do_not_fit(checkpoint: Checkpoint) -> None:
    config = load_config(checkpoint("llama"))
    ours, theirs = (kv_layout(config, settings(checkpoint("llama"), kv_dtype=dtype)) for dtype in ("float16", "int8"))
    assert (ours.row_bytes, theirs.row_bytes) == (2 * config.head_dim, config.head_dim + 4)
    with pytest.raises(LayoutMismatch, match=r"KV layouts differ: dtype: 'float16' here, 'int8' there$"):
        ours.require_same(theirs)
    with pytest.raises(LayoutMismatch, match=r"KV layouts differ: dtype: 'float16' here, 'fp8' there$"):
        ours.require_same(replace(ours, dtype="fp8"))


def test_workers_are_told_by_flag_or_environment() -> None:
    def load(argv: list[str], **environ: str) -> PrefillSettings:
        needed = ["--model", "m", "--registry-address", "r:1"]
        return load_settings(PrefillSettings, [*needed, *argv], prog="worker", environ=environ).values

    assert (load([]).kv_dtype, load([]).enforce_eager) == ("auto", False)
    given = load(["--enforce-eager"], KV_DTYPE="int8")
    assert (given.kv_dtype, given.enforce_eager) == ("int8", True)
    with pytest.raises(ConfigurationError, match=r"kv_dtype must be one of auto, float32, .*int8, fp8, got 'int4'"):
        load(["--kv-dtype", "int4"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_dtype": "int4"}, "kv_dtype must be one of auto, float32, .*int8, fp8, got 'int4'"),
        (
            {"kv_dtype": "int8", "block_size": 4},
            "'auto' cannot run on cpu with torch.float32, KV in int8, blocks of 4 tokens; available: none"
            r" \(.*\): set kv_dtype to another type than int8$",
        ),
        ({"kv_dtype": "int8", "attention": "torch"}, r"'torch' cannot run.*KV in int8.*available: cpu \(.*\)$"),
        (
            {"kv_dtype": "int8", "dtype": "bfloat16", "enforce_eager": True},
            "cannot run on cpu with torch.bfloat16.*available: none"
            r" \(.*\): set kv_dtype to another type than int8, or dtype to float32$",
        ),
        ({"attention": "cpu", "block_size": 24}, "'cpu' cannot run.*blocks of 24 tokens; available: torch"),
    ],
)
def test_what_cannot_run_is_refused_in_words(checkpoint: Checkpoint, changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        load_model_runner(RunnerSettings(checkpoint("llama"), **{"num_blocks": 4} | changes))  # type: ignore[arg-type]
