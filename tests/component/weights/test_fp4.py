"""Checkpoints in NVFP4 and MXFP4, and those of modelopt and Quark: what is kept as stored, and what is refused."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.kernels.cpu.products.nibble_numbers import E2M1_LEVELS, E2M1_ZERO
from engine.kv.scales import read_kv_scales
from engine.loading.load_runner import load_model_runner
from engine.loading.resolve import resolve
from engine.loading.weights import WeightsTarget, load_weights
from engine.models.encodings import Parameters
from engine.models.parameters import parameter_specs
from engine.models.read_config import load_decoder_config
from engine.quantized_formats.config import read_quantization
from engine.runner_settings import RunnerSettings
from mesh.domain.errors import ConfigurationError
from mesh.domain.kv import Degrees
from tandem_cli.main import main
from tests.component.arms import load_arm, settings
from tests.component.checkpoints import VOCAB_SIZE
from tests.component.parity import logprob_differences, run_mixed
from tests.component.ranks.ranked import ranked_runner
from tests.component.weights.quantized import describe, quantized_once, twin_of

DATA = Path(__file__).parents[2] / "data" / "quantized"
DOWN = "model.layers.0.mlp.down_proj"


@pytest.fixture(scope="session")
def quantized(
    checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], Path]:
    return lambda family, form: quantized_once(tmp_path_factory, checkpoint(family), form)


def parameters(model_dir: Path, encoding: str = "float") -> Parameters:
    specs = parameter_specs(load_decoder_config(model_dir))
    return load_weights(model_dir, specs, WeightsTarget(torch.device("cpu"), torch.float32, encoding))


@pytest.mark.parametrize("made", ["mxfp4", "modelopt-mxfp4", "quark-mxfp4"])
def test_int4_keeps_the_numbers_of_any_module_in_mxfp4(made: str) -> None:
    ours, exact = parameters(DATA / made, "int4"), parameters(DATA / made)
    for name in ("layers.0.qkv", "layers.0.gate_up", "layers.0.down"):
        matrix = ours.take_linear(name)
        assert matrix.is_mxfp4
        assert matrix.scales is not None
        levels = torch.tensor(E2M1_LEVELS)[matrix.weight.int()] - E2M1_ZERO
        assert torch.equal(levels * matrix.scales.repeat_interleave(32, 1), exact.take_linear(name).weight)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_model_in_mxfp4_computes_with_4_bits(
    quantized: Callable[[str, str], Path], tmp_path: Path, family: str
) -> None:
    model_dir, exact = quantized(family, "mxfp4"), load_arm(twin_of(quantized(family, "mxfp4")), "cpu")
    alone = load_arm(model_dir, "compiled", quantize="int4")
    run, wanted = run_mixed(alone), run_mixed(exact)
    stored, _ = logprob_differences(run, wanted)
    rounded, _ = logprob_differences(run_mixed(load_arm(twin_of(model_dir), "compiled", quantize="int4")), wanted)
    assert 0 < stored < rounded
    assert main(["partition", "--quantize=int4", str(model_dir), str(tmp_path / "out")]) == 0
    partition = load_arm(tmp_path / "out", "compiled", quantize="int4")
    assert partition.kv_cache.layout == alone.kv_cache.layout
    assert [own.tokens for own in run_mixed(partition)] == [own.tokens for own in run]


@pytest.mark.parametrize(("form", "options"), [("mxfp4", {"quantize": "int4"}), ("nvfp4", {})])
def test_ranks_compute_as_one(quantized: Callable[[str, str], Path], form: str, options: dict[str, str]) -> None:
    model_dir = quantized("llama", form)
    alone = run_mixed(load_arm(model_dir, "compiled", **options))
    with ranked_runner(model_dir, Degrees(2), **options) as runner:
        assert [run.tokens for run in run_mixed(runner)] == [run.tokens for run in alone]


def test_blocks_of_modelopt_have_four_dimensions(tmp_path: Path) -> None:
    """As its matrices of more than one block do; each of these is smaller than a block."""
    model_dir = Path(shutil.copytree(DATA / "modelopt-fp8", tmp_path / "model"))
    tensors, whole = load_file(model_dir / "model.safetensors"), parameters(model_dir)
    scales = {name: tensor.view(1, 1, 1, 1) for name, tensor in tensors.items() if name.endswith("weight_scale")}
    save_file(tensors | scales, model_dir / "model.safetensors")
    with pytest.raises(ConfigurationError, match=r"has shape \[1, 1, 1, 1\], config\.json implies \[1, 1\]"):
        parameters(model_dir)
    facts = {"quantization": {"quant_algo": "fp8_pb_wo", "exclude_modules": ["lm_head"]}}
    (model_dir / "hf_quant_config.json").write_text(json.dumps(facts))
    blocks = parameters(model_dir)
    for name in ("layers.0.qkv", "layers.0.down"):
        assert torch.equal(blocks.take_linear(name).weight, whole.take_linear(name).weight)


def with_more_tokens(model_dir: Path, copy: Path) -> Path:
    """A copy with as many tokens as prompts of tests have, whose embedding and output matrix are random."""
    shutil.copytree(model_dir, copy)
    tensors, generator = load_file(copy / "model.safetensors"), torch.Generator().manual_seed(3)
    numbers = torch.randn(2, VOCAB_SIZE, 64, generator=generator).bfloat16()
    tensors |= {"model.embed_tokens.weight": numbers[0].clone(), "lm_head.weight": numbers[1].clone()}
    save_file(tensors, copy / "model.safetensors")
    config = json.loads((copy / "config.json").read_text()) | {"vocab_size": VOCAB_SIZE}
    (copy / "config.json").write_text(json.dumps(config))
    return copy


@pytest.mark.parametrize(
    ("made", "dtype", "quantize"),
    [
        ("mxfp4", "bfloat16", "none"),  # holds every number
        ("quark-mxfp4", "bfloat16", "none"),
        ("nvfp4", "float32", "none"),
        ("modelopt-nvfp4", "float32", "none"),
        ("modelopt-fp8", "float32", "fp8"),
        ("modelopt-mixed", "float32", "fp8"),
        ("quark-fp8", "float32", "fp8"),
        ("quark-mixed", "float32", "fp8"),
        ("mixed-fp4", "float32", "fp8"),
    ],
)
def test_files_of_libraries_are_computed_as_they_are_stored(
    tmp_path: Path, made: str, dtype: str, quantize: str
) -> None:
    model_dir = with_more_tokens(DATA / made, tmp_path / "model")
    resolved = resolve(RunnerSettings(model_dir))[0]
    assert (resolved.dtype, resolved.quantize) == (dtype, quantize)
    run = run_mixed(load_model_runner(settings(model_dir)))
    exact = run_mixed(load_model_runner(settings(model_dir, dtype="float32", enforce_eager=True)))
    mean, largest = logprob_differences(run, exact)
    assert (mean, largest) < ((0.05, 0.5) if dtype == "bfloat16" else (1e-5, 1e-4))


def test_fp8_of_a_mixture_keeps_bytes_beside_numbers() -> None:
    ours, exact = parameters(DATA / "modelopt-mixed", "fp8"), parameters(DATA / "modelopt-mixed")
    stored = load_file(DATA / "modelopt-mixed" / "model.safetensors")
    output = ours.take_linear("layers.0.o")
    assert torch.equal(
        output.weight.view(torch.uint8), stored["model.layers.0.self_attn.o_proj.weight"].view(torch.uint8)
    )
    assert torch.equal(ours.take_linear("layers.0.down").weight, exact.take_linear("layers.0.down").weight)


def test_scales_of_kv_are_found() -> None:
    scales = read_kv_scales(DATA / "modelopt-fp8")[0]
    stored = load_file(DATA / "modelopt-fp8" / "model.safetensors")
    attention = "model.layers.0.self_attn"
    assert scales == (float(stored[f"{attention}.k_proj.k_scale"]), float(stored[f"{attention}.v_proj.v_scale"]))
    assert scales != (1.0, 1.0)


def test_the_name_of_all_experts_stands_for_each(tmp_path: Path) -> None:
    """As modelopt writes mixtures: the tensors are those of single experts."""
    experts = "model.layers.10.block_sparse_moe.experts"
    layers = {experts: {"quant_algo": "NVFP4", "group_size": 16}, "model.layers.1.mlp.up_proj": {"quant_algo": "FP8"}}
    facts = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": facts}))
    quantization = read_quantization(tmp_path)
    assert quantization is not None
    found = {name: quantization.storage_of(name) for name in (f"{experts}.3.w1", "model.layers.1.mlp.up_proj")}
    assert [storage.format for storage in found.values() if storage is not None] == ["nvfp4-plain", "plain"]
    for name in (f"{experts[:-1]}", experts.replace("10", "1") + ".3.w1", "model.layers.1.mlp.up_proj2"):
        assert quantization.storage_of(name) is None


@pytest.mark.parametrize("own_file", [False, True])
def test_modelopt_has_two_spellings(tmp_path: Path, own_file: bool) -> None:
    facts = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16}
    names = ["lm_head", "model.layers.0*", "*.gate"]
    described: dict[str, Any] = {"quant_method": "modelopt", **facts, "ignore": names}
    if own_file:
        producer = {"name": "modelopt", "version": "0.29.0"}
        described = {"producer": producer, "quantization": facts | {"exclude_modules": names}}
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(described))
    (tmp_path / "config.json").write_text(json.dumps({} if own_file else {"quantization_config": described}))
    quantization = read_quantization(tmp_path)
    assert quantization is not None
    assert str(quantization) == "modelopt NVFP4, 4 bits"
    for name in ("lm_head", "model.layers.0.mlp.up_proj", "model.layers.3.mlp.gate"):
        assert quantization.storage_of(name) is None
    storage = quantization.storage_of("model.layers.3.mlp.gate_proj")
    assert storage is not None
    assert (storage.format, storage.block_inputs) == ("nvfp4-plain", 16)


def test_kv_alone_may_be_quantised(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    facts = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(facts))
    assert read_quantization(tmp_path) is None


def changed(made: str, **changes: object) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((DATA / made / "config.json").read_text())["quantization_config"]
    return config | changes


def with_weights(made: str, **changes: object) -> dict[str, Any]:
    config = changed(made)
    whole = config["config_groups"]["group_0"] if "config_groups" in config else config["global_quant_config"]
    key = "weights" if "weights" in whole else "weight"
    whole[key] = whole[key] | changes
    return config


@pytest.mark.parametrize(
    ("made", "config", "words"),
    [
        ("nvfp4", with_weights("nvfp4", group_size=32), "group_size 32 is not supported; supported: 16"),
        (
            "nvfp4",
            with_weights("nvfp4", strategy="group"),
            "strategy 'group' is not supported; supported: tensor_group",
        ),
        ("nvfp4", with_weights("nvfp4", symmetric=False), "symmetric False is not supported; supported: True"),
        ("nvfp4", with_weights("nvfp4", type="int"), "type 'int' is not supported; supported: float"),
        ("mxfp4", with_weights("mxfp4", num_bits=6), "num_bits 6 is not supported; supported: 4"),
        ("mxfp4", changed("modelopt-mxfp4"), "is not in the format that config.json names"),
        ("modelopt-nvfp4", changed("nvfp4"), "is not in the format that config.json names"),
        ("modelopt-nvfp4", changed("modelopt-mxfp4"), r"weight_scale has dtype F8_E4M3, which its format stores as U8"),
        ("modelopt-mxfp4", changed("modelopt-nvfp4"), r"weight_scale has dtype U8, which its format stores as F8_E4M3"),
        (
            "modelopt-nvfp4",
            changed("modelopt-nvfp4", quant_algo="NVFP4_AWQ"),
            "quant_algo 'NVFP4_AWQ' is not supported",
        ),
        ("modelopt-nvfp4", changed("modelopt-nvfp4", quant_algo=["FP8"]), "quant_algo .* is not supported"),
        ("modelopt-nvfp4", changed("modelopt-nvfp4", group_size=32), "group_size 32 is not supported; supported: 16"),
        ("modelopt-nvfp4", changed("modelopt-nvfp4", ignore="lm_head"), "ignore must be a list of strings"),
        ("modelopt-nvfp4", changed("modelopt-nvfp4", ignore=["*mlp*"]), r"config.json says that .*\.mlp\..* is not"),
        ("modelopt-nvfp4", changed("modelopt-nvfp4", producer={"name": "other"}), "name 'other' is not supported"),
        ("modelopt-mixed", changed("modelopt-mixed", quantized_layers=None), "quantized_layers must be an object"),
        (
            "modelopt-mixed",
            changed("modelopt-mixed", quantized_layers={DOWN: {"quant_algo": "NVFP4"}}),
            r"config.json says that .* is not \(modelopt MIXED_PRECISION, 4 bits\)",
        ),
        (
            "quark-mxfp4",
            with_weights("quark-mxfp4", dtype="mx"),
            "dtype 'mx' is not supported; supported: fp8_e4m3, fp4",
        ),
        ("quark-mxfp4", with_weights("quark-mxfp4", scale_format="e5m3"), "scale_format 'e5m3' is not supported"),
        ("quark-mxfp4", with_weights("quark-mxfp4", group_size=16), "group_size 16 is not supported; supported: 32"),
        ("quark-fp8", with_weights("quark-fp8", qscheme="per_group"), "qscheme 'per_group' is not supported"),
        ("quark-fp8", with_weights("quark-fp8", symmetric=False), "symmetric False is not supported"),
        ("quark-fp8", changed("quark-fp8", global_quant_config={"weight": [{}, {}]}), "weight must be an object"),
        (
            "quark-fp8",
            changed("quark-fp8", export={"weight_format": "fake_quantized"}),
            "weight_format 'fake_quantized'",
        ),
        (
            "quark-fp8",
            changed("quark-fp8", algo_config=[{"name": "rotation"}]),
            "algo_config 'rotation' is not supported",
        ),
        ("quark-fp8", changed("quark-fp8", layer_type_quant_config={"Linear": {}}), "layer_type_quant_config is not"),
        ("quark-fp8", changed("quark-fp8", exclude=["*"]), "says that .* is not"),
    ],
)
def test_descriptions_that_do_not_fit_are_refused(
    tmp_path: Path, made: str, config: Mapping[str, Any], words: str
) -> None:
    model_dir = Path(shutil.copytree(DATA / made, tmp_path / "model"))
    describe(model_dir, config)
    with pytest.raises(ConfigurationError, match=words):
        load_model_runner(settings(model_dir))


def test_groups_of_a_mixed_file_need_formats(tmp_path: Path) -> None:
    config = changed("mixed-fp4")
    del config["config_groups"]["group_1"]["format"]
    model_dir = Path(shutil.copytree(DATA / "mixed-fp4", tmp_path / "model"))
    describe(model_dir, config)
    with pytest.raises(ConfigurationError, match="mixed-precision needs a format in group_1 of config_groups"):
        load_model_runner(settings(model_dir))


Tensors = dict[str, Tensor]


@pytest.mark.parametrize(
    ("made", "part", "change", "words"),
    [
        ("nvfp4", "weight_global_scale", None, r"without .*down_proj\.weight_global_scale, which is missing"),
        ("nvfp4", "weight_scale", None, r"without .*down_proj\.weight_scale, which is missing"),
        ("nvfp4", "weight_global_scale", torch.zeros_like, r"down_proj are NaN or infinite"),
        ("nvfp4", "weight_packed", lambda packed: packed[:, 1:], r"shape \[64, 63\], config\.json implies \[64, 64\]"),
        (
            "nvfp4",
            "weight_scale",
            torch.Tensor.float,
            r"weight_scale has dtype F32, which its format stores as F8_E4M3",
        ),
        ("modelopt-nvfp4", "weight_scale_2", None, r"without .*down_proj\.weight_scale_2, which is missing"),
        ("modelopt-nvfp4", "weight_scale_2", lambda scale: scale * torch.inf, r"down_proj are NaN or infinite"),
        (
            "modelopt-nvfp4",
            "weight_scale",
            lambda scales: scales[1:],
            r"shape \[63, 8\], config\.json implies \[64, 8\]",
        ),
        ("modelopt-fp8", "weight_scale", lambda scale: scale.repeat(2), r"shape \[2\], config\.json implies \[1, 1\]"),
        ("mxfp4", "weight_scale", torch.Tensor.bfloat16, r"weight_scale has dtype BF16, which its format stores as U8"),
        ("mxfp4", "weight_scale", lambda scales: torch.full_like(scales, 255), r"down_proj are NaN or infinite"),
        ("quark-mxfp4", "weight_scale", None, r"without .*down_proj\.weight_scale, which is missing"),
    ],
)
def test_broken_files_are_refused(
    tmp_path: Path, made: str, part: str, change: Callable[[Tensor], Tensor] | None, words: str
) -> None:
    model_dir = Path(shutil.copytree(DATA / made, tmp_path / "model"))
    tensors = load_file(model_dir / "model.safetensors")
    before = tensors.pop(f"{DOWN}.{part}")
    if change is not None:
        tensors[f"{DOWN}.{part}"] = change(before).contiguous()
    save_file(tensors, model_dir / "model.safetensors")
    with pytest.raises(ConfigurationError, match=words):
        parameters(model_dir).read_all()


def test_factors_of_activations_are_refused(tmp_path: Path) -> None:
    model_dir = Path(shutil.copytree(DATA / "modelopt-nvfp4", tmp_path / "model"))
    tensors = load_file(model_dir / "model.safetensors")
    save_file(tensors | {f"{DOWN}.pre_quant_scale": torch.ones(128)}, model_dir / "model.safetensors")
    with pytest.raises(ConfigurationError, match=r"down_proj\.pre_quant_scale multiplies the activations"):
        parameters(model_dir)


def test_files_that_end_early_are_refused(tmp_path: Path) -> None:
    model_dir = Path(shutil.copytree(DATA / "modelopt-nvfp4", tmp_path / "model"))
    whole = (model_dir / "model.safetensors").read_bytes()
    (model_dir / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(ConfigurationError, match=r"model\.safetensors is truncated"):
        parameters(model_dir)


def test_powers_of_two_may_have_a_type_of_their_own(tmp_path: Path) -> None:
    model_dir = Path(shutil.copytree(DATA / "mxfp4", tmp_path / "model"))
    tensors = load_file(model_dir / "model.safetensors")
    scales = tensors[f"{DOWN}.weight_scale"]
    save_file(tensors | {f"{DOWN}.weight_scale": scales.view(torch.float8_e8m0fnu)}, model_dir / "model.safetensors")
    found, wanted = (parameters(folder).take_linear("layers.0.down").weight for folder in (model_dir, DATA / "mxfp4"))
    assert torch.equal(found, wanted)
