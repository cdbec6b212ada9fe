"""int4 in the compiled decoder: checkpoints in 4 bits as stored, and others rounded to it."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint.partition_manifest import read_partition
from engine.kernels.cpu.machine import EIGHT_BITS, FOUR_BITS, MXFP4, NF4, knows_vnni
from engine.kernels.cpu.products.matmul import multiply
from engine.kernels.cpu.products.nibble_numbers import KINDS_IN_GROUPS, Numbers
from engine.loading.load_runner import load_model_runner
from engine.loading.resolve import resolve
from engine.loading.weights import WeightsTarget, load_weights
from engine.models.encodings import IN_STEPS
from engine.models.parameters import parameter_specs
from engine.models.read_config import load_decoder_config
from engine.models.rounding import round_to_int4, round_to_steps
from mesh.domain.errors import ConfigurationError
from mesh.domain.kv import Degrees
from tandem_cli.main import main
from tests.component.arms import load_arm, settings
from tests.component.lora.adapters import four_adapters, run_together
from tests.component.parity import logprob_differences, run_mixed
from tests.component.ranks.ranked import ranked_runner
from tests.component.ranks.test_ranks import require_equal, whole_kv
from tests.component.weights.quantized import INT4_FORMS, quantized_once, twin_of

Checkpoint = Callable[[str], Path]
Quantized = Callable[[str], Path]
ROUNDED = IN_STEPS if knows_vnni() else "int4"


@pytest.fixture(scope="module")
def quantized(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Quantized:
    """`quantized(form)` is a Llama in that form, with biases and an output matrix of its own."""
    return lambda form: quantized_once(tmp_path_factory, checkpoint("llama-biases"), form)


@pytest.mark.parametrize("form", INT4_FORMS)
def test_checkpoints_are_computed_as_stored(quantized: Quantized, form: str) -> None:
    """Activations are rounded to 8 bits, and so is the output matrix; weights are those of the file."""
    model_dir = quantized(form)
    assert resolve(settings(model_dir))[0].quantize == "int4"
    runner = load_arm(model_dir, "compiled", kv_dtype="float32")
    mean, largest = logprob_differences(run_mixed(runner), run_mixed(load_arm(twin_of(model_dir), "cpu")))
    assert 0 < mean < 0.03
    assert largest < 0.3


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("awq-32", {FOUR_BITS}),
        ("awq-32-mixed", {FOUR_BITS, EIGHT_BITS}),
        ("bnb-nf4", {NF4}),
        ("mxfp4", {MXFP4}),
    ],
)
def test_products_are_compiled_for_the_numbers_of_the_model(
    quantized: Quantized, form: str, expected: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    used: dict[Any, int] = {}
    monkeypatch.setattr(multiply, "_addresses", used)
    load_arm(quantized(form), "compiled", quantize="int4")
    assert {kind.numbers for kind in used if isinstance(kind, Numbers)} == expected


def test_products_of_all_kinds_of_numbers_are_compiled_ahead(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `tandem compile --all`, whose dummy weights have one kind or none."""
    used: dict[Any, int] = {}
    monkeypatch.setattr(multiply, "_addresses", used)
    load_arm(checkpoint("llama-biases"), "compiled", quantize="int4", compile_all=True)
    assert {kind.numbers for kind in used if isinstance(kind, Numbers)} == set(KINDS_IN_GROUPS)


def test_kv_is_of_bytes_and_of_another_model(quantized: Quantized) -> None:
    layout = load_arm(quantized("awq-32"), "compiled").kv_cache.layout
    exact = load_arm(quantized("awq-32"), "compiled", dtype="float32").kv_cache.layout
    assert (layout.dtype, exact.dtype) == ("int8", "float32")
    assert layout.model_fingerprint != exact.model_fingerprint


@pytest.mark.parametrize("form", ["awq-32-mixed", "gptq-32-order", "auto-round-32", "gptq-3-bits", "hqq-32"])
def test_ranks_and_partitions_equal_one_rank(quantized: Quantized, tmp_path: Path, form: str) -> None:
    model_dir, out = quantized(form), tmp_path / "out"
    alone = load_arm(model_dir, "compiled")
    expected = run_mixed(alone)
    assert main(["partition", str(model_dir), str(out), "--tensor-parallel=2"]) == 0
    partition = read_partition(out)
    assert partition is not None
    assert partition.quantize == "int4"
    for folder, degrees in ((model_dir, Degrees(2, 2)), (out, Degrees(2))):
        with ranked_runner(folder, degrees) as runner:
            require_equal(run_mixed(runner), expected)
            assert whole_kv(runner) == whole_kv(alone)
            assert runner.kv_cache.layout == alone.kv_cache.layout


def test_other_checkpoints_are_rounded(checkpoint: Checkpoint) -> None:
    """Random weights have no structure that would survive 4 bits; the limits tell noise from other numbers."""
    model_dir = checkpoint("qwen3")
    runner = load_arm(model_dir, "compiled", quantize="int4")
    mean, largest = logprob_differences(run_mixed(runner), run_mixed(load_arm(model_dir, "cpu")))
    assert 0 < mean < 0.5
    assert largest < 2.5


