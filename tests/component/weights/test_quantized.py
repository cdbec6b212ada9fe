"""Quantised checkpoints: what libraries wrote, what each form means to a model, int8 as stored, and what is refused."""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

from checkpoint.partition_manifest import read_partition
from checkpoint.tensors import open_checkpoint
from engine.loading.load_runner import load_model_runner
from engine.loading.resolve import fingerprint, resolve
from engine.loading.stored_parameters import stored_name
from engine.loading.weights import WeightsTarget, load_weights
from engine.models.encodings import Parameters
from engine.models.parameters import parameter_specs
from engine.models.read_config import load_decoder_config
from engine.models.rounding import round_to_int8
from engine.quantized_formats.config import read_quantization
from engine.quantized_formats.modules import find_module
from engine.runner_settings import RunnerSettings
from mesh.domain.errors import ConfigurationError
from mesh.domain.kv import Span
from tandem_cli.capacity.roofline import Device
from tandem_cli.main import main
from tests.component.arms import load_arm, settings
from tests.component.checkpoints import VOCAB_SIZE
from tests.component.multimodal import build_multimodal
from tests.component.parity import logprob_differences, run_mixed
from tests.component.weights.quantized import FORMS, describe, quantize_checkpoint, quantized_once, twin_of
from tests.parity import run_quantized

DATA = Path(__file__).parents[2] / "data" / "quantized"
CPU = torch.device("cpu")
DOWN = "model.layers.1.mlp.down_proj"

Quantized = Callable[[str, str], Path]


