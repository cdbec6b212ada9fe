"""Folders that `tandem convert` makes of quantised GGUF: blocks as in the file, numbers as llama.cpp's, in int4."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from safetensors.torch import load_file, save_file

from checkpoint.gguf.file import GgufFile, open_gguf
from checkpoint.gguf.models import GgufModel
from checkpoint.partition_manifest import read_partition
from engine.loading.memory_needs import weights_bytes
from engine.loading.resolve import resolve
from engine.loading.runner_parts import load_packed
from engine.loading.weights import WeightsTarget, load_weights
from engine.model_runner import ModelRunner
from engine.models.encodings import LinearParameters, Parameters
from engine.models.packed_weights import write_packed
from engine.models.parameters import parameter_specs
from engine.models.read_config import load_decoder_config
from engine.models.share import rank_share
from engine.quantized_formats import gguf as blocks
from engine.quantized_formats.gguf_config import GGUF_TYPES
from engine.quantized_formats.storage import Format, MatrixStorage
from mesh.domain.errors import ConfigurationError
from mesh.domain.kv import Degrees
from tandem_cli.capacity.model_size import model_size
from tandem_cli.capacity.ranks import precision_of
from tandem_cli.capacity.roofline import Capacity, Device
from tandem_cli.main import main
from tests.component.arms import load_arm, settings
from tests.component.checkpoints import FAMILIES, OTHER_FAMILIES, llama_like, save_tokenizer
from tests.component.driving import Driver, Run
from tests.component.lora.adapters import four_adapters, run_together
from tests.component.parity import logprob_differences, run_mixed
from tests.component.ranks.ranked import ranked_runner
from tests.component.ranks.test_ranks import require_equal
from tests.component.weights.gguf_files import write_gguf
from tests.component.weights.test_gguf import write_model
from tests.fakes.requests import make_request

REAL = Path(__file__).parents[2] / "data" / "quantized" / "gguf" / "model.gguf"
HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Where numbers of fp16 lie in a block; in others at 0 and, of those with minima, at 2."""
KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
"""Types that the package writes."""
DOWN = "model.layers.1.mlp.down_proj"

Convert = Callable[..., Path]


@pytest.fixture
def convert(tmp_path: Path) -> Convert:
    """`convert(kind)` makes a Llama in this type, and the folder of it; its twin in fp32 is the folder `twin`."""

    def convert(kind: str, model: Any = None) -> Path:
        model = llama_like("llama", hidden_size=128) if model is None else model
        model_dir = write_model(model.to(torch.bfloat16), tmp_path / "model")
        return _converted(write_gguf(model_dir, tmp_path / "model.gguf", kind), tmp_path, model_dir)

    return convert


def _converted(path: Path, tmp_path: Path, tokenizer: Path) -> Path:
    out, twin = tmp_path / "out", tmp_path / "twin"
    assert main(["convert", str(path), str(out), "--tokenizer", str(tokenizer)]) == 0
    shutil.copytree(out, twin)
    numbers = {name: torch.tensor(numbers) for name, _, numbers in GgufModel(open_gguf(path)).tensors()}
    save_file({name: tensor.contiguous() for name, tensor in numbers.items()}, twin / "model.safetensors")
    config = json.loads((out / "config.json").read_text()) | {"dtype": "float32"}
    del config["quantization_config"]
    (twin / "config.json").write_text(json.dumps(config))
    return out


def parameters(model_dir: Path, encoding: str = "float") -> Parameters:
    specs = parameter_specs(load_decoder_config(model_dir))
    return load_weights(model_dir, specs, WeightsTarget(torch.device("cpu"), torch.float32, encoding))


def require_same_numbers(model_dir: Path, twin: Path) -> None:
    """In fp32, to the bit."""
    ours, theirs = parameters(model_dir), parameters(twin)
    specs = parameter_specs(load_decoder_config(twin))
    biases = {f"{spec.name}_bias" for spec in specs if spec.is_matrix}
    for spec in specs:
        if spec.is_matrix:
            assert torch.equal(ours.take_linear(spec.name).weight, theirs.take_linear(spec.name).weight), spec.name
        elif spec.name not in biases:
            assert torch.equal(ours.take(spec.name), theirs.take(spec.name)), spec.name


