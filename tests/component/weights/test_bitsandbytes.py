"""Checkpoints of bitsandbytes: which arithmetic they get, NF4 and int8 as stored, and what is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint.partition_manifest import read_partition
from checkpoint.tensors import StoredTensor
from engine.kernels.cpu.products.nibble_numbers import NF4_LEVELS, NF4_ZERO
from engine.loading.resolve import kv_layout, resolve
from engine.loading.stored_parameters import stored_in_int4
from engine.loading.weights import WeightsTarget, load_weights
from engine.models.encodings import Parameters
from engine.models.parameters import parameter_specs
from engine.models.read_config import load_decoder_config
from engine.quantized_formats.bitsandbytes import LEVELS
from engine.quantized_formats.config import read_quantization
from engine.quantized_formats.modules import QuantizedModule, find_module
from engine.quantizer.float_checkpoint import open_float_checkpoint
from mesh.domain.errors import ConfigurationError
from mesh.domain.kv import Degrees
from tandem_cli.main import main
from tests.component.arms import load_arm, settings
from tests.component.parity import logprob_differences, run_mixed
from tests.component.ranks.ranked import ranked_runner
from tests.component.ranks.test_ranks import require_equal, whole_kv
from tests.component.weights.quantized import FORMS, bitsandbytes_4bit, describe, quantized_once, twin_of
from tests.component.weights.test_half_weights import copy_narrow

Checkpoint = Callable[[str], Path]
Quantized = Callable[[str, str], Path]
Tensors = dict[str, torch.Tensor]

DATA = Path(__file__).parents[2] / "data" / "quantized"
DOWN = "model.layers.1.mlp.down_proj"
STATE = "weight.quant_state.bitsandbytes__nf4"


@pytest.fixture(scope="module")
def quantized(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Quantized:
    """`quantized(family, form)` is the folder of that checkpoint."""
    return lambda family, form: quantized_once(tmp_path_factory, checkpoint(family), form)


@pytest.fixture
def broken(quantized: Quantized, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a Llama in that form, which a test may break."""
    return lambda form: Path(shutil.copytree(quantized("llama", form), tmp_path / "model"))


def parameters(model_dir: Path, encoding: str = "float") -> Parameters:
    specs = parameter_specs(load_decoder_config(model_dir))
    return load_weights(model_dir, specs, WeightsTarget(torch.device("cpu"), torch.float32, encoding))


@pytest.mark.parametrize(
    ("made", "dtype"),
    [("bnb-nf4", "bfloat16"), ("bnb-nf4-in-bf16", "bfloat16"), ("bnb-fp4", "float16"), ("bnb-int8", "float16")],
)
def test_by_default_it_is_dequantised_to_its_own_dtype(made: str, dtype: str) -> None:
    load_arm(DATA / made, "compiled")  # or the CPU cannot
    resolved, config = resolve(settings(DATA / made))
    assert (resolved.dtype, resolved.quantize) == (dtype, "none")
    exact, _ = resolve(settings(DATA / made, dtype="float32"))
    layouts = [kv_layout(config, each) for each in (resolved, exact)]
    assert layouts[0].model_fingerprint != layouts[1].model_fingerprint, "one rounds to 16 bits, the other does not"
    assert resolve(settings(DATA / made, enforce_eager=True))[0].dtype == "float32"


def test_levels_of_the_kernel_are_those_of_nf4_in_8_bits() -> None:
    assert torch.equal((127 * LEVELS["nf4"]).round().int() + NF4_ZERO, torch.tensor(NF4_LEVELS, dtype=torch.int32))


@pytest.mark.parametrize("family", ["llama-biases", "mixtral"])
def test_int4_keeps_the_numbers_of_nf4(quantized: Quantized, family: str) -> None:
    model_dir = quantized(family, "bnb-nf4")
    ours, exact = parameters(model_dir, "int4"), parameters(twin_of(model_dir))
    assert ours.stored.group == 32, "rows of 96 inputs, in blocks of 64"
    for spec in parameter_specs(load_decoder_config(model_dir)):
        if not spec.is_matrix or spec.name == "lm_head":
            continue
        matrix, expected = ours.take_linear(spec.name), exact.take_linear(spec.name).weight
        assert matrix.is_nf4
        assert matrix.scales is not None
        scales = matrix.scales.repeat_interleave(32, 1)
        numbers = (torch.tensor(NF4_LEVELS)[matrix.weight.int()] - NF4_ZERO) * scales
        assert bool(((numbers - expected).abs() <= 0.5001 * scales).all()), spec.name


