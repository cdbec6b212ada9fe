"""gpt-oss as it is released: experts in MXFP4, which loading dequantises as transformers does, to the bit."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from engine.kernels.cpu.products.nibble_numbers import E2M1_LEVELS, E2M1_ZERO
from engine.loading.load_runner import load_model_runner
from engine.loading.resolve import resolve
from engine.loading.weights import WeightsTarget, load_weights
from engine.models.parameters import parameter_specs
from engine.models.read_config import load_decoder_config
from engine.quantizer.float_checkpoint import open_float_checkpoint
from engine.quantizer.make import quantize_checkpoint
from engine.quantizer.schemes import make_scheme
from mesh.domain.errors import ConfigurationError
from tests.component.arms import load_arm, settings
from tests.component.parity import logprob_differences, run_mixed
from tests.made_once import made_once

QUANTIZATION = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def _make(source: Path, folder: Path) -> None:
    """Folders `released` and `twin`, whose experts are numbers of transformers'."""
    torch.manual_seed(0)
    tensors: dict[str, Tensor] = load_file(source / "model.safetensors")
    released, twin = dict(tensors), dict(tensors)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        count, num_inputs, num_outputs = tensors[name].shape
        blocks = torch.randint(0, 256, (count, num_outputs, num_inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(120, 126, blocks.shape[:-1], dtype=torch.uint8)
        del released[name]
        released |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        twin[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    for kind, stored in (("released", released), ("twin", twin)):
        shutil.copytree(source, folder / kind)
        save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / kind / "model.safetensors")
    _describe(folder / "released", quantization_config=QUANTIZATION)


def _describe(folder: Path, **members: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | members))


@pytest.fixture(scope="module")
def folders(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "mxfp4", lambda folder: _make(checkpoint("gpt-oss"), folder))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_are_those_of_transformers(folders: Path, dtype: torch.dtype) -> None:
    specs = parameter_specs(load_decoder_config(folders / "twin"))
    ours, theirs = (
        load_weights(folders / kind, specs, WeightsTarget(torch.device("cpu"), dtype)) for kind in ("released", "twin")
    )
    for spec in specs:
        if spec.is_matrix and "experts" in spec.name:
            assert torch.equal(ours.take_linear(spec.name).weight, theirs.take_linear(spec.name).weight), spec.name


@pytest.mark.parametrize("asked", [{}, {"enforce_eager": True}, {"quantize": "int8"}], ids=str)
def test_a_model_says_what_its_twin_says(folders: Path, asked: dict[str, Any]) -> None:
    runs = [run_mixed(load_model_runner(settings(folders / kind, **asked))) for kind in ("released", "twin")]
    assert [run.token_ids for run in runs[0]] == [run.token_ids for run in runs[1]]
    assert logprob_differences(*runs)[1] < 1e-5


def test_int4_keeps_the_numbers_of_experts(folders: Path) -> None:
    """Its own error is that of activations and of the other matrices, which are rounded."""
    model_dir = folders / "released"
    config = load_decoder_config(model_dir)
    target = WeightsTarget(torch.device("cpu"), torch.float32, "int4")
    ours = load_weights(model_dir, parameter_specs(config), target)
    exact = load_weights(folders / "twin", parameter_specs(config), replace(target, encoding="float"))
    for name in ("layers.0.experts.3.gate_up", "layers.2.experts.7.down"):
        matrix = ours.take_linear(name)
        assert matrix.scales is not None
        assert matrix.is_mxfp4
        levels = torch.tensor(E2M1_LEVELS)[matrix.weight.int()] - E2M1_ZERO
        numbers = levels * matrix.scales.repeat_interleave(32, 1)
        assert torch.equal(numbers, exact.take_linear(name).weight)
    runs = [run_mixed(load_arm(folders / kind, "compiled", quantize="int4")) for kind in ("released", "twin")]
    mean, _ = logprob_differences(runs[0], run_mixed(load_arm(folders / "twin", "cpu")))
    assert 0 < mean < logprob_differences(runs[1], run_mixed(load_arm(folders / "twin", "cpu")))[0]


def test_bf16_keeps_every_number(folders: Path, tmp_path: Path) -> None:
    """The released config.json states no dtype."""
    copy = Path(shutil.copytree(folders / "released", tmp_path / "copy"))
    tensors = load_file(copy / "model.safetensors")
    floats = {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    save_file(floats, copy / "model.safetensors")
    _describe(copy, dtype=None, torch_dtype=None)
    assert resolve(settings(copy))[0].dtype == "bfloat16"


def test_it_is_quantised_as_its_twin_is(folders: Path, tmp_path: Path) -> None:
    """By `tandem quantize`, which stacks the experts as they are stacked in other files."""
    prompts = [list(range(1, 40)), list(range(9, 60))]
    for kind in ("released", "twin"):
        checkpoint = open_float_checkpoint(folders / kind)
        scheme = make_scheme("gptq", group_size=32, alpha=0.5, dtype=checkpoint.dtype)
        quantize_checkpoint(checkpoint, tmp_path / kind, scheme, prompts, prompts[:1], lambda _: None)
    released, twin = (load_file(tmp_path / kind / "model.safetensors") for kind in ("released", "twin"))
    assert released.keys() == twin.keys()
    assert all(torch.equal(released[name], tensor) for name, tensor in twin.items())
    assert resolve(settings(tmp_path / "released"))[0].quantize == "int4"
    exact, stored = (
        run_mixed(load_arm(tmp_path / "twin", "compiled", **dtype)) for dtype in ({"dtype": "float32"}, {})
    )
    assert logprob_differences(stored, exact)[0] < 0.2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quantization_config": None}, "is in MXFP4, but quant_method"),
        ({"quantization_config": {"quant_method": "fp8"}}, "is in MXFP4, but quant_method"),
        ({"hidden_size": 48}, "blocks of 32 do not divide its 48 inputs"),
        ({"num_local_experts": 4}, "config.json implies"),
    ],
)
def test_what_does_not_fit_is_refused(folders: Path, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    copy = Path(shutil.copytree(folders / "released", tmp_path / "copy"))
    _describe(copy, **change)
    with pytest.raises(ConfigurationError, match=message):
        load_weights(
            copy, parameter_specs(load_decoder_config(copy)), WeightsTarget(torch.device("cpu"), torch.float32)
        )