@pytest.fixture(scope="session")
def quantized(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Quantized:
    """`quantized(family, form)` is the folder of that checkpoint."""
    return lambda family, form: quantized_once(tmp_path_factory, checkpoint(family), form)


@pytest.fixture
def broken(quantized: Quantized, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a Llama in that form, which a test may break."""
    return lambda form: Path(shutil.copytree(quantized("llama", form), tmp_path / "model"))


def parameters(model_dir: Path, encoding: str = "float", dtype: torch.dtype = torch.float32) -> Parameters:
    specs = parameter_specs(load_decoder_config(model_dir))
    return load_weights(model_dir, specs, WeightsTarget(CPU, dtype, encoding))


def digest(tensor: torch.Tensor) -> str:
    return hashlib.blake2b(tensor.contiguous().view(torch.uint8).numpy().tobytes(), digest_size=16).hexdigest()


@pytest.mark.parametrize("made", sorted(path.parent.name for path in DATA.glob("*/expected.json")))
def test_numbers_are_those_of_the_library_that_wrote_the_file(made: str) -> None:
    stored, tensors = open_checkpoint(DATA / made), load_file(DATA / made / "model.safetensors")
    expected: dict[str, dict[str, str]] = json.loads((DATA / made / "expected.json").read_text())
    quantization = read_quantization(DATA / made)
    shapes = {
        source.name.removesuffix(".weight"): source.shape
        for spec in parameter_specs(load_decoder_config(DATA / made))
        for source in spec.sources
    }
    assert len(expected) == 2, "in fp32 and in the dtype of the file"
    for dtype, digests in expected.items():
        assert len(digests) == 7
        for name, theirs in digests.items():
            module = find_module(name, (shapes[name][0], shapes[name][1]), stored, quantization)
            assert module is not None
            ours = module.read(tensors.__getitem__).dequantized().to(getattr(torch, dtype))
            assert digest(ours) == theirs, f"{name} in {dtype}"
    parameters(DATA / made, dtype=torch.bfloat16).read_all()


@pytest.mark.parametrize(
    ("family", "form"),
    [
        *product(["llama-biases", "gpt2", "falcon-40b", "mixtral"], [form for form in FORMS if form != "w8a8"]),
        ("llama4", "w4a16"),
    ],
)
def test_weights_are_those_that_the_file_means(quantized: Quantized, family: str, form: str) -> None:
    model_dir = quantized(family, form)
    ours, theirs = parameters(model_dir), parameters(twin_of(model_dir))
    for spec in parameter_specs(load_decoder_config(model_dir)):
        if spec.is_matrix:
            assert torch.equal(*(loaded.take_linear(spec.name).weight for loaded in (ours, theirs))), spec.name


def stack_experts(model_dir: Path, out: Path, end: str, *, is_transposed: bool) -> Path:
    """A copy of a checkpoint in fp8 whose experts are stacked, and so are their scales, whose names have this `end`.
    Returns `out`.
    """
    shutil.copytree(model_dir, out)
    tensors, stacks = load_file(out / "model.safetensors"), dict[str, dict[int, list[str]]]()
    for source in (source for spec in parameter_specs(load_decoder_config(out)) for source in spec.sources):
        if source.stack is not None:
            module = stored_name(source.name, open_checkpoint(out)).removesuffix(".weight")
            stacks.setdefault(source.stack.name, {}).setdefault(source.stack.member, []).append(module)
    for name, members in stacks.items():
        for kind, stacked in (("weight", name), ("weight_scale", name.removesuffix(".weight") + end)):
            kind = kind if kind == "weight" or f"{members[0][0]}.{kind}" in tensors else f"{kind}_inv"
            whole = torch.stack([torch.cat([tensors.pop(f"{m}.{kind}") for m in own]) for own in members.values()])
            tensors[stacked] = whole.transpose(1, 2).contiguous() if is_transposed else whole
    save_file(tensors, out / "model.safetensors")
    return out


@pytest.mark.parametrize(
    ("family", "form", "end", "is_transposed"),
    [
        ("granite-moe", "fp8", ".weight_scale_inv", False),
        ("qwen3.5-moe", "fp8", "_scale_inv", False),
        ("qwen3_vl_moe", "fp8-channels", "_scale", True),
    ],
)
def test_experts_in_fp8_may_be_stacked(
    quantized: Quantized, tmp_path: Path, family: str, form: str, end: str, is_transposed: bool
) -> None:
    if family == "qwen3_vl_moe":
        model_dir = quantize_checkpoint(build_multimodal(family, tmp_path / "float"), tmp_path / "apart", form)
    else:
        model_dir = quantized(family, form)
    ours = parameters(stack_experts(model_dir, tmp_path / "stacked", end, is_transposed=is_transposed))
    theirs = parameters(model_dir)
    for spec in parameter_specs(load_decoder_config(model_dir)):
        if spec.is_matrix:
            assert torch.equal(*(loaded.take_linear(spec.name).weight for loaded in (ours, theirs))), spec.name


@pytest.mark.parametrize("family", ["llama", "gpt2"])
async def test_models_say_what_transformers_says(tmp_path: Path, family: str) -> None:
    row, is_ok = await run_quantized(family, tmp_path / family)
    assert is_ok, row
    assert row.count("30 tokens, all equal") >= 4


def test_ranks_take_their_part(quantized: Quantized) -> None:
    """Rows and inputs of a matrix whose groups are in the order of activations."""
    model_dir = quantized("llama", "w4a16-order")
    specs = {spec.name: spec for spec in parameter_specs(load_decoder_config(model_dir))}
    part = replace(specs["layers.0.down"], held_inputs=Span(32, 32), held_rows=np.arange(8, 40))
    target = WeightsTarget(CPU, torch.float32)
    others = [spec for spec in specs.values() if spec.name != part.name]
    ours = load_weights(model_dir, [*others, part], target).take_linear(part.name).weight
    assert torch.equal(ours, parameters(twin_of(model_dir)).take_linear(part.name).weight[8:40, 32:64])


def test_int8_is_taken_as_stored(quantized: Quantized) -> None:
    model_dir = quantized("qwen2", "w8a8")
    stored, ours = load_file(model_dir / "model.safetensors"), parameters(model_dir, "int8")
    down = ours.take_linear("layers.1.down")
    assert torch.equal(down.weight, stored[f"{DOWN}.weight"])
    assert int(down.weight.min()) == -128
    assert down.scales is not None
    assert torch.equal(down.scales, stored[f"{DOWN}.weight_scale"][:, 0])


def test_parts_that_are_not_int8_are_rounded(broken: Callable[[str], Path]) -> None:
    model_dir = broken("w8a8")
    name = "model.layers.0.mlp.up_proj"
    path = model_dir / "model.safetensors"
    tensors = load_file(path)
    tensors[f"{name}.weight"] = tensors[f"{name}.weight"] * tensors.pop(f"{name}.weight_scale") * 3
    save_file(tensors, path)
    gate_up = parameters(model_dir, "int8").take_linear("layers.0.gate_up")
    rounded, scales = round_to_int8(tensors[f"{name}.weight"])
    assert gate_up.scales is not None
    assert torch.equal(gate_up.weight[96:], rounded)
    assert torch.equal(gate_up.scales[96:], scales)
    assert torch.equal(gate_up.weight[:96], tensors["model.layers.0.mlp.gate_proj.weight"])


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_w8a8_runs_in_int8(quantized: Quantized, family: str) -> None:
    model_dir = quantized(family, "w8a8")
    assert resolve(RunnerSettings(model_dir))[0].quantize == "int8"
    assert resolve(RunnerSettings(model_dir, dtype="bfloat16"))[0].quantize == "none"
    if family == "llama":
        usual = load_arm(model_dir, "compiled")
        assert usual.kv_cache.layout.dtype == "int8"
        assert usual.kv_cache.layout == load_arm(model_dir, "compiled", quantize="int8").kv_cache.layout
    exact = run_mixed(load_arm(twin_of(model_dir), "cpu"))
    mean, largest = logprob_differences(run_mixed(load_model_runner(settings(model_dir))), exact)
    assert 0 < mean < 0.06
    assert largest < 0.5


def test_every_form_is_another_model(quantized: Quantized, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    folders = [quantized("llama", form) for form in FORMS]
    folders += [checkpoint("llama"), twin_of(folders[0])]
    prints = [fingerprint(folder) for folder in folders]
    prints += [fingerprint(folders[0], arithmetic="int8"), fingerprint(folders[0], "dummy")]
    # Equal tensors, which version 2 reads in another way.
    version_2 = Path(shutil.copytree(quantized("llama", "gptq"), tmp_path / "version-2"))
    describe(version_2, {**FORMS["gptq"].config, "checkpoint_format": "gptq_v2"})
    prints.append(fingerprint(version_2))
    assert len(set(prints)) == len(prints)


@pytest.mark.parametrize(("form", "quantize"), [("w8a8", "int8"), ("awq", "none")])
def test_partitions_hold_them(
    quantized: Quantized, tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str, quantize: str
) -> None:
    model_dir, out = quantized("llama", form), tmp_path / "out"
    alone = load_arm(model_dir, "compiled")
    assert main(["partition", str(model_dir), str(out)]) == 0
    partition = read_partition(out)
    assert partition is not None
    assert partition.quantize == quantize
    runner = load_arm(out, "compiled")
    assert runner.kv_cache.layout == alone.kv_cache.layout
    assert [run.tokens for run in run_mixed(runner)] == [run.tokens for run in run_mixed(alone)]
    assert main(["partition", "--reuse", str(model_dir), str(out)]) == 0
    assert capsys.readouterr().out.endswith("holds this partition\n")


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine is not measured."""
    rates = dict.fromkeys(("float32", "int8"), 1e12)
    machine = Device("this machine", 1e9, 1e10, rates, "made up")
    monkeypatch.setattr("tandem_cli.capacity.measurement.probe", lambda _: machine)


@pytest.mark.usefixtures("probed")
def test_plans_list_what_workers_take(checkpoint: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    model = str(checkpoint("opt-350m"))  # for the eager decoder
    assert main(["plan", "--json", model]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert [(row["weights"], row["kv"]) for row in found["memory"]] == [
        ("float32", "float32"),
        ("bfloat16", "bfloat16"),
        ("int8", "int8"),
    ]
    assert list(found["refused"]) == ["int4", "fp8"]
    assert main(["plan", "--quantize=int4", model]) == 2
    assert found["refused"]["int4"] in capsys.readouterr().err
    assert main(["plan", model]) == 0
    assert "not in int4: quantize=int4 is for the compiled decoder" in capsys.readouterr().out


@pytest.mark.usefixtures("probed")
def test_plans_know_what_is_loaded(quantized: Quantized, capsys: pytest.CaptureFixture[str]) -> None:
    def plan(form: str, *flags: str) -> dict[str, Any]:
        capsys.readouterr()
        assert main(["plan", "--json", *flags, str(quantized("llama", form))]) == 0
        made: dict[str, Any] = json.loads(capsys.readouterr().out)
        return made

    layers = 3 * (4 * 64 * 64 + 3 * 64 * 96)
    for form, itemsize, about in (("w8a8", 1, "compressed-tensors int-quantized, 8 bits"), ("awq", 4, "awq, 4 bits")):
        numbers = ("--memory=16", "--bandwidth=100", "--flops=10")
        here = plan(form)
        assert here["quantized_checkpoint"] == about
        matrices, rest = layers + VOCAB_SIZE * 64, VOCAB_SIZE * 64 + 7 * 64
        assert here["memory"][0]["weights_bytes"] == matrices * itemsize + rest * 4
        elsewhere = plan(form, *numbers, "--dtype=float16")
        assert elsewhere["precision"]["weights"] == "float16"
    assert main(["plan", str(quantized("llama", "awq"))]) == 0
    assert "the checkpoint is quantised (awq, 4 bits): its matrices are loaded as float32" in capsys.readouterr().out


Tensors = dict[str, torch.Tensor]


def drop(part: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(f"{DOWN}.{part}")


def put(part: str, change: Callable[[Tensors], torch.Tensor]) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({f"{DOWN}.{part}": change(tensors)})


def replaced(part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], object]:
    return put(part, lambda tensors: change(tensors[f"{DOWN}.{part}"]))


def both(first: Callable[[Tensors], object], second: Callable[[Tensors], object]) -> Callable[[Tensors], object]:
    return lambda tensors: (first(tensors), second(tensors))


@pytest.mark.parametrize(
    ("form", "damage", "words"),
    [
        ("awq", drop("scales"), r"down_proj\.qweight cannot be read without .*down_proj\.scales, which is missing"),
        ("awq", drop("qzeros"), r"without .*down_proj\.qzeros, which is missing"),
        ("gptq-8-order", drop("g_idx"), r"without .*down_proj\.g_idx, which is missing"),
        ("gptq-8-order", replaced("g_idx", lambda index: index + 9), r"down_proj: its index names groups 9 to 14"),
        ("w8a8", drop("weight_scale"), r"without .*weight_scale or .*weight_scale_inv, which is missing"),
        *(
            (
                form,
                put(
                    "weight_zero_point",
                    lambda tensors: torch.ones_like(tensors[f"{DOWN}.weight_scale"]).to(
                        tensors[f"{DOWN}.weight"].dtype
                    ),
                ),
                "down_proj: its zero points are not all 0, and config.json says that it is symmetric",
            )
            for form in ("w8a8", "fp8-channels")
        ),
        ("w8a8", both(drop("weight_scale"), replaced("weight", torch.Tensor.float)), None),
        *(
            (form, replaced("weight", torch.Tensor.bfloat16), rf"down_proj\.weight has dtype BF16, and .*\.{scales} is")
            for form, scales in (
                ("w8a8", "weight_scale"),
                ("fp8", "weight_scale_inv"),
                ("fp8-channels", "weight_scale"),
            )
        ),
        ("gptq", replaced("g_idx", torch.zeros_like), r"down_proj: its index names 1 of its 6 groups"),
        (
            "gptq",
            replaced("qzeros", lambda zeros: zeros + 0x11111111),
            r'its zeros are 9, .* implies 8 \(sym\): .*; set checkpoint_format to "gptq_v2"',
        ),
        (
            "w4a16-order",
            replaced("weight_zero_point", lambda zeros: zeros.to(torch.int8)),
            r"weight_zero_point has shape \[8, 6\], which is that of zeros packed in int32",
        ),
        (
            "w4a16-order",
            put("weight_zero_point", lambda tensors: torch.zeros(64, 6, dtype=torch.int32)),
            r"weight_zero_point has shape \[64, 6\], which is that of zeros in int8",
        ),
        ("w8a8", replaced("weight", lambda weight: weight.to(torch.int16)), r"down_proj\.weight has dtype I16, which"),
        ("w4a16-order", drop("weight_zero_point"), r"without .*weight_zero_point, which is missing"),
        (
            "w4a16",
            replaced("weight_scale", lambda scales: scales[:, 1:]),
            r"weight_scale has shape \[64, 5\].*\[64, 6\]",
        ),
        ("w4a16", replaced("weight_packed", lambda packed: packed[:, 1:]), r"weight_packed has shape \[64, 11\]"),
        (
            "w4a16",
            put("weight_shape", lambda tensors: torch.tensor([64, 95])),
            r"down_proj: its weight_shape says \[64, 95\], config\.json implies \[64, 96\]",
        ),
        ("fp8", replaced("weight_scale_inv", lambda scales: scales.int()), r"weight_scale_inv has dtype I32.* F32 or"),
        ("fp8", replaced("weight_scale_inv", lambda scales: scales * torch.nan), r"down_proj are NaN or infinite"),
        ("w8a8", replaced("weight_scale", lambda scales: scales / 0), r"weight_scale are NaN or infinite"),
        ("awq", put("weight", lambda tensors: torch.ones(64, 96)), r"down_proj\.weight is there beside .*qweight"),
        (
            "w4a16",
            lambda tensors: tensors.update({f"{DOWN}.qweight": tensors.pop(f"{DOWN}.weight_packed")}),
            r"down_proj\.qweight is not in the format that config\.json names \(compressed-tensors pack-quantized",
        ),
    ],
)
def test_broken_files_are_refused(
    broken: Callable[[str], Path], form: str, damage: Callable[[Tensors], object], words: str | None
) -> None:
    model_dir = broken(form)
    path = model_dir / "model.safetensors"
    tensors = load_file(path)
    damage(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    encoding = "int8" if form == "w8a8" else "float"
    if words is None:  # a float matrix among int8 ones
        parameters(model_dir, encoding).read_all()
        return
    with pytest.raises(ConfigurationError, match=words):
        parameters(model_dir, encoding).read_all()


@pytest.mark.parametrize(
    ("form", "scale", "encoding"),
    [
        *(("fp8", "weight_scale_inv", encoding) for encoding in ("fp8", "float")),
        *(("w8a8", "weight_scale", encoding) for encoding in ("int8", "float")),
        ("w4a16", "weight_scale", "float"),
    ],
)
def test_scales_whose_numbers_fp32_does_not_hold_are_refused(
    broken: Callable[[str], Path], form: str, scale: str, encoding: str
) -> None:
    model_dir = broken(form)
    tensors = load_file(model_dir / "model.safetensors")
    tensors[f"{DOWN}.{scale}"] = tensors[f"{DOWN}.{scale}"].float()
    tensors[f"{DOWN}.{scale}"][0, 0] = 3e38
    save_file(tensors, model_dir / "model.safetensors")
    with pytest.raises(ConfigurationError, match=r"down_proj are NaN or infinite: the checkpoint is broken"):
        parameters(model_dir, encoding).read_all()


@pytest.mark.parametrize("form", ["gptq", "w8a8", "fp8"])
def test_a_description_without_quantised_tensors_is_refused(
    checkpoint: Callable[[str], Path], tmp_path: Path, form: str
) -> None:
    model_dir = tmp_path / form
    shutil.copytree(checkpoint("llama"), model_dir)
    describe(model_dir, changed(form))
    with pytest.raises(ConfigurationError, match=r"no matrix is quantised, though config\.json says so"):
        load_model_runner(settings(model_dir))
    describe(model_dir, None)
    load_model_runner(settings(model_dir))


def changed(form: str, **changes: object) -> dict[str, Any]:
    return json.loads(json.dumps(FORMS[form].config)) | changes


def grouped(form: str, **changes: object) -> dict[str, Any]:
    config = changed(form)
    config["config_groups"]["group_0"]["weights"] |= changes
    return config


def targeting(*targets: object) -> dict[str, Any]:
    config = changed("w4a16")
    config["config_groups"]["group_0"]["targets"] = list(targets)
    return config


@pytest.mark.parametrize(
    ("form", "config", "words"),
    [
        ("awq", None, r"qweight is quantised, but config\.json has no quantization_config"),
        ("awq", {"quant_method": "exl2"}, "quant_method 'exl2' is not supported; supported: awq, gptq"),
        ("awq", {"quant_method": ["awq"]}, "is not supported"),
        ("awq", changed("awq", bits=3), "awq: bits 3 is not supported; supported: 4"),
        ("awq", changed("awq", version="gemv"), "version 'gemv' is not supported; supported: gemm"),
        ("awq", changed("awq", version=None, format="gemv"), "format 'gemv' is not supported; supported: gemm"),
        ("awq", changed("awq", group_size=40), r"down_proj\.qweight|groups of 40 do not divide its 64 inputs"),
        ("awq", changed("awq", group_size=0), "group_size must be > 0, or -1"),
        ("awq", changed("awq", group_size=-1), r"qzeros has shape \[4, 8\], config\.json implies \[1, 8\]"),
        ("awq", changed("gptq"), r"qweight has shape \[64, 8\], config\.json implies \[8, 64\]"),
        ("gptq", changed("gptq", bits=5), "bits 5 is not supported; supported: 2, 3, 4, 8"),
        ("gptq", changed("gptq", checkpoint_format="marlin"), "checkpoint_format 'marlin' is not supported"),
        ("gptq", changed("gptq", is_marlin_format=True), "is_marlin_format is not supported"),
        (
            "gptq",
            changed("gptq", dynamic={"-:.*q_proj": {}}),
            r"says that .*q_proj is not \(gptq, 4 bits\)",
        ),
        ("w4a16", changed("w4a16", format="marlin-24"), "format 'marlin-24' is not supported"),
        ("w4a16", changed("w4a16", ignore=["re:.*q_proj"]), r"config\.json says that .*q_proj is not"),
        ("w4a16", changed("w4a16", ignore=["re:*q_proj"]), r"ignore: 're:\*q_proj' is no regular expression: nothing"),
        ("w4a16", changed("w4a16", ignore=[None]), r"ignore must be a list of strings, got \[None\]"),
        ("w4a16", changed("w4a16", ignore="lm_head"), "ignore must be a list of strings, got 'lm_head'"),
        ("w4a16", targeting("re:*q_proj"), r"targets: 're:\*q_proj' is no regular expression: nothing"),
        ("w4a16", targeting(None), r"targets must be a list of strings, got \[None\]"),
        (
            "gptq",
            changed("gptq", dynamic={"-:*q_proj": {}}),
            r"dynamic: 're:\*q_proj' is no regular expression: nothing",
        ),
        ("w4a16", changed("w4a16", transform_config={"a": 1}), "transform_config is not supported"),
        ("w4a16", changed("w4a16", sparsity_config={"format": "sparse-24-bitmask"}), "format 'sparse-24-bitmask'"),
        ("w4a16", changed("w4a16", config_groups=7), "config_groups must be an object, got 7"),
        ("w4a16", changed("w4a16", config_groups={"group_0": "x"}), "group_0 must be an object, got 'x'"),
        ("w4a16", changed("w4a16", config_groups={"group_0": {}}), "targets must be a list of strings, got None"),
        ("w4a16", grouped("w4a16", symmetric="false"), "symmetric must be true or false, got 'false'"),
        ("w4a16", grouped("w4a16", strategy="block"), "block_structure must be two sizes above 0.*got None"),
        (
            "w4a16",
            grouped("w4a16", strategy="block", block_structure="0x8"),
            "block_structure must be two sizes above 0",
        ),
        ("fp8", changed("fp8", weight_block_size=[32]), r"weight_block_size must be two sizes above 0, .* got \[32\]"),
        ("fp8", changed("fp8", weight_block_size=[32.5, 32]), "weight_block_size must be two sizes above 0"),
        ("awq", changed("awq", zero_point="yes"), "zero_point must be true or false, got 'yes'"),
        ("gptq", changed("gptq", bits=4.0), r"bits 4\.0 is not supported; supported: 2, 3, 4, 8"),
        ("gptq", changed("gptq", desc_act="false"), "desc_act must be true or false, got 'false'"),
        ("gptq", changed("gptq", dynamic=["-:x"]), r"dynamic must be an object, got \['-:x'\]"),
        ("gptq", changed("gptq", checkpoint_format="gptq_v2"), 'its zeros are 7.*; set checkpoint_format to "gptq"'),
        ("w4a16", grouped("w4a16", num_bits=6), "num_bits 6 is not supported; supported: 4, 8"),
        ("w4a16", grouped("w4a16", type="float"), "type 'float' is not supported; supported: int"),
        ("w4a16", grouped("w4a16", strategy="tensor_group"), "strategy 'tensor_group' is not supported"),
        ("w4a16", grouped("w4a16", strategy="group", group_size=None), "strategy 'group' needs a group_size"),
        ("w4a16", changed("awq"), "is not in the format that config.json names"),
    ],
)
def test_descriptions_that_do_not_fit_are_refused(
    broken: Callable[[str], Path], form: str, config: dict[str, Any] | None, words: str
) -> None:
    model_dir = broken(form)
    describe(model_dir, config)
    with pytest.raises(ConfigurationError, match=words):
        load_model_runner(settings(model_dir))


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "x" * 100_000},
        changed("gptq", bits="x" * 100_000),
        changed("gptq", group_size="x" * 100_000),
        changed("gptq", dynamic={"x" * 100_000: {"bits": "x" * 100_000}}),
        {"quant_method": "gguf", "types": {"x" * 100_000: []}},
    ],
)
def test_refusals_stay_short(tmp_path: Path, config: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    with pytest.raises(ConfigurationError) as refusal:
        read_quantization(tmp_path)
    assert len(str(refusal.value)) < 1000


@pytest.mark.parametrize("layout", [{}, {"version": None}, {"format": "gemm"}, {"version": "GEMM", "format": "gemv"}])
def test_awq_names_its_layout_as_transformers_reads_it(tmp_path: Path, layout: dict[str, Any]) -> None:
    facts = {name: value for name, value in FORMS["awq"].config.items() if name != "version"} | layout
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": facts}))
    assert str(read_quantization(tmp_path)) == "awq, 4 bits"


@pytest.mark.parametrize("form", ["fp8", "fp8-channels"])
def test_scales_of_activations_are_passed_over(quantized: Quantized, form: str) -> None:
    with capture_logs() as logs:
        parameters(quantized("llama", form))
    assert not [line for line in logs if "does not use" in line["event"]]


@pytest.mark.parametrize(
    ("facts", "group"),
    [({}, 128), ({"w_bit": 4, "q_group_size": 64}, 64), ({"group_size": 32, "q_group_size": 64}, 32)],
)
def test_awq_has_its_defaults_and_the_names_of_llm_awq(tmp_path: Path, facts: dict[str, Any], group: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "awq"} | facts}))
    quantization = read_quantization(tmp_path)
    assert quantization is not None
    storage = quantization.storage_of("model.layers.0.mlp.up_proj")
    assert storage is not None
    assert (storage.num_bits, storage.block_inputs, storage.is_symmetric) == (4, group, False)