def test_int4_is_nearer_than_rounding_again(quantized: Quantized) -> None:
    model_dir = quantized("llama-biases", "bnb-nf4")
    exact = run_mixed(load_arm(twin_of(model_dir), "cpu"))
    as_stored, rounded = (
        run_mixed(load_arm(folder, "compiled", quantize="int4", kv_dtype="float32"))
        for folder in (model_dir, twin_of(model_dir))
    )
    mean, largest = logprob_differences(as_stored, exact)
    assert 0 < mean < 0.03
    assert largest < 0.3
    assert mean < logprob_differences(rounded, exact)[0] / 2


def test_partitions_of_mixtures_hold_nf4(quantized: Quantized, tmp_path: Path) -> None:
    model_dir, out = quantized("mixtral", "bnb-nf4"), tmp_path / "out"
    alone = load_arm(model_dir, "compiled", quantize="int4")
    assert main(["partition", str(model_dir), str(out), "--quantize=int4"]) == 0
    runner = load_arm(out, "compiled")
    assert runner.kv_cache.layout == alone.kv_cache.layout
    assert [run.tokens for run in run_mixed(runner)] == [run.tokens for run in run_mixed(alone)]


def test_ranks_and_partitions_equal_one_rank(quantized: Quantized, tmp_path: Path) -> None:
    model_dir, out = quantized("llama-biases", "bnb-nf4"), tmp_path / "out"
    alone = load_arm(model_dir, "compiled", quantize="int4")
    expected = run_mixed(alone)
    assert main(["partition", str(model_dir), str(out), "--quantize=int4", "--tensor-parallel=2"]) == 0
    partition = read_partition(out)
    assert partition is not None
    assert resolve(settings(out, tensor_parallel=2))[0].quantize == partition.quantize == "int4"
    for folder in (model_dir, out):
        with ranked_runner(folder, Degrees(2), quantize="int4") as runner:
            require_equal(run_mixed(runner), expected)
            assert whole_kv(runner) == whole_kv(alone)
            assert runner.kv_cache.layout == alone.kv_cache.layout


def test_partitions_hold_what_is_dequantised(
    checkpoint: Checkpoint, quantized: Quantized, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    narrow = copy_narrow(checkpoint("llama"), tmp_path / "narrow", "bfloat16")
    model_dir, out = quantized_once(tmp_path_factory, narrow, "bnb-nf4"), tmp_path / "out"
    alone = load_arm(model_dir, "compiled")
    assert main(["partition", str(model_dir), str(out)]) == 0
    partition = read_partition(out)
    assert partition is not None
    assert (partition.quantize, partition.dtype) == ("none", "bfloat16")
    runner = load_arm(out, "compiled")
    assert runner.kv_cache.layout == alone.kv_cache.layout
    assert [run.tokens for run in run_mixed(runner)] == [run.tokens for run in run_mixed(alone)]


@pytest.mark.parametrize("form", ["bnb-nf4", "bnb-fp4"])
def test_modules_that_are_not_quantised_stay(quantized: Quantized, tmp_path: Path, form: str) -> None:
    """In int4 they have 8 bits beside NF4; beside FP4, which is rounded again, 4 bits."""
    model_dir = Path(shutil.copytree(quantized("llama-biases", form), tmp_path / "model"))
    tensors, twin = (
        load_file(folder / "model.safetensors") for folder in (model_dir, twin_of(quantized("llama-biases", form)))
    )
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(f"{DOWN}.weight")}
    save_file(kept | {f"{DOWN}.weight": twin[f"{DOWN}.weight"]}, model_dir / "model.safetensors")
    describe(model_dir, {**FORMS[form].config, "llm_int8_skip_modules": ["lm_head", DOWN]})
    assert torch.equal(parameters(model_dir).take_linear("layers.1.down").weight, twin[f"{DOWN}.weight"])
    stored = stored_in_int4(model_dir, parameter_specs(load_decoder_config(model_dir)))
    assert (stored is not None and stored.in_int8) == (form == "bnb-nf4" and frozenset({"layers.1.down"}))
    exact = run_mixed(load_arm(model_dir, "cpu"))
    in_int4 = run_mixed(load_arm(model_dir, "compiled", quantize="int4", kv_dtype="float32"))
    mean, _ = logprob_differences(in_int4, exact)
    assert 0 < mean < (0.03 if form == "bnb-nf4" else 0.5)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize(
    ("shape", "size", "group"),
    [
        ((48, 100), 64, None),
        ((7, 33), 32, None),
        ((40, 96), 64, 32),
        ((40, 320), 128, 64),
        ((96, 64), 4096, 64),
        ((4, 64), 512, 64),
    ],
)
def test_blocks_run_over_the_ends_of_rows(
    kind: str, shape: tuple[int, int], size: int, group: int | None, *, nested: bool
) -> None:
    torch.manual_seed(0)
    tensors, means = bitsandbytes_4bit(torch.randn(shape), kind, size, nested=nested)
    module = find_in(tensors, shape)
    assert torch.equal(module.read(lambda name: tensors[name.removeprefix("m.")]).dequantized(), means)
    assert module.int4_group == (group if kind == "nf4" else None)


