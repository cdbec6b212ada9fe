"""auto-round, HQQ and torchao: what their descriptions mean, what runs, and what is refused with what to do."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint.tensors import open_checkpoint
from engine.loading.grouped_matrices import _with_minima
from engine.loading.load_runner import load_model_runner
from engine.loading.resolve import resolve
from engine.models.parameters import parameter_specs
from engine.models.read_config import load_decoder_config
from engine.quantized_formats.config import read_quantization
from engine.quantized_formats.matrix import QuantizedMatrix
from engine.quantized_formats.modules import find_module
from engine.quantized_formats.storage import MatrixStorage, Quantization
from engine.quantized_formats.unread import METHODS
from mesh.domain.errors import ConfigurationError
from tandem_cli.capacity.roofline import Device
from tandem_cli.main import main
from tests.component.arms import load_arm, settings
from tests.component.checkpoints import VOCAB_SIZE
from tests.component.parity import logprob_differences, run_mixed
from tests.component.weights.quantized import describe, of_torchao
from tests.component.weights.test_quantized import DATA, both, parameters

Tensors = dict[str, torch.Tensor]
DOWN = "model.layers.0.mlp.down_proj"
UP = "model.layers.0.mlp.up_proj"
HQQ: dict[str, Any] = {"nbits": 4, "group_size": 64, "axis": 1, "channel_wise": True, "view_as_float": False}


def described(folder: Path, quantization: dict[str, Any]) -> Quantization:
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    found = read_quantization(folder)
    assert found is not None
    return found


def with_vocabulary(made: str, folder: Path) -> Path:
    """A copy of a library's file with the tests' vocabulary."""
    shutil.copytree(DATA / made, folder)
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(2)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        numbers = 0.3 * torch.randn(VOCAB_SIZE, 64, generator=generator)
        tensors[name] = numbers.to(tensors[name].dtype)
    save_file(tensors, folder / "model.safetensors")
    facts = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(facts | {"vocab_size": VOCAB_SIZE}))
    return folder


def dequantised(model_dir: Path, folder: Path) -> Path:
    """The same model with the numbers that its file means, in fp32."""
    shutil.copytree(model_dir, folder)
    stored, tensors = open_checkpoint(model_dir), load_file(model_dir / "model.safetensors")
    quantization, twin = read_quantization(model_dir), Tensors()
    for spec in parameter_specs(load_decoder_config(model_dir)):
        for source in spec.sources:
            name, shape = source.name.removesuffix(".weight"), source.shape
            module = find_module(name, (shape[0], shape[1]), stored, quantization) if len(shape) == 2 else None
            whole = tensors[source.name] if module is None else module.read(tensors.__getitem__).dequantized()
            twin[source.name] = whole.float().contiguous()
    save_file(twin, folder / "model.safetensors")
    describe(folder, None)
    return folder


@pytest.mark.parametrize(
    ("made", "quantize"),
    [
        *((made, "int4") for made in ("auto-round", "auto-round-asymmetric", "auto-round-awq", "torchao-int4")),
        *((made, "int4") for made in ("gptq-v1-3-bits", "gptq-v2-2-bits")),
        *((made, "int4") for made in ("hqq-4-bits", "torchao-int4-plain")),
        ("hqq-mixed", "none"),
        ("torchao-w8a8", "int8"),
    ],
)
def test_files_of_the_libraries_run(tmp_path: Path, made: str, quantize: str) -> None:
    """In fp32 as the matrices that they mean; by default with activations rounded, if they are in int4 or W8A8."""
    model_dir = with_vocabulary(made, tmp_path / "model")
    expected = run_mixed(load_arm(dequantised(model_dir, tmp_path / "twin"), "cpu"))
    exact = run_mixed(load_arm(model_dir, "compiled", dtype="float32", quantize="none"))
    if quantize != "int8":
        assert logprob_differences(exact, expected)[1] < 1e-4
    assert resolve(settings(model_dir))[0].quantize == quantize
    mean, largest = logprob_differences(run_mixed(load_model_runner(settings(model_dir))), expected)
    assert mean < 0.06
    assert largest < 0.5
    assert (mean > 1e-4) == (quantize != "none")


def test_kinds_of_torchao_stay_as_they_are(tmp_path: Path) -> None:
    """int8 and fp8 of one file, as stored."""
    model_dir = with_vocabulary("torchao-mixed", tmp_path / "model")
    tensors = load_file(model_dir / "model.safetensors")
    in_int8, in_fp8 = (parameters(model_dir, encoding) for encoding in ("int8", "fp8"))
    qkv, o = in_int8.take_linear("layers.0.qkv"), in_fp8.take_linear("layers.0.o")
    assert torch.equal(qkv.weight[64:96], tensors["model.layers.0.self_attn.k_proj._weight_qdata"])
    assert o.encoding == "fp8"
    theirs = tensors["model.layers.0.self_attn.o_proj._weight_qdata"]
    assert torch.equal(o.weight.view(torch.uint8), theirs.view(torch.uint8))
    twin = dequantised(model_dir, tmp_path / "twin")
    runs = [run_mixed(load_arm(folder, "compiled", dtype="float32")) for folder in (model_dir, twin)]
    assert logprob_differences(*runs)[1] < 1e-4


def test_real_zeros_become_minima_of_smaller_groups() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(0, 16, (16, 128), dtype=torch.uint8, generator=generator)
    scales, zeros = torch.rand(16, 2, generator=generator), 15 * torch.rand(16, 2, generator=generator)
    matrix = QuantizedMatrix(values, scales, zeros)
    made = _with_minima([matrix], 32)
    assert made.scales is not None
    assert made.minima is not None
    scales, minima = (numbers.repeat_interleave(32, 1) for numbers in (made.scales, made.minima))
    torch.testing.assert_close(made.weight.float() * scales - minima, matrix.dequantized(), rtol=0.0, atol=1e-5)


def test_partitions_and_plans_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model_dir, out = with_vocabulary("auto-round", tmp_path / "model"), tmp_path / "out"
    assert main(["partition", str(model_dir), str(out)]) == 0
    runs = [run_mixed(load_arm(folder, "compiled")) for folder in (model_dir, out)]
    assert logprob_differences(*runs) == (0.0, 0.0)
    capsys.readouterr()
    machine = Device("this machine", 1e9, 1e10, dict.fromkeys(("float32", "int8"), 1e12), "made up")
    monkeypatch.setattr("tandem_cli.capacity.measurement.probe", lambda _: machine)
    assert main(["plan", "--json", "--input-tokens=64", "--output-tokens=32", str(model_dir)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["quantized_checkpoint"] == "auto-round auto_round:auto_gptq, 2 and 4 and 8 bits"
    assert found["precision"]["weights"] == "int4"


@pytest.mark.parametrize(
    ("facts", "form", "minus_one"),
    [
        ({}, "gptq", True),
        ({"packing_format": "auto_round:auto_gptq"}, "gptq", True),
        ({"packing_format": "auto_round:gptq"}, "gptq", True),
        ({"packing_format": "auto_round:gptqmodel"}, "gptq", False),
        ({"packing_format": "auto_round"}, "gptq", False),
        ({"packing_format": "auto_round:auto_awq"}, "awq", False),
        ({"backend": "auto"}, "gptq", True),
        ({"backend": "autoround:exllamav2"}, "gptq", False),
        ({"backend": "auto_round:gptq:exllamav2", "quant_method": "intel/auto-round"}, "gptq", True),
    ],
)
def test_packings_of_auto_round(tmp_path: Path, facts: dict[str, Any], form: str, *, minus_one: bool) -> None:
    found = described(tmp_path, {"quant_method": "auto-round", "bits": 4, "group_size": 64} | facts).storage_of("a.b")
    assert found == MatrixStorage(
        "awq" if form == "awq" else "gptq", 4, block_inputs=64, is_symmetric=True, zeros_minus_one=minus_one
    )


def test_modules_of_auto_round_have_storages_of_their_own(tmp_path: Path) -> None:
    extra = {
        "model.layers.0.mlp.gate": {"bits": 16, "data_type": "float"},
        "model.layers.1.mlp.down_proj": {"bits": 8, "group_size": -1, "sym": False},
        r".*experts\.\d+\.up_proj": {"bits": 2},
        "lm_head": {"bits": 4, "group_size": 32},
    }
    facts = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True, "extra_config": extra}
    quantization = described(tmp_path, facts)

    def sizes(module: str) -> tuple[int, int, bool] | None:
        found = quantization.storage_of(module)
        return None if found is None else (found.num_bits, found.block_inputs, found.is_symmetric)

    assert sizes("model.layers.0.mlp.gate") is None
    assert sizes("model.layers.0.mlp.gate_proj") == (4, 128, True)
    assert sizes("model.layers.1.mlp.down_proj") == (8, 0, False)
    assert sizes("model.layers.0.mlp.experts.12.up_proj") == (2, 128, True)
    assert sizes("lm_head") == (4, 32, True)


def test_kinds_of_hqq_and_torchao_have_storages_of_their_own(tmp_path: Path) -> None:
    kinds = {"self_attn.q_proj": HQQ | {"axis": 0}, "mlp.experts.up_proj": HQQ | {"nbits": 8, "group_size": None}}
    quantization = described(
        tmp_path,
        {"quant_method": "hqq", "quant_config": {tag: {"weight_quant_params": facts} for tag, facts in kinds.items()}},
    )
    q, up = (
        quantization.storage_of(f"model.layers.3.{name}") for name in ("self_attn.q_proj", "mlp.experts.7.up_proj")
    )
    assert q is not None
    assert up is not None
    assert (q.num_bits, q.block_rows, q.block_inputs) == (4, 64, 1)
    assert (up.num_bits, up.block_rows, up.block_inputs) == (8, 1, 0)
    assert quantization.storage_of("model.layers.3.self_attn.q_proj_a") is None

    int8, fp8 = (
        of_torchao(kind)["quant_type"]["default"] for kind in ("Int8WeightOnlyConfig", "Float8WeightOnlyConfig")
    )
    named = {"_default": int8, "lm_head": None, r"re:.*\.up_proj\.weight": fp8}
    quantization = described(tmp_path, of_torchao("FqnToConfig", fqn_to_config=named))
    found = [quantization.storage_of(name) for name in ("a.q_proj", "a.up_proj", "a.up_proj_b", "lm_head")]
    assert [storage and storage.is_float for storage in found] == [False, True, False, None]


def test_thousands_of_targets_are_looked_up_fast(tmp_path: Path) -> None:
    modules = [f"model.layers.1.mlp.experts.{expert}.up_proj" for expert in range(300)]
    layers = {f"*.layers.{layer}.mlp.experts.?.*": {"weight": None} for layer in range(1000)}
    fp8 = {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}}
    facts = {"quant_method": "quark", "global_quant_config": fp8, "layer_quant_config": layers}
    started = time.process_time()
    quantization = described(tmp_path, facts | {"exclude": [f"*.experts.{100 + number}.*" for number in range(1000)]})
    quantised = [module for module in modules if quantization.storage_of(module) is not None]
    assert quantised == modules[10:100]
    assert time.process_time() - started < 5


def drop(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def put(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: change(tensors[name])})


@pytest.mark.parametrize(
    ("made", "damage", "words"),
    [
        (
            "hqq-4-bits",
            drop(f"{DOWN}.zero"),
            r"down_proj\.W_q cannot be read without .*down_proj\.zero, which is missing",
        ),
        (
            "hqq-4-bits",
            put(f"{DOWN}.W_q", lambda q: q[1:]),
            r"W_q has shape \[127, 32\], config\.json implies \[128, 32\]",
        ),
        (
            "hqq-4-bits",
            put(f"{DOWN}.W_q", torch.Tensor.int),
            r"W_q has dtype I32, which its format stores as U8 or F32",
        ),
        ("hqq-4-bits", put(f"{DOWN}.nbits", lambda n: n * 2), r"down_proj: its nbits is 8, config\.json implies 4"),
        ("hqq-4-bits", put(f"{DOWN}.shape", lambda n: n.flip(0)), r"its shape is \[128, 64\], .* implies \[64, 128\]"),
        ("hqq-4-bits", put(f"{DOWN}.quant_zero", lambda n: n + 1), r"its quant_zero is 1, config\.json implies 0"),
        (
            "hqq-mixed",
            put(f"{UP}.W_q", lambda q: q[:, :128]),
            r"up_proj: its W_q has .* config\.json implies",
        ),
        (
            "hqq-4-bits",
            both(put(f"{DOWN}.zero", lambda zero: zero / 0), drop("model.norm.weight")),
            r"model\.norm\.weight is missing",
        ),
        ("hqq-4-bits", put(f"{DOWN}.zero", lambda zero: zero / 0), r"down_proj are NaN or infinite"),
        (
            "torchao-int4",
            drop(f"{DOWN}._weight_scale"),
            r"without .*\.weight_scale or .*\._weight_scale, which is missing",
        ),
        ("torchao-int4", put(f"{DOWN}._weight_qdata", lambda q: q * 3), r"which 4 bits do not hold"),
        ("torchao-int4", put(f"{DOWN}._weight_zero_point", lambda z: z + 1), r"its zero points are not all 0"),
        (
            "torchao-int4",
            lambda tensors: tensors.update({f"{DOWN}._weight_act_pre_scale": torch.ones(128)}),
            r"down_proj: its inputs must be multiplied by act_pre_scale, which is not supported",
        ),
        (
            "torchao-int4",
            lambda tensors: tensors.update({f"{DOWN}.weight:qdata": tensors.pop(f"{DOWN}._weight_qdata")}),
            r"down_proj\.weight:qdata is named as by torchao 0\.14, .*: save the model again with torchao 0\.15",
        ),
        ("torchao-int4-plain", put(f"{DOWN}._weight_scale", lambda s: s.t()), r"_weight_scale has shape \[64, 4\]"),
        ("torchao-w8a8", put(f"{DOWN}._weight_qdata", torch.Tensor.short), r"_weight_qdata has dtype I16"),
        ("gptq-v1-3-bits", put(f"{DOWN}.qweight", lambda q: q[:-1]), r"qweight has shape \[11, 64\].* \[12, 64\]"),
    ],
)
def test_broken_files_are_refused(tmp_path: Path, made: str, damage: Callable[[Tensors], object], words: str) -> None:
    model_dir = Path(shutil.copytree(DATA / made, tmp_path / "model"))
    tensors = load_file(model_dir / "model.safetensors")
    damage(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, model_dir / "model.safetensors")
    with pytest.raises(ConfigurationError, match=words):
        parameters(model_dir).read_all()


def test_files_cut_off_are_refused(tmp_path: Path) -> None:
    model_dir = Path(shutil.copytree(DATA / "hqq-4-bits", tmp_path / "model"))
    path = model_dir / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ConfigurationError, match="is truncated"):
        parameters(model_dir)


def auto_round(**facts: object) -> dict[str, Any]:
    return {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True} | facts


def hqq(**facts: object) -> dict[str, Any]:
    return {"quant_method": "hqq", "quant_config": {"weight_quant_params": HQQ | facts}}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            auto_round(packing_format="auto_round:llm_compressor"),
            "packing_format 'auto_round:llm_compressor' is not supp",
        ),
        (
            auto_round(packing_format=7),
            "packing_format 7 is not supported; supported: auto_round, auto_round:auto_gptq",
        ),
        (auto_round(bits=5), "auto-round: bits 5 is not supported; supported: 2, 3, 4, 8"),
        (auto_round(bits=2, packing_format="auto_round:auto_awq"), "bits 2 is not supported; supported: 4"),
        (auto_round(data_type="mx_fp"), "data_type 'mx_fp' is not supported; supported: int"),
        (auto_round(act_bits=8), "act_bits 8 is not supported; supported: 16, 32"),
        (auto_round(rotation_config={"a": 1}), "rotation_config is not supported"),
        (auto_round(extra_config=["lm_head"]), r"extra_config must be an object, got \['lm_head'\]"),
        (auto_round(extra_config={"(": {}}), r"extra_config: .* is no regular expression"),
        (auto_round(extra_config={"lm_head": 4}), "lm_head must be an object, got 4"),
        (auto_round(group_size=0), "group_size must be > 0"),
        ({"quant_method": "hqq"}, "hqq: quant_config must be an object, got None"),
        (hqq(nbits=1.58), "nbits 1.58 is not supported; supported: 8, 4, 3, 2, 1"),
        (hqq(axis=2), "axis 2 is not supported; supported: 0, 1"),
        (hqq(channel_wise=False), "channel_wise False is not supported; supported: True"),
        (
            {"quant_method": "hqq", "quant_config": {"weight_quant_params": HQQ, "zero_quant_params": {"nbits": 8}}},
            "zero_quant_params .* is not supported; supported: None",
        ),
        (
            {"quant_method": "torchao", "quant_type": "int8_weight_only"},
            "quant_type 'int8_weight_only' is not supported",
        ),
        (
            of_torchao("UIntXWeightOnlyConfig"),
            "class 'UIntXWeightOnlyConfig' is not supported; supported: Int8WeightOnly",
        ),
        (
            of_torchao("Int4WeightOnlyConfig", group_size=64, int4_packing_format="tile_packed_to_4d"),
            "int4_packing_format 'tile_packed_to_4d' is not supported; supported: plain: others have the order",
        ),
        (of_torchao("Int4WeightOnlyConfig", group_size=64), "int4_packing_format None is not supported"),
        (
            of_torchao("IntxWeightOnlyConfig", intx_packing_format="OPAQUE_ATEN_KLEIDIAI"),
            "intx_packing_format 'opaque_aten_kleidiai' is not supported; supported: unpacked_to_int8",
        ),
        (
            of_torchao("Int8WeightOnlyConfig", granularity={"_type": "PerToken", "_data": {}}),
            "granularity .*PerToken.* is not supported; supported: PerRow",
        ),
        (
            of_torchao("Float8WeightOnlyConfig", weight_dtype={"_data": "float8_e4m3fnuz"}),
            "weight_dtype 'float8_e4m3fnuz' is not supported",
        ),
    ],
)
def test_descriptions_are_refused(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        described(tmp_path, config)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ("hqq-4-bits", "groups of 40 do not divide its 64 inputs"),
        ("hqq-axis-0", "groups of 40 do not divide its 64 outputs"),
        ("torchao-int4-plain", "groups of 40 do not divide its 64 inputs"),
    ],
)
def test_groups_that_do_not_divide_a_matrix_are_refused(tmp_path: Path, made: str, words: str) -> None:
    model_dir = Path(shutil.copytree(DATA / made.replace("axis-0", "4-bits"), tmp_path / "model"))
    in_torchao = of_torchao("Int4WeightOnlyConfig", group_size=40, int4_packing_format="plain")
    describe(
        model_dir, in_torchao if made.startswith("torchao") else hqq(group_size=40, axis=int(made == "hqq-4-bits"))
    )
    with pytest.raises(ConfigurationError, match=words):
        parameters(model_dir)


UNREAD: dict[str, tuple[str, ...]] = {
    "quanto": ("weight._data", "weight._scale", "input_scale", "output_scale"),
    "eetq": ("qweight", "weight_scales"),
    "aqlm": ("codes", "codebooks", "scales"),
    "vptq": ("indices", "centroids.weight", "weight_scale", "weight_bias"),
    "spqr": ("dense_weights", "row_offsets", "col_vals", "in_perm"),
    "higgs": ("weight", "scales", "tables", "tables2"),
    "fp_quant": ("qweight", "scales", "forward_hadamard_matrix"),
    "sinq": ("W_q",),
}
"""The tensors of a module in formats that are not read."""


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("is_described", [True, False])
def test_formats_that_are_not_read_say_what_to_do(
    checkpoint: Callable[[str], Path], tmp_path: Path, method: str, *, is_described: bool
) -> None:
    model_dir = Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
    tensors = load_file(model_dir / "model.safetensors")
    tensors.pop(f"{UP}.weight")
    tensors |= {f"{UP}.{part}": torch.zeros(4, dtype=torch.int16) for part in UNREAD[method]}
    save_file(tensors, model_dir / "model.safetensors")
    describe(model_dir, {"quant_method": method} if is_described else None)
    words = rf"{UP}\.\S+ is of quant_method {method}, which is not supported: .*serve the original checkpoint"
    if is_described:
        words = rf"config\.json: quant_method {method} is not supported: .*serve the original checkpoint"
    elif method == "sinq":
        words = r"W_q is quantised, but config\.json has no quantization_config"
    with pytest.raises(ConfigurationError, match=words):
        load_model_runner(settings(model_dir))


def test_pickles_of_torchao_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model_dir = tmp_path / "model"
    model_dir.mkdir()
    shutil.copy(DATA / "torchao-w8a8" / "config.json", model_dir)
    (model_dir / "pytorch_model.bin").write_bytes(b"a pickle")
    words = r"pytorch_model\.bin has tensors of torchao .* and is not read: save the model again with transformers 5"
    with pytest.raises(ConfigurationError, match=words):
        load_model_runner(settings(model_dir))
    assert main(["convert", str(model_dir), str(tmp_path / "out")]) != 0
    assert "has tensors of torchao in a format that can run code" in capsys.readouterr().err