def test_modules_have_storages_of_their_own(tmp_path: Path) -> None:
    config = changed("w4a16", ignore=["lm_head", r"re:.*layers\.9\."])
    eight = {"targets": [r"re:.*down_proj$"], "weights": {"num_bits": 8, "group_size": 32, "strategy": "group"}}
    exact = {"targets": ["model.layers.3.mlp.down_proj"], "weights": {"num_bits": 4, "group_size": -1}}
    rows = {"targets": [r"re:.*k_proj"], "weights": None}
    config["config_groups"] |= {"group_1": eight, "group_2": exact, "group_3": rows}
    (tmp_path / "config.json").write_text(json.dumps({"compression_config": config}))
    quantization = read_quantization(tmp_path)
    assert quantization is not None
    found = {name: quantization.storage_of(f"model.layers.{name}_proj") for name in ("0.q", "0.mlp.down", "3.mlp.down")}
    assert [(s.num_bits, s.block_inputs) for s in found.values() if s is not None] == [(4, 16), (8, 32), (4, 0)]
    for plain in ("lm_head", "model.layers.9.self_attn.q_proj", "model.layers.0.self_attn.k_proj"):
        assert quantization.storage_of(plain) is None
    assert str(quantization) == "compressed-tensors pack-quantized, 4 and 8 bits"


