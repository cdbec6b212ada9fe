"""Int8 arithmetic: the loops and the linear layer against plain torch, and whole models against fp32."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from engine.loading.load_runner import load_model_runner
from engine.loading.resolve import fingerprint
from engine.models.encodings import ENCODINGS
from engine.models.linear import FloatOps, Int8Ops, QuantisedRows, make_linear
from engine.models.norms import Norm
from engine.runner_settings import RunnerSettings
from mesh.domain.errors import ConfigurationError
from tests.component.arms import load_arm
from tests.component.driving import Driver
from tests.component.parity import logprob_differences, prompts, run_mixed
from tests.fakes.requests import make_request

EPS = 1e-5


def values(rows: QuantisedRows) -> torch.Tensor:
    return (rows.q.to(torch.float32) - Int8Ops().zero_point) * rows.scales[:, None]


def within_half_a_level(found: QuantisedRows, expected: torch.Tensor) -> bool:
    levels = torch.where(found.scales > 0, found.scales, 1.0)[:, None]
    return bool(((values(found) - expected).abs() <= 0.501 * levels + 1e-6).all())


@pytest.mark.parametrize("width", [1, 7, 16, 576])
def test_rows_are_rounded_to_the_nearest_level(width: int) -> None:
    torch.manual_seed(width)
    ops, floats = Int8Ops(), FloatOps(torch.float32)
    x = torch.randn(5, width) * torch.logspace(-3, 3, 5)[:, None]
    weight = torch.rand(width) + 0.5
    gate_up = torch.randn(5, 2 * width) * 8
    assert within_half_a_level(ops.rows(x), x)
    assert torch.equal(ops.values(ops.rows(x)), values(ops.rows(x)))
    for norm in (Norm(weight, None, EPS), Norm(weight, weight - 1, EPS, centred=True)):
        assert within_half_a_level(ops.norm(x, norm), floats.norm(x, norm))
    for activation in (F.silu, F.gelu):
        assert within_half_a_level(ops.gated(activation, gate_up), floats.gated(activation, gate_up))
        assert within_half_a_level(ops.activated(activation, x), floats.activated(activation, x))


def test_zeros_and_extremes() -> None:
    ops = Int8Ops()
    assert values(ops.rows(torch.zeros(2, 16))).abs().max() == 0
    assert torch.isfinite(values(ops.gated(F.silu, torch.full((1, 32), -1e4)))).all()
    assert torch.isfinite(values(ops.gated(F.silu, torch.full((1, 32), 1e4)))).all()


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(96, 64), (50, 33), (3, 576)])
def test_linear_is_exact_in_integers(shape: tuple[int, int], has_bias: bool) -> None:
    torch.manual_seed(1)
    ops = Int8Ops()
    weight, bias = torch.randn(shape), torch.randn(shape[0]) if has_bias else None
    parameters = replace(ENCODINGS["int8"](weight), bias=bias)
    linear, rows = make_linear(parameters), ops.rows(torch.randn(9, shape[1]))
    scales = weight.abs().amax(1) / 127
    rounded = torch.round(weight / scales[:, None]).to(torch.float64)
    exact = (rows.q.to(torch.float64) - ops.zero_point) @ rounded.T * scales * rows.scales[:, None]
    expected = (exact if bias is None else exact + bias).to(torch.float32)
    torch.testing.assert_close(linear(rows), expected, rtol=1e-5, atol=1e-5)
    residual = torch.randn(9, shape[0])
    torch.testing.assert_close(linear.add_to(residual.clone(), rows), residual + expected, rtol=1e-5, atol=1e-5)


def test_a_row_does_not_depend_on_its_batch() -> None:
    torch.manual_seed(2)
    ops = Int8Ops()
    linear, x = make_linear(ENCODINGS["int8"](torch.randn(80, 576))), torch.randn(40, 576)
    together = linear(ops.rows(x))
    for row in (0, 17, 39):
        assert torch.equal(linear(ops.rows(x[row : row + 1])), together[row : row + 1])


@pytest.mark.parametrize("family", ["llama-tied", "qwen2", "qwen3"])
def test_models_stay_close_to_fp32(
    family: str, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model_dir = checkpoint(family)
    fp32 = run_mixed(load_arm(model_dir, "cpu"))
    eager = run_mixed(load_arm(model_dir, "cpu", quantize="int8", kv_dtype="float32"))
    usual = run_mixed(load_arm(model_dir, "compiled", quantize="int8"))
    monkeypatch.setattr("engine.models.compiled_decoder.multiplies_bf16", lambda: False)  # no attention in bf16
    compiled = run_mixed(load_arm(model_dir, "compiled", quantize="int8", kv_dtype="float32"))
    for near in (eager, compiled, usual):
        mean, largest = logprob_differences(near, fp32)
        assert 0 < mean < 0.06
        assert largest < 0.5
    # Up to values that lie between two levels, both compute the same.
    mean, largest = logprob_differences(compiled, eager)
    assert mean < 0.005
    assert largest < 0.1


@pytest.mark.parametrize("family", ["gpt2", "bloom", "qwen2-moe", "bamba"])
def test_other_families_stay_close_to_fp32(family: str, checkpoint: Callable[[str], Path]) -> None:
    fp32, int8 = (run_mixed(load_arm(checkpoint(family), "torch", quantize=kind)) for kind in ("none", "int8"))
    mean, largest = logprob_differences(int8, fp32)
    assert 0 < mean < 0.06
    assert largest < 0.5


def test_int8_is_another_model_to_its_peers(checkpoint: Callable[[str], Path]) -> None:
    model_dir = checkpoint("llama-tied")
    assert fingerprint(model_dir, arithmetic="int8") == fingerprint(model_dir) + "-int8"
    with pytest.raises(ConfigurationError, match="quantize=int8 is for CPU and float32"):
        load_model_runner(RunnerSettings(model_dir, num_blocks=4, dtype="bfloat16", quantize="int8"))
    with pytest.raises(ConfigurationError, match="quantize must be one of none, int8"):
        RunnerSettings(model_dir, quantize="int3")


@pytest.mark.parametrize("kv_dtype", ["float16", "int8"])
def test_a_replay_computes_the_very_same_numbers(checkpoint: Callable[[str], Path], kv_dtype: str) -> None:
    """Compiled: a token's log-probs do not depend on whether it was decoded or computed again in a chunk."""
    runner = load_arm(checkpoint("qwen3"), "compiled", quantize="int8", kv_dtype=kv_dtype)
    prompt = prompts()[1]
    driver = Driver(runner)
    whole = driver.add(make_request("whole", prompt, max_new_tokens=40))
    driver.finish(whole)
    for cut, chunk in ((1, 7), (12, 64), (33, 16)):
        history = [*prompt, *whole.token_ids[:cut]]
        again = driver.add(make_request(f"cut {cut}", history, max_new_tokens=40, num_prompt_tokens=len(prompt)))
        driver.finish(again, chunk=chunk)
        assert again.token_ids == whole.token_ids[cut:]
        assert [token.logprob for token in again.tokens] == [token.logprob for token in whole.tokens[cut:]]