def find_in(tensors: Tensors, shape: tuple[int, int]) -> QuantizedModule:
    """The module of these tensors."""
    names = {torch.uint8: "U8", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
    stored = {
        f"m.{part}": StoredTensor(Path("file"), names[tensor.dtype], tuple(tensor.shape), 0, tensor.nbytes)
        for part, tensor in tensors.items()
    }
    module = find_module("m", shape, stored, read_quantization(DATA / "bnb-nf4"))
    assert module is not None
    return module


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float16, torch.float32])
def test_bytes_may_be_called_floats(storage: torch.dtype) -> None:
    torch.manual_seed(0)
    tensors, means = bitsandbytes_4bit(torch.randn(32, 64), storage=storage)
    module = find_in(tensors, (32, 64))
    assert torch.equal(module.read(lambda name: tensors[name.removeprefix("m.")]).dequantized(), means)


def test_int8_is_taken_as_stored(quantized: Quantized) -> None:
    """If the settings say so: the library computes in 16 bits what rows have beyond a threshold."""
    model_dir = quantized("qwen2", "bnb-int8")
    assert resolve(settings(model_dir))[0].quantize == "none"
    stored, down = (
        load_file(model_dir / "model.safetensors"),
        parameters(model_dir, "int8").take_linear("layers.1.down"),
    )
    assert torch.equal(down.weight, stored[f"{DOWN}.weight"])
    assert down.scales is not None
    assert torch.equal(down.scales, stored[f"{DOWN}.SCB"] * (1 / 127))
    runner, exact = load_arm(model_dir, "compiled", quantize="int8"), load_arm(twin_of(model_dir), "cpu")
    mean, largest = logprob_differences(run_mixed(runner), run_mixed(exact))
    assert 0 < mean < 0.06
    assert largest < 0.5


def test_it_is_not_quantised_again(quantized: Quantized) -> None:
    with pytest.raises(ConfigurationError, match=r"is quantised already \(bitsandbytes nf4, 4 bits\)"):
        open_float_checkpoint(quantized("llama", "bnb-nf4"))


