"""fp8 in the compiled decoder: checkpoints in e4m3 with a scale for each output, one byte a weight."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint.partition_manifest import read_partition
from engine.load_runner import load_model_runner
from engine.models.compiled_decoder import CompiledDecoder
from engine.resolve import resolve
from mesh.domain.errors import ConfigurationError
from mesh.domain.kv import Degrees
from tandem_cli.main import main
from tests.component.arms import load_arm, settings
from tests.component.parity import logprob_differences, run_mixed
from tests.component.quantized import quantize_checkpoint, quantized_once, twin_of
from tests.component.ranked import ranked_runner
from tests.component.test_ranks import require_equal, whole_kv

Checkpoint = Callable[[str], Path]
Quantized = Callable[[str], Path]


@pytest.fixture(scope="module")
def quantized(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Quantized:
    """`quantized(form)` is a Llama in that form, with biases and an output matrix of its own."""
    return lambda form: quantized_once(tmp_path_factory, checkpoint("llama-biases"), form)


def test_numbers_are_those_of_the_file(quantized: Quantized) -> None:
    """Nothing is rounded: results differ from those of the dequantised weights by the order of scaling only."""
    model_dir = quantized("fp8-channels")
    resolved = resolve(settings(model_dir))[0]
    assert (resolved.quantize, resolved.dtype) == ("fp8", "float32")
    runner = load_arm(model_dir, "compiled")
    assert runner.kv_cache.layout.dtype == "float32"
    found, expected = run_mixed(runner), run_mixed(load_arm(twin_of(model_dir), "compiled"))
    assert [[token.id for token in run.tokens] for run in found] == [
        [token.id for token in run.tokens] for run in expected
    ]
    assert logprob_differences(found, expected)[1] < 1e-5


def test_a_weight_takes_one_byte(quantized: Quantized) -> None:
    model = load_arm(quantized("fp8-channels"), "compiled")._model
    assert isinstance(model, CompiledDecoder)
    assert model._model.weights.packed.itemsize == 1


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
        ("fp8", {}, "none"),  # a scale for each block
    ],
)
def test_what_is_dequantised(quantized: Quantized, form: str, changes: dict[str, object], quantize: str) -> None:
    load_arm(quantized("fp8-channels"), "compiled")  # or the CPU cannot
    assert resolve(settings(quantized(form), **changes))[0].quantize == quantize


def test_other_checkpoints_are_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(ConfigurationError, match="not in fp8 with a scale for each output"):
        resolve(settings(checkpoint("llama"), quantize="fp8"))


def test_numbers_that_are_none_are_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = quantize_checkpoint(checkpoint("llama"), tmp_path / "model", "fp8-channels")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name].view(torch.uint8)[3, 5] = 0xFF
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigurationError, match=r"1 of .* model.layers.1.mlp.down_proj are NaN"):
        load_model_runner(settings(folder))