def test_gptq_tells_modules_apart_and_has_a_file_of_its_own(tmp_path: Path) -> None:
    dynamic = {"-:.*gate": {}, r"+:.*\.down": {"bits": 8, "group_size": 64}, r".*\.up": {"desc_act": True}}
    (tmp_path / "config.json").write_text("{}")
    assert read_quantization(tmp_path) is None
    facts = {"bits": 4, "group_size": 128, "desc_act": False, "dynamic": dynamic}
    (tmp_path / "quantize_config.json").write_text(json.dumps(facts))
    quantization = read_quantization(tmp_path)
    assert quantization is not None
    q, down, up = (quantization.storage_of(f"layers.0.{name}") for name in ("q", "down", "up"))
    assert q is not None
    assert down is not None
    assert up is not None
    assert (q.num_bits, q.block_inputs, q.has_group_index, q.zeros_minus_one) == (4, 128, False, True)
    assert (down.num_bits, down.block_inputs) == (8, 64)
    assert up.has_group_index
    assert quantization.storage_of("layers.0.gate") is None


@pytest.mark.parametrize(
    ("names", "minus_one"),
    [
        ({}, True),
        ({"format": "gptq_v2"}, False),
        ({"format": "gptq_v2", "checkpoint_format": None}, False),
        ({"format": "gptq", "checkpoint_format": "gptq_v2"}, False),
    ],
)
def test_the_version_of_gptq_has_two_names(tmp_path: Path, names: dict[str, Any], *, minus_one: bool) -> None:
    facts = {"quant_method": "gptq", "bits": 4, "group_size": 128, **names}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": facts}))
    quantization = read_quantization(tmp_path)
    assert quantization is not None
    storage = quantization.storage_of("layers.0.q")
    assert storage is not None
    assert storage.zeros_minus_one is minus_one


def test_modules_that_are_not_quantised_stay(quantized: Quantized, tmp_path: Path) -> None:
    """Lists such as modules_to_not_convert need not be complete: the tensors tell."""
    for form in ("awq", "gptq", "fp8", "w4a16"):
        folder = Path(shutil.copytree(quantized("llama", form), tmp_path / form))
        tensors = load_file(folder / "model.safetensors")
        twin = load_file(twin_of(quantized("llama", form)) / "model.safetensors")
        kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(f"{DOWN}.")}
        save_file(kept | {f"{DOWN}.weight": twin[f"{DOWN}.weight"]}, folder / "model.safetensors")
        assert torch.equal(parameters(folder).take_linear("layers.1.down").weight, twin[f"{DOWN}.weight"])