def test_ranks_and_partitions_of_rounded_checkpoints_equal_one_rank(checkpoint: Checkpoint, tmp_path: Path) -> None:
    model_dir, out = checkpoint("llama-biases"), tmp_path / "out"
    alone = load_arm(model_dir, "compiled", quantize="int4")
    expected = run_mixed(alone)
    assert main(["partition", str(model_dir), str(out), "--quantize=int4", "--tensor-parallel=2"]) == 0
    for folder, degrees in ((model_dir, Degrees(2, 2)), (out, Degrees(2))):
        with ranked_runner(folder, degrees, quantize="int4") as runner:
            require_equal(run_mixed(runner), expected)
            assert whole_kv(runner) == whole_kv(alone)
            assert runner.kv_cache.layout == alone.kv_cache.layout


@pytest.mark.parametrize(
    ("form", "encoding"), [("", ROUNDED), ("awq-32", "int4"), ("w4a16-32-order", "int4"), ("w8a8", ROUNDED)]
)
def test_integers_of_a_file_stay_and_others_are_rounded_to_steps(
    checkpoint: Checkpoint, quantized: Quantized, form: str, encoding: str
) -> None:
    model_dir = quantized(form) if form else checkpoint("llama-biases")
    specs = parameter_specs(load_decoder_config(model_dir))
    parameters = load_weights(model_dir, specs, WeightsTarget(torch.device("cpu"), torch.float32, "int4"))
    layout = load_arm(model_dir, "compiled", quantize="int4").kv_cache.layout
    assert layout.model_fingerprint.endswith(f"-{encoding}"), "workers that compute otherwise exchange no KV"
    assert parameters.encoding == encoding
    assert parameters.take_linear("layers.1.down").encoding == encoding