def drop(part: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(f"{DOWN}.{part}")


def put(part: str, tensor: torch.Tensor) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({f"{DOWN}.{part}": tensor})


def replaced(part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({f"{DOWN}.{part}": change(tensors[f"{DOWN}.{part}"])})


def stating(**changes: object) -> Callable[[Tensors], object]:
    def state(tensor: torch.Tensor) -> torch.Tensor:
        stated = json.loads(tensor.numpy().tobytes()) | changes
        return torch.tensor(list(json.dumps(stated).encode()), dtype=torch.uint8)

    return replaced(STATE, state)


@pytest.mark.parametrize(
    ("form", "damage", "words"),
    [
        ("bnb-nf4", drop("weight.absmax"), r"cannot be read without .*down_proj\.weight\.absmax, which is missing"),
        ("bnb-nf4", drop("weight.quant_map"), r"without .*quant_map, which is missing"),
        (
            "bnb-nf4",
            drop(STATE),
            r"down_proj: it needs one tensor .*bitsandbytes__ with nf4 or fp4 behind it, and has 0",
        ),
        ("bnb-nf4", drop("weight.nested_absmax"), r"nested_absmax or nested_quant_map is missing: download"),
        ("bnb-fp4", put("weight.nested_absmax", torch.ones(1)), "absmax is in floating point and has a nested_absmax"),
        ("bnb-fp4", drop("weight.absmax"), r"down_proj\.weight has shape \[1536, 1\]|is missing"),
        ("bnb-nf4", replaced("weight", lambda weight: weight[1:]), r"down_proj\.weight has shape \[3071, 1\]"),
        (
            "bnb-nf4",
            replaced("weight", lambda weight: weight[: len(weight) // 2]),
            r"has 1536 bytes, and .* implies 3072",
        ),
        ("bnb-nf4", replaced("weight", lambda weight: weight.int()), r"down_proj\.weight has dtype I32"),
        ("bnb-nf4", replaced("weight.absmax", lambda largest: largest[1:]), r"weight\.absmax has shape \[95\]"),
        ("bnb-nf4", replaced("weight.absmax", lambda largest: largest[::2]), "absmax has 48 numbers, and blocks of 64"),
        ("bnb-nf4", replaced("weight.nested_absmax", lambda outer: outer.repeat(2)), r"nested_absmax has shape \[2\]"),
        ("bnb-nf4", replaced("weight.nested_absmax", lambda outer: outer * torch.nan), "are NaN or infinite"),
        ("bnb-nf4", replaced("weight.quant_map", lambda levels: levels.flip(0)), "has other levels than nf4"),
        ("bnb-nf4", put(STATE, torch.full((5000,), 32, dtype=torch.uint8)), r"shape \[5000\], which is no text"),
        ("bnb-nf4", put(STATE, torch.full((9,), 200, dtype=torch.uint8)), "quant_state is no JSON"),
        ("bnb-nf4", put(STATE, torch.tensor(list(b"[1]"), dtype=torch.uint8)), "quant_state must be a JSON object"),
        ("bnb-nf4", stating(quant_type="fp4"), "quant_type 'fp4' of its quant_state is not supported; supported: nf4"),
        ("bnb-nf4", stating(blocksize=48), "blocksize 48 of its quant_state is not supported; supported: 32, 64"),
        ("bnb-nf4", stating(blocksize=64.0), r"blocksize 64\.0 of its quant_state is not supported"),
        ("bnb-nf4", stating(shape=[96, 64]), r"quant_state says shape \[96, 64\], config\.json implies \[64, 96\]"),
        ("bnb-nf4", stating(nested_offset=None), "nested_offset of its quant_state must be a number, got None"),
        ("bnb-nf4", stating(nested_blocksize=-1), "nested_blocksize -1 of its quant_state is not supported"),
        ("bnb-int8", drop("SCB"), r"without .*down_proj\.SCB, which is missing"),
        (
            "bnb-int8",
            replaced("SCB", lambda largest: largest[1:]),
            r"SCB has shape \[63\], config\.json implies \[64\]",
        ),
        ("bnb-int8", replaced("SCB", lambda largest: largest / 0), "are NaN or infinite"),
        (
            "bnb-int8",
            put("weight_format", torch.tensor(2, dtype=torch.uint8)),
            "weight_format 2 is an order of numbers",
        ),
        ("bnb-int8", replaced("weight", torch.Tensor.bfloat16), r"weight has dtype BF16, and .*\.SCB is there"),
    ],
)
@pytest.mark.parametrize("encoding", ["float", "int4", "int8"])
def test_broken_files_are_refused(
    broken: Callable[[str], Path], form: str, damage: Callable[[Tensors], object], words: str, encoding: str
) -> None:
    model_dir = broken(form)
    path = model_dir / "model.safetensors"
    tensors = load_file(path)
    damage(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    with pytest.raises(ConfigurationError, match=words):
        parameters(model_dir, encoding).read_all()


@pytest.mark.parametrize(
    ("form", "changes", "words"),
    [
        ("bnb-nf4", {"load_in_4bit": False}, "one of load_in_4bit and load_in_8bit must be true"),
        ("bnb-nf4", {"load_in_8bit": True}, "one of load_in_4bit and load_in_8bit must be true"),
        ("bnb-nf4", {"load_in_4bit": "yes"}, "load_in_4bit must be true or false, got 'yes'"),
        (
            "bnb-nf4",
            {"bnb_4bit_quant_type": "int4"},
            "bnb_4bit_quant_type 'int4' is not supported; supported: nf4, fp4",
        ),
        ("bnb-nf4", {"llm_int8_skip_modules": "lm_head"}, "llm_int8_skip_modules must be a list of strings"),
        (
            "bnb-nf4",
            {"load_in_4bit": False, "load_in_8bit": True},
            r"weight has dtype U8, which its format stores as I8",
        ),
        ("bnb-int8", {"load_in_4bit": True, "load_in_8bit": False}, r"cannot be read without .*absmax|has shape"),
    ],
)
def test_descriptions_that_do_not_fit_are_refused(
    broken: Callable[[str], Path], form: str, changes: dict[str, Any], words: str
) -> None:
    model_dir = broken(form)
    describe(model_dir, {**FORMS[form].config, **changes})
    with pytest.raises(ConfigurationError, match=words):
        parameters(model_dir)
