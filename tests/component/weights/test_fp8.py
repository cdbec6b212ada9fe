"""fp8 in the compiled decoder: checkpoints in e4m3, one byte a weight, and matrices in bf16 beside it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint.partition_manifest import read_partition
from engine.kernels.cpu.machine import IN_BF16
from engine.kernels.cpu.step_arguments import ModelConstants
from engine.loading.load_runner import load_model_runner
from engine.loading.resolve import resolve
from engine.model_runner import ModelRunner
from engine.models.compiled_decoder import CompiledDecoder
from mesh.domain.errors import ConfigurationError
from mesh.domain.kv import Degrees
from tandem_cli.main import main
from tests.component.arms import embedding, load_arm, settings
from tests.component.parity import run_mixed
from tests.component.ranks.ranked import ranked_runner
from tests.component.ranks.test_ranks import require_equal, whole_kv
from tests.component.weights.quantized import quantize_checkpoint, quantized_once
from tests.component.weights.test_half_weights import copy_narrow
from tests.made_once import made_once

Checkpoint = Callable[[str], Path]
Quantized = Callable[[str], Path]


@pytest.fixture(scope="module")
def quantized(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Quantized:
    """`quantized(form)` is a Llama in that form, in bf16, with biases and an output matrix of its own."""

    def get(form: str) -> Path:
        narrow = made_once(
            tmp_path_factory, "fp8-of-bf16", lambda out: copy_narrow(checkpoint("llama-biases"), out, "bfloat16")
        )
        return quantized_once(tmp_path_factory, narrow, form)

    return get


@pytest.mark.parametrize("form", ["fp8-channels", "fp8-mixed"])
def test_results_are_those_of_the_dequantised_numbers(quantized: Quantized, form: str) -> None:
    """To the bit, so that workers of both exchange KV."""
    model_dir = quantized(form)
    resolved = resolve(settings(model_dir))[0]
    assert (resolved.quantize, resolved.dtype) == ("fp8", "float32")
    runner, wide = load_arm(model_dir, "compiled"), load_arm(model_dir, "compiled", dtype="float32")
    assert runner.kv_cache.layout == wide.kv_cache.layout
    require_equal(run_mixed(runner), run_mixed(wide))
    assert whole_kv(runner) == whole_kv(wide)
    assert num_bytes(runner) < 0.5 * num_bytes(wide)


@pytest.mark.parametrize(("family", "form"), [("qwen3.5", "fp8"), ("mixtral", "fp8"), ("deepseek-v3", "fp8-mixed")])
def test_other_layers(checkpoint: Checkpoint, tmp_path: Path, family: str, form: str) -> None:
    """Matrices of which one part is fp8, gates behind values, experts, and latents."""
    narrow = copy_narrow(checkpoint(family), tmp_path / "narrow", "bfloat16")
    model_dir = quantize_checkpoint(narrow, tmp_path / "model", form)
    runner = load_arm(model_dir, "compiled")
    assert len(set(constants(runner).weights.units[:, 1].tolist()) - {IN_BF16}) == 1
    require_equal(run_mixed(runner), run_mixed(load_arm(model_dir, "compiled", dtype="float32")))


def num_bytes(runner: ModelRunner) -> int:
    model = constants(runner)
    return embedding(runner).nbytes + model.weights.packed.nbytes + model.output.packed.nbytes


def constants(runner: ModelRunner) -> ModelConstants:
    model = runner.model
    assert isinstance(model, CompiledDecoder)
    return model._model


def test_ranks_and_partitions_equal_one_rank(quantized: Quantized, tmp_path: Path) -> None:
    model_dir, out = quantized("fp8-channels"), tmp_path / "out"
    alone = load_arm(model_dir, "compiled")
    expected = run_mixed(alone)
    assert main(["partition", str(model_dir), str(out), "--tensor-parallel=2"]) == 0
    partition = read_partition(out)
    assert partition is not None
    assert partition.quantize == "fp8"
    for folder in (model_dir, out):
        with ranked_runner(folder, Degrees(2)) as runner:
            require_equal(run_mixed(runner), expected)
            assert whole_kv(runner) == whole_kv(alone)


@pytest.mark.parametrize(
    ("form", "changes", "quantize"),
    [
        ("fp8-channels", {"dtype": "float32"}, "none"),
        ("fp8-channels", {"enforce_eager": True}, "none"),
        ("fp8-channels", {"quantize": "int8"}, "int8"),
    ],
)
def test_what_is_dequantised(quantized: Quantized, form: str, changes: dict[str, object], quantize: str) -> None:
    load_arm(quantized("fp8-channels"), "compiled")  # or the CPU cannot
    assert resolve(settings(quantized(form), **changes))[0].quantize == quantize


def test_other_checkpoints_are_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(ConfigurationError, match=r"the matrices of the checkpoint are not in fp8 \(e4m3\)"):
        resolve(settings(checkpoint("llama"), quantize="fp8"))


def test_numbers_that_are_none_are_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = quantize_checkpoint(checkpoint("llama"), tmp_path / "model", "fp8-channels")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name].view(torch.uint8)[3, 5] = 0xFF
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigurationError, match=r"1 of .* model.layers.1.mlp.down_proj are NaN"):
        load_model_runner(settings(folder))