@pytest.mark.parametrize("kind", GGUF_TYPES)
def test_numbers_are_those_of_llama_cpp(kind: Format) -> None:
    """Blocks of any bits, with scales of both signs."""
    facts, random = GGUF_TYPES[kind], np.random.default_rng(0)
    theirs = gguf.GGMLQuantizationType[kind]
    assert gguf.GGML_QUANT_SIZES[theirs] == (facts.block_inputs, facts.block_bytes)
    octets = random.integers(0, 256, (6, 4, facts.block_bytes), dtype=np.uint8)
    for at in HALVES.get(kind, (0, 2) if facts.has_minima else (0,)):
        octets[..., at : at + 2] = random.normal(size=(6, 4, 1)).astype(np.float16).view(np.uint8)
    rows = octets.reshape(6, -1)
    expected = dequantize(rows, theirs)
    storage = MatrixStorage(kind, facts.num_bits, block_inputs=facts.group, is_symmetric=not facts.has_minima)
    assert blocks.parts(storage, expected.shape)["weight"].shapes == (rows.shape,)
    matrix = blocks.read(storage, expected.shape, {"weight": torch.from_numpy(rows)})
    assert np.array_equal(matrix.dequantized().numpy(), expected)
    assert matrix.scales.shape == (6, expected.shape[1] // facts.group)


@pytest.mark.parametrize("family", ["llama-tied", "mixtral", "gpt2", "falcon-40b", "gemma", "qwen3-moe"])
@pytest.mark.parametrize("kind", ["Q4_0", "Q5_1"])
def test_folders_keep_the_numbers_of_the_file(family: str, kind: str, convert: Convert, tmp_path: Path) -> None:
    """Whose rows are in another order, stacked, or of a matrix that Hugging Face has transposed."""
    mixtral = lambda: llama_like("mixtral", num_local_experts=4)  # noqa: E731
    make = {**FAMILIES, **OTHER_FAMILIES, "mixtral": mixtral}[family]
    out = convert(kind, make())
    require_same_numbers(out, tmp_path / "twin")
    stored = load_file(out / "model.safetensors")
    matrices = {name for name, tensor in stored.items() if tensor.ndim > 1}
    assert {name for name, tensor in stored.items() if tensor.dtype == torch.uint8} == matrices
    assert json.loads((out / "config.json").read_text())["quantization_config"]["types"].keys() == {kind}


def test_floats_beside_blocks_keep_their_types(
    convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files may have the embedding in F16, and matrices that no blocks fit."""
    convert("Q8_0")
    path, halves = tmp_path / "model.gguf", write_gguf(tmp_path / "model", tmp_path / "halves.gguf", "F16")
    file, other = open_gguf(path), open_gguf(halves)
    mixed = {**file.tensors, "token_embd.weight": other.tensors["token_embd.weight"]}
    monkeypatch.setattr("tandem_cli.model_files.convert_gguf.open_gguf", lambda _: GgufFile(path, file.metadata, mixed))
    assert main(["convert", str(path), str(tmp_path / "mixed")]) == 0
    assert "tensors in Q8_0, float16, float32, " in capsys.readouterr().out
    found = load_file(tmp_path / "mixed" / "model.safetensors")
    assert found["model.embed_tokens.weight"].dtype == torch.float16
    assert np.array_equal(found["model.embed_tokens.weight"].numpy(), other.tensors["token_embd.weight"].data)
    assert found["lm_head.weight"].dtype == torch.uint8
    assert found["model.norm.weight"].dtype == torch.float32
    run_mixed(load_arm(tmp_path / "mixed", "compiled"))


def test_a_file_of_llama_cpp_keeps_its_four_types(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    out = _converted(REAL, tmp_path, tmp_path)
    assert (out / "model.safetensors").stat().st_size <= REAL.stat().st_size
    types = json.loads((out / "config.json").read_text())["quantization_config"]["types"]
    assert {kind: len(names) for kind, names in types.items()} == {"Q4_K": 4, "Q5_0": 1, "Q6_K": 2, "Q8_0": 1}
    require_same_numbers(out, tmp_path / "twin")
    kept = parameters(out, "int4")
    encodings = {name: kept.take_linear(f"layers.0.{name}") for name in ("qkv", "o", "gate_up", "down")}
    assert {name: matrix.encoding for name, matrix in encodings.items()} == {
        "qkv": "int8 in groups",  # values are in Q6_K
        "o": "int8 in groups",
        "gate_up": "int4",
        "down": "int8 in groups",
    }
    assert encodings["gate_up"].minima is not None
    tied = parameters(tmp_path / "twin")
    for name in ("o", "gate_up", "down"):
        assert torch.equal(_numbers(encodings[name]), tied.take_linear(f"layers.0.{name}").weight)
    mean, largest = logprob_differences(
        [_scored(load_arm(out, "compiled", kv_dtype="float32"))], [_scored(load_arm(tmp_path / "twin", "cpu"))]
    )
    assert 0 < mean < 0.06
    assert largest < 0.3


def _scored(runner: ModelRunner) -> Run:
    driver = Driver(runner)
    run = driver.add(make_request("r", [*range(3, 60)], max_new_tokens=2, prompt_logprobs=True))
    driver.step((run, 57))
    driver.finish(run)
    return run


def _numbers(matrix: LinearParameters) -> torch.Tensor:
    """What a matrix of groups of 32 means."""
    assert matrix.scales is not None
    scales, subtracted = matrix.scales.repeat_interleave(32, 1), matrix.minima
    if subtracted is not None:
        return matrix.weight.float() * scales - subtracted.repeat_interleave(32, 1)
    assert matrix.zeros is not None
    return (matrix.weight.float() - matrix.zeros.float().repeat_interleave(32, 1)) * scales


@pytest.mark.parametrize(
    ("kind", "encoding"),
    [
        ("Q4_0", "int4"),
        ("Q4_1", "int4"),
        ("Q5_0", "int8 in groups"),
        ("Q5_1", "int8 in groups"),
        ("Q8_0", "int8 in groups"),
    ],
)
def test_matrices_are_served_as_stored(kind: str, encoding: str, convert: Convert, tmp_path: Path) -> None:
    """Only Q5_1 is rounded, to less than an eighth of its step: a group of 8 bits has its zero in the middle."""
    out = convert(kind, FAMILIES["llama-biases"]())
    ours, theirs = parameters(out, "int4"), parameters(tmp_path / "twin")
    for name in ("qkv", "o", "gate_up", "down"):
        matrix, exact = ours.take_linear(f"layers.1.{name}"), theirs.take_linear(f"layers.1.{name}").weight
        assert matrix.encoding == encoding
        distance = (_numbers(matrix) - exact).abs()
        groups = exact.view(len(exact), -1, 32)
        steps = (groups.amax(2) - groups.amin(2)).repeat_interleave(32, 1) / 31
        assert bool((distance <= steps / 8).all()) if kind == "Q5_1" else not distance.any()
    assert resolve(settings(out))[0].quantize == "int4"
    assert resolve(settings(out, dtype="float32"))[0].quantize == "none"
    runner = load_arm(out, "compiled", kv_dtype="float32")
    mean, largest = logprob_differences(run_mixed(runner), run_mixed(load_arm(tmp_path / "twin", "cpu")))
    assert 0 < mean < 0.04
    assert largest < 0.3


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_ranks_and_partitions_equal_one_rank(kind: str, convert: Convert, tmp_path: Path) -> None:
    folder, out = convert(kind), tmp_path / "partitioned"
    expected = run_mixed(load_arm(folder, "compiled"))
    assert main(["partition", str(folder), str(out), "--tensor-parallel=2"]) == 0
    partition = read_partition(out)
    assert partition is not None
    assert partition.quantize == "int4"
    for model_dir, degrees in ((folder, Degrees(2, 2)), (out, Degrees(2))):
        with ranked_runner(model_dir, degrees) as runner:
            require_equal(run_mixed(runner), expected)


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_adapters_are_added_to_such_products(kind: str, convert: Convert, tmp_path: Path) -> None:
    folder = convert(kind, FAMILIES["llama-biases"]())
    adapters = four_adapters(tmp_path / "model", tmp_path)
    digests = dict(enumerate(["", *(adapter.digest for adapter in adapters)]))
    runs = run_together(load_arm(folder, "compiled", kv_dtype="float32", adapters=adapters), digests)
    eager = load_arm(tmp_path / "twin", "cpu", adapters=adapters)
    without = run_together(eager, dict.fromkeys(digests, ""))
    for number, (run, expected) in enumerate(zip(runs, run_together(eager, digests), strict=True)):
        assert 0 < logprob_differences([run], [expected])[0] < 0.08
        if digests[number]:
            assert logprob_differences([run], [without[number]])[0] > 0.3, "the adapter changes too little to tell"


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_plans_and_workers_count_the_bytes_of_each_type(kind: str, convert: Convert, tmp_path: Path) -> None:
    out = convert(kind, llama_like("llama", hidden_size=1024, intermediate_size=2048))
    resolved, config = resolve(settings(out))
    write_packed(tmp_path / "packed", load_packed(resolved, config, rank_share(config)))
    num_bytes = (tmp_path / "packed").stat().st_size
    assert weights_bytes(resolved, parameter_specs(config), config, is_packed=True) == pytest.approx(
        num_bytes, rel=0.03
    )
    device = Device("toy", 1e9, 1e9, {"float32": 1e9, "int8": 1e9}, "made up")
    capacity = Capacity(model_size(config), precision_of(resolved, config), device)
    assert capacity.weights_bytes == pytest.approx(num_bytes, rel=0.03)


def _without(types: dict[str, Any]) -> None:
    types["Q4_0"].remove(DOWN)


def _renamed(types: dict[str, Any]) -> None:
    types["IQ9_Z"] = types.pop("Q4_0")


def _of_another_type(types: dict[str, Any]) -> None:
    types["Q5_0"] = types.pop("Q4_0")


def _no_list(types: dict[str, Any]) -> None:
    types["Q4_0"] = DOWN


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_without, rf"tensor {DOWN}.weight is quantised, but config.json says that {DOWN} is not"),
        (_renamed, r"gguf: type 'IQ9_Z' is not supported; supported: Q4_0, .*: convert the GGUF file again"),
        (_of_another_type, r"has shape \[\d+, 72\], config.json implies \[\d+, 88\]"),
        (_no_list, "Q4_0 must be a list of strings"),
    ],
)
def test_types_that_do_not_fit_are_refused_by_name(
    change: Callable[[dict[str, Any]], None], reason: str, convert: Convert
) -> None:
    out = convert("Q4_0")
    config = json.loads((out / "config.json").read_text())
    change(config["quantization_config"]["types"])
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigurationError, match=reason):
        parameters(out)


def test_broken_tensors_are_refused_by_name(convert: Convert) -> None:
    out = convert("Q4_0")
    stored = load_file(out / "model.safetensors")
    name = f"{DOWN}.weight"
    for broken, reason in (
        (stored[name].view(torch.int8), f"tensor {name} has dtype I8, which its format stores as U8"),
        (stored[name][:, :-18].contiguous(), rf"tensor {name} has shape .* config.json implies"),
    ):
        save_file(stored | {name: broken}, out / "model.safetensors")
        with pytest.raises(ConfigurationError, match=reason):
            parameters(out)
    infinite = stored[name].clone()
    infinite[0, :2] = torch.tensor([0, 0x7C], dtype=torch.uint8)
    save_file(stored | {name: infinite}, out / "model.safetensors")
    with pytest.raises(ConfigurationError, match=f"{DOWN}.* not finite|{DOWN}.*inf"):
        parameters(out, "int4").read_all()


def test_quantising_such_a_folder_is_refused(convert: Convert, capsys: pytest.CaptureFixture[str]) -> None:
    out = convert("Q4_1")
    (data := out.parent / "data.jsonl").write_text('{"token_ids": [1, 2, 3]}\n')
    assert main(["quantize", str(out), str(out.parent / "again"), "--scheme=w8a8", f"--data={data}"]) == 2
    assert "is quantised already (gguf Q4_1, 4 bits): quantise the checkpoint" in capsys.readouterr().err
    assert main(["convert", str(out), str(out.parent / "again"), "--dequantize"]) == 2
    assert "--dequantize is for files in GGUF" in capsys.readouterr().err