@pytest.mark.parametrize(
    ("form", "changes", "quantize"),
    [
        ("awq-32", {"dtype": "float32"}, "none"),
        ("awq-32", {"dtype": "bfloat16"}, "none"),
        ("awq-32", {"enforce_eager": True}, "none"),
        ("awq-32", {"quantize": "int8"}, "int8"),
        ("awq", {}, "none"),  # groups of 16
        ("w4a16-order", {}, "none"),
        ("gptq-8-order", {}, "none"),
    ],
)
def test_what_is_dequantised(quantized: Quantized, form: str, changes: dict[str, object], quantize: str) -> None:
    load_arm(quantized("awq-32"), "compiled")  # or the CPU cannot
    assert resolve(settings(quantized(form), **changes))[0].quantize == quantize


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("llama", {"enforce_eager": True}, "enforce_eager is set"),
        ("llama", {"dtype": "bfloat16"}, "for CPU and float32, not cpu and bfloat16"),
        ("opt-350m", {}, "compiled decoder, which cannot run here"),
    ],
)
def test_refused_by_name(checkpoint: Checkpoint, family: str, changes: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        resolve(settings(checkpoint(family), quantize="int4", **changes))


def _unequal(index: torch.Tensor) -> torch.Tensor:
    changed = index.clone()
    changed[(index == 1).nonzero()[0]] = 0
    return changed


def _too_large(packed_zeros: torch.Tensor) -> torch.Tensor:
    num_words, num_groups = packed_zeros.shape
    return torch.full((8 * num_words, num_groups), 9, dtype=torch.int8)


@pytest.mark.parametrize(
    ("form", "name", "part", "change"),
    [
        ("gptq-32-order", "mlp.down_proj", "g_idx", _unequal),
        ("gptq-32-order", "self_attn.k_proj", "g_idx", lambda index: index.flip(0).contiguous()),
        ("w4a16-32-zeros", "mlp.down_proj", "weight_zero_point", _too_large),
    ],
)
def test_groups_that_cannot_be_multiplied_are_refused(
    quantized: Quantized,
    tmp_path: Path,
    form: str,
    name: str,
    part: str,
    change: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Groups of different sizes, keys in other groups than queries, and zeros of more than 4 bits."""
    folder = Path(shutil.copytree(quantized(form), tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    changed = f"model.layers.1.{name}.{part}"
    tensors[changed] = change(tensors[changed])
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigurationError, match=rf"matrix model.layers.1.{name}: .* --dtype float32"):
        load_model_runner(settings(folder))
    load_model_runner(settings(folder, dtype="float32"))


def test_a_scale_whose_numbers_fp32_does_not_hold_is_refused(quantized: Quantized, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(quantized("w4a16-32-zeros"), tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj"
    tensors[f"{name}.weight_scale"] = tensors[f"{name}.weight_scale"].float()
    tensors[f"{name}.weight_scale"][3] = 3e38
    save_file(tensors, folder / "model.safetensors")
    for dtype in ("auto", "float32"):
        with pytest.raises(ConfigurationError, match=rf"numbers of tensor {name} are NaN or infinite"):
            load_model_runner(settings(folder, dtype=dtype))


def test_an_order_has_the_numbers_of_the_file(quantized: Quantized) -> None:
    """To the bit those that the dequantised matrix has; each output of every matrix."""
    model_dir = quantized("gptq-32-order")
    specs = parameter_specs(load_decoder_config(model_dir))
    in_int4 = load_weights(model_dir, specs, WeightsTarget(torch.device("cpu"), torch.float32, "int4"))
    floats = load_weights(model_dir, specs, WeightsTarget(torch.device("cpu"), torch.float32))
    for name in ("qkv", "o", "gate_up", "down"):
        matrix, expected = in_int4.take_linear(f"layers.1.{name}"), floats.take_linear(f"layers.1.{name}").weight
        assert matrix.order is not None
        assert matrix.scales is not None
        assert matrix.zeros is not None
        group_of = torch.arange(expected.shape[1]) // in_int4.stored.group
        found = (matrix.weight.float() - matrix.zeros[:, group_of]) * matrix.scales[:, group_of]
        assert torch.equal(found, expected[:, matrix.order])


@pytest.mark.parametrize("form", ["gptq-32-order", "w4a16-32-order"])
def test_adapters_read_the_inputs_in_their_own_order(
    checkpoint: Checkpoint, quantized: Quantized, tmp_path: Path, form: str
) -> None:
    """LoRA is added to a product whose inputs are gathered in the order of the file; its own inputs are not. As far
    from the eager decoder as without adapters, and each sequence to the bit what it is alone.
    """
    model_dir = quantized(form)
    adapters = four_adapters(checkpoint("llama-biases"), tmp_path)
    digests = dict(enumerate(["", *(adapter.digest for adapter in adapters)]))
    runner = load_arm(model_dir, "compiled", kv_dtype="float32", adapters=adapters)
    runs = run_together(runner, digests)
    eager = load_arm(twin_of(model_dir), "cpu", adapters=adapters)
    without = run_together(eager, dict.fromkeys(digests, ""))
    for number, (run, expected) in enumerate(zip(runs, run_together(eager, digests), strict=True)):
        mean, largest = logprob_differences([run], [expected])
        assert 0 < mean < 0.06
        assert largest < 0.3
        if digests[number]:
            assert logprob_differences([run], [without[number]])[0] > 0.3, "the adapter changes too little to tell"
        require_equal([run], run_together(runner, {number: digests[number]}))


@pytest.mark.parametrize("inputs", [32, 48, 200])
def test_rounding_is_within_half_a_level(inputs: int) -> None:
    torch.manual_seed(inputs)
    weight = torch.randn(40, inputs) * torch.logspace(-6, 3, 40)[:, None]
    weight[0] = 0.0
    values, scales, zeros = round_to_int4(weight)
    group_of = torch.arange(inputs) // 32
    found = (values.float() - zeros[:, group_of].float()) * scales[:, group_of]
    assert int(values.max()) == 15
    assert ((found - weight).abs() <= 1.01 * scales[:, group_of] + 2**-24).all()
    assert ((found - weight).abs() <= 0.51 * scales[:, group_of] + 2**-24).float().mean() > 0.98
    assert torch.equal(scales, scales.half().float())


@pytest.mark.parametrize("inputs", [32, 224])
def test_rounding_to_steps_is_within_half_a_step(inputs: int) -> None:
    """Numbers of int8, of which none is further from the weight than half a step but where the ends are cut."""
    torch.manual_seed(inputs)
    weight = torch.randn(40, inputs) * torch.logspace(-6, 3, 40)[:, None]
    weight[0] = 0.0
    weight[1, 5] = 1.0  # all others of its output are small
    values, scales, steps, lows = round_to_steps(weight)
    group_of = torch.arange(inputs) // 32
    numbers = lows.int()[:, group_of] + steps.int()[:, group_of] * values
    assert numbers.min() >= -128
    assert numbers.max() <= 127
    assert int(values.max()) == 15
    found, step = numbers * scales[:, None], steps[:, group_of] * scales[:, None]
    assert ((found - weight).abs() <= 1.3 * step + 1e-12).all()
    assert ((found - weight).abs() <= 0.51 * step + 1e-12).float().mean() > 0.95
    assert not found[0].any()
    assert found[1, 5] == pytest.approx(1.0, rel=0.01)


def test_steps_round_less_than_groups_with_scales() -> None:
    """Of weights as models have them, of which int4 in 32 inputs loses 8 %."""
    torch.manual_seed(0)
    weight = torch.randn(64, 512)
    values, scales, steps, lows = round_to_steps(weight)
    levels, group_scales, zeros = round_to_int4(weight)
    group_of = torch.arange(512) // 32
    in_steps = (lows.int()[:, group_of] + steps.int()[:, group_of] * values) * scales[:, None]
    in_groups = (levels.float() - zeros[:, group_of].float()) * group_scales[:, group_of]
    assert (in_steps - weight).norm() < (in_groups - weight).norm() < 0.09 * weight.norm()
