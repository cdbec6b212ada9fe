"""`tandem quantize`: the report agrees with the engine that serves the result, schemes keep their promises, the files
are those of the library, and what is refused.
"""

import gc
import json
import math
import os
import random
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from checkpoint.tensors import open_checkpoint
from demo_model.questions import conversation
from engine.loading.load_runner import load_model_runner
from engine.loading.weights import WeightsTarget, load_weights
from engine.models.blocks import BLOCKS
from engine.models.read_config import load_decoder_config
from engine.models.rope import ropes_of
from engine.quantizer.float_checkpoint import open_float_checkpoint
from engine.quantizer.gptq import round_by_errors
from engine.quantizer.layer import FloatLayer, pack_prompts
from engine.quantizer.make import _Maker
from engine.quantizer.make import quantize_checkpoint as quantize_float_checkpoint
from engine.quantizer.quality import QualityMeter
from engine.quantizer.schemes import make_scheme
from engine.quantizer.shards import ShardWriter
from engine.quantizer.smoothing import fold, folding_order, tie
from mesh.domain.errors import ConfigurationError
from tandem_cli.main import main
from tandem_cli.model_files.model_folders import BUNDLED_MODELS
from tests.as_a_process import exit_status_of
from tests.component.arms import settings
from tests.component.checkpoints import FAMILIES, MIXED_FAMILIES, OTHER_FAMILIES, RECURRENT_FAMILIES, VOCAB_SIZE
from tests.component.driving import Driver
from tests.component.encoder_decoders import build_encoder_decoder
from tests.component.parity import check_parity
from tests.component.weights.quantized import (
    describe,
    load_tensors,
    quantize_checkpoint,
    quantized_modules,
    write_counted_checkpoint,
)
from tests.fakes.requests import make_request

DATA = Path(__file__).parents[2] / "data" / "quantized"
CPU = torch.device("cpu")
Report = dict[str, Any]
Quantize = Callable[..., Report]


@pytest.fixture
def quantize(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Quantize:
    """`quantize(model, scheme, prompts, *flags)` writes `tmp_path / scheme` and returns the report."""

    def run(model: Path, scheme: str, prompts: list[Any], *flags: str) -> Report:
        data, out = tmp_path / "prompts.jsonl", tmp_path / scheme
        data.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
        capsys.readouterr()
        assert main(["quantize", str(model), str(out), f"--scheme={scheme}", f"--data={data}", "--json", *flags]) == 0
        report: Report = json.loads(capsys.readouterr().out)
        return report

    return run


def random_prompts(count: int = 8) -> list[dict[str, list[int]]]:
    generator = random.Random(3)
    lengths = [generator.randrange(5, 50) for _ in range(count)]
    return [{"token_ids": [generator.randrange(VOCAB_SIZE) for _ in range(length)]} for length in lengths]


def chats(count: int) -> list[dict[str, Any]]:
    generator = random.Random(5)
    return [{"messages": conversation(generator)} for _ in range(count)]


def perplexity(model_dir: Path, prompts: list[dict[str, list[int]]]) -> float:
    """Of the held-out prompts, as the engine computes it that serves the folder."""
    driver = Driver(load_model_runner(settings(model_dir, enforce_eager=True)))
    held_out = [prompt["token_ids"] for prompt in prompts[3::4]]
    runs = [driver.add(make_request(str(i), ids, prompt_logprobs=True)) for i, ids in enumerate(held_out)]
    driver.finish(*runs)
    logprobs = [token.logprob for run in runs for token in run.prompt_logprobs]
    return math.exp(-sum(logprobs) / len(logprobs))


@pytest.mark.parametrize(
    ("family", "scheme"),
    [
        ("llama-biases", "awq"),
        ("llama-dynamic", "w4a16"),
        ("llama-multi-query", "gptq"),
        ("mistral", "gptq"),
        ("qwen2-window", "gptq"),
        ("qwen3", "w4a16"),
        ("gpt2", "gptq"),
        ("gpt-neox", "gptq"),
        ("gptj", "w4a16"),
        ("opt", "awq"),
        ("opt-350m", "gptq"),
        ("bloom", "awq"),
        ("falcon-7b", "awq"),
        ("falcon-40b", "awq"),
        ("falcon-rw", "w4a16"),
        ("phi", "gptq"),
        ("phi3-longrope", "awq"),
        ("gemma", "awq"),
        ("gemma2", "gptq"),
        ("gemma3", "awq"),
        ("granite", "awq"),
        ("stablelm", "awq"),
        ("starcoder2", "gptq"),
        ("glm4", "awq"),
        ("chatglm", "gptq"),
        ("mixtral", "gptq"),
        ("mixtral", "awq"),
        ("qwen3-moe", "awq"),
        ("deepseek", "awq"),
        ("gpt-oss", "awq"),
        ("lfm2", "gptq"),
        ("qwen3.5", "awq"),
        ("gemma4", "gptq"),
        ("gemma3n", "gptq"),
        ("jamba", "awq"),
        ("falcon-mamba", "w4a16"),
        ("gemma4-moe", "w4a16"),
    ],
)
def test_the_report_is_what_the_engine_says(
    checkpoint: Callable[[str], Path], quantize: Quantize, tmp_path: Path, family: str, scheme: str
) -> None:
    """The engine serves the checkpoint, and finds the perplexities of both models that the report states."""
    prompts = random_prompts()
    report = quantize(checkpoint(family), scheme, prompts, "--group-size=32")
    assert report["base_perplexity"] == pytest.approx(perplexity(checkpoint(family), prompts), rel=1e-4)
    assert report["perplexity"] == pytest.approx(perplexity(tmp_path / scheme, prompts), rel=1e-4)
    assert report["num_prompts"] == 2
    assert 0 < report["mean_kl"] < 0.5
    assert report["bytes"] < report["base_bytes"]


@pytest.mark.parametrize(("scheme", "tolerance"), [("w8a8", 0.05), ("smoothquant", 0.05), ("fp8", 0.1)])
def test_rounded_activations_are_in_the_report(
    checkpoint: Callable[[str], Path], quantize: Quantize, tmp_path: Path, scheme: str, tolerance: float
) -> None:
    """The engine also rounds KV and the output matrix to int8, and does not round activations to fp8."""
    prompts = random_prompts()
    report = quantize(checkpoint("llama-tied"), scheme, prompts)
    assert report["perplexity"] == pytest.approx(perplexity(tmp_path / scheme, prompts), rel=tolerance)
    assert report["top1_agreement"] > 0.7


def test_int4_schemes_beat_rounding_to_nearest(quantize: Quantize) -> None:
    """On chats that they were not calibrated with."""
    reports = {
        s: quantize(BUNDLED_MODELS / "tandem-draft", s, chats(80), "--group-size=64") for s in ("w4a16", "awq", "gptq")
    }
    for scheme in ("awq", "gptq"):
        for figure in ("mean_kl", "logprob_difference"):
            assert reports[scheme][figure] < 0.95 * reports["w4a16"][figure], scheme


def plant_outliers(model_dir: Path, out: Path, channels: tuple[int, ...], factor: float) -> Path:
    """A model that computes the same, in whose activations some channels are much larger than the others."""
    shutil.copytree(model_dir, out)
    tensors = {name: tensor.float() for name, tensor in load_file(model_dir / "model.safetensors").items()}
    for name, tensor in tensors.items():
        if name.endswith("layernorm.weight"):
            tensor[list(channels)] *= factor
        elif any(f".{reader}_proj." in name for reader in ("q", "k", "v", "gate", "up")):
            tensor[:, list(channels)] /= factor
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


def test_smoothquant_tames_outliers(quantize: Quantize, tmp_path: Path) -> None:
    model_dir = plant_outliers(BUNDLED_MODELS / "tandem-draft", tmp_path / "outliers", (3, 40, 77), 50.0)
    reports = [quantize(model_dir, scheme, chats(20)) for scheme in ("w8a8", "smoothquant")]
    assert reports[1]["mean_kl"] < 0.5 * reports[0]["mean_kl"]


@pytest.mark.parametrize(
    "family",
    [
        *("llama-biases", "opt", "gpt2", "falcon-7b", "falcon-40b", "gemma2-biases", "granite", "phi", "starcoder2"),
        *("deepseek-v3", "gpt-oss", "qwen3.5", "bitnet"),
        *("mixtral", "qwen2-moe", "qwen3-moe", "deepseek"),
    ],
)
def test_folded_factors_change_nothing(checkpoint: Callable[[str], Path], family: str) -> None:
    """In Llama's two query heads share a value; in Falcon 7B and Phi one norm feeds attention and MLP; in a mixture one
    feeds all experts and their router.
    """
    opened = open_float_checkpoint(checkpoint(family))
    config = opened.config
    parameters = load_weights(opened.folder, opened.specs, WeightsTarget(CPU, torch.float32))
    layer = FloatLayer(parameters, config.num_layers - 1, config, opened.product_factors)
    ropes = ropes_of(config, CPU, torch.float32)
    [pack] = pack_prompts([range(9), range(30)])
    residual = torch.randn(39, config.hidden_size, generator=torch.Generator().manual_seed(1))
    before = layer.forward(residual, pack, ropes, {})
    dtypes = {"input_norm": torch.float16, "post_norm": torch.bfloat16}
    in_fp32 = ("input_norm_bias", "post_norm_bias", "qkv_bias", "up_bias", "gate_up_bias", "router", "shared_gate")
    dtypes |= dict.fromkeys(in_fp32, torch.float32)
    generator = torch.Generator().manual_seed(2)
    for names in folding_order(layer):
        weights = {name: layer.linears[name].weight.clone() for name in names}
        num_inputs = weights[names[0]].shape[1]
        factors = tie(layer, names[0], torch.rand(num_inputs, generator=generator) * 4 + 0.1)
        folded = fold(layer, names, factors, dtypes)
        assert torch.allclose(folded, factors, rtol=0.01, atol=0.02), "norms are rounded"
        assert all(torch.equal(layer.linears[name].weight, weight * folded) for name, weight in weights.items())
        assert torch.allclose(layer.forward(residual, pack, ropes, {}), before, rtol=1e-4, atol=5e-4), names
    for norm in BLOCKS[config.block]:
        if norm in dtypes:  # others follow a product
            assert torch.equal(layer.changed[norm], layer.changed[norm].to(dtypes[norm]).float())


@pytest.mark.parametrize(
    "family",
    [family for family in (*FAMILIES, *OTHER_FAMILIES, *RECURRENT_FAMILIES, *MIXED_FAMILIES) if family != "gpt-oss"],
)
def test_every_family_keeps_its_numbers(
    checkpoint: Callable[[str], Path], quantize: Quantize, tmp_path: Path, family: str
) -> None:
    """Each number of a matrix is the nearest step to the original's, where the file has it; the rest is as it was."""
    model_dir = checkpoint(family)
    quantize(model_dir, "w8a8", random_prompts(4))
    original, made = (load_tensors(folder) for folder in (model_dir, tmp_path / "w8a8"))
    modules = quantized_modules(model_dir)
    kept = re.compile(r"\.project_|\.kv_b_proj|per_layer_model_projection|altup|x_proj|dt_proj")
    modules = {name: transposed for name, transposed in modules.items() if not kept.search(name)}
    for module, transposed in modules.items():
        weight, scales = original.pop(f"{module}.weight"), made.pop(f"{module}.weight_scale")
        steps = made.pop(f"{module}.weight")
        assert steps.dtype is torch.int8
        weight = weight.t() if transposed else weight
        assert ((steps * scales - weight).abs() <= scales * 0.5001).all(), module
    assert made.keys() == original.keys()
    assert all(torch.equal(made[name], tensor) for name, tensor in original.items())
    described = json.loads((tmp_path / "w8a8" / "config.json").read_text())["quantization_config"]
    assert not set(described["ignore"]) & set(modules)
    assert {load_decoder_config(model_dir).tensors.lm_head, "lm_head"} <= set(described["ignore"])  # transformers' name


def dequantise(model_dir: Path, twin: Path) -> Path:
    """A checkpoint in fp8 as floats, for transformers. Returns `twin`."""
    shutil.copytree(model_dir, twin)
    tensors = load_file(model_dir / "model.safetensors")
    for module, transposed in quantized_modules(model_dir).items():
        if (scales := tensors.pop(f"{module}.weight_scale", None)) is not None:
            weight = tensors[f"{module}.weight"].float() * scales
            tensors[f"{module}.weight"] = (weight.t() if transposed else weight).contiguous()
    save_file(tensors, twin / "model.safetensors", {"format": "pt"})
    describe(twin, None)
    return twin


@pytest.mark.parametrize(
    "family", ["gpt2", "gpt-neox", "opt-350m", "bloom", "falcon-40b", "phi", "gemma2", "granite", "glm4", "qwen2-moe"]
)
def test_what_is_made_says_what_its_numbers_say_in_transformers(
    checkpoint: Callable[[str], Path], quantize: Quantize, tmp_path: Path, family: str
) -> None:
    quantize(checkpoint(family), "fp8", random_prompts(4))
    twin = dequantise(tmp_path / "fp8", tmp_path / "twin")
    check_parity(twin, load_model_runner(settings(tmp_path / "fp8", dtype="float32")))


def test_factors_need_a_norm(
    checkpoint: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"token_ids": [1, 2]}\n{"token_ids": [3, 4]}\n')
    for family, reason in (("opt-350m", "no norm is before the matrices"), ("gemma4", "its values have a norm")):
        words = ["quantize", str(checkpoint(family)), str(tmp_path / "out"), "--scheme=smoothquant", f"--data={data}"]
        assert main(words) == 2
        assert f"does not allow: {reason}" in capsys.readouterr().err


@pytest.mark.parametrize("scheme", ["w8a8", "w4a16", "fp8"])
def test_files_are_those_that_the_library_reads(quantize: Quantize, tmp_path: Path, scheme: str) -> None:
    """Equal to the bit to a file whose numbers compressed-tensors has computed: see test_quantized.py."""
    model_dir = write_counted_checkpoint(tmp_path / "model")
    flags = ["--group-size=32"] if scheme == "w4a16" else []
    quantize(model_dir, scheme, [{"token_ids": [1, 2, 3]}, {"token_ids": [4, 5]}], *flags)
    theirs, ours = (
        load_file(folder / "model.safetensors") for folder in (DATA / f"tandem-{scheme}", tmp_path / scheme)
    )
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name].view(torch.uint8), tensor.view(torch.uint8)), name
    configs = [
        json.loads((folder / "config.json").read_text()) for folder in (DATA / f"tandem-{scheme}", tmp_path / scheme)
    ]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]


def test_large_checkpoints_are_sharded(tmp_path: Path) -> None:
    tensors = {f"t{number}": torch.full((100,), float(number)) for number in range(5)}
    writer = ShardWriter(tmp_path, shard_bytes=800)
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    writer.finish()
    stored = open_checkpoint(tmp_path)
    assert {tensor.path.name for tensor in stored.values()} == {
        f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)
    }
    assert all(torch.equal(load_file(stored[name].path)[name], tensor) for name, tensor in tensors.items())
    assert writer.num_bytes == 2000


def test_a_disk_that_fills_up_meanwhile_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "I/O error: No space left on device (os error 28)"

    def fail(*_: object) -> None:
        raise SafetensorError(reason)

    monkeypatch.setattr("engine.quantizer.shards.save_file", fail)
    for free, advice in ((1000, ": make room there, or write elsewhere"), (10_000, "")):
        usage = shutil.disk_usage(tmp_path)._replace(free=free)
        monkeypatch.setattr("shutil.disk_usage", lambda _, usage=usage: usage)
        writer = ShardWriter(tmp_path / "out")
        writer.add("weight", torch.zeros(1000))
        with pytest.raises(ConfigurationError) as failed:
            writer.finish()
        assert (
            str(failed.value) == f"cannot write to {tmp_path}: I/O error: No space left on device (os error 28){advice}"
        )


def test_a_table_is_printed(
    checkpoint: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": "word " * 30}) + "\n" for _ in range(5)))
    words = ["quantize", str(checkpoint("llama")), str(tmp_path / "out"), "--scheme=w8a8", f"--data={data}"]
    assert main([*words, "--max-tokens=20", "--max-prompts=4"]) == 0
    captured = capsys.readouterr()
    assert (
        "3 prompts to calibrate with, 1 held out to judge by; 4 cut to 20 tokens (--max-tokens); 1 not used"
        in captured.err
    )
    assert "perplexity" in captured.out
    assert "1 held-out prompts, 19 tokens" in captured.out
    assert f"serve it with: tandem up {tmp_path / 'out'}" in captured.out


def test_no_layer_is_made_beside_the_embedding_or_an_earlier_layer(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    opened = open_float_checkpoint(checkpoint("llama"))
    config, others = opened.config, []
    table, up = (config.vocab_size, config.hidden_size), (2 * config.intermediate_size, config.hidden_size)

    def look(_: int) -> None:
        gc.collect()
        tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]  # asks no weak proxy
        others.extend(thing.shape for thing in tensors if tuple(thing.shape) in (table, up))

    scheme = make_scheme("gptq", group_size=32, alpha=0.5, dtype=opened.dtype)
    look(0)
    num_before = len(others)
    quantize_float_checkpoint(opened, tmp_path / "out", scheme, [[1, 2, 3]], [[4, 5]], look)
    assert len(others) == num_before * (config.num_layers + 1)


def test_an_interrupted_run_leaves_nothing(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"token_ids": [1, 2]}\n{"token_ids": [3, 4]}\n')
    (tmp_path / "to").mkdir()
    argv = [
        "tandem",
        "quantize",
        str(checkpoint("llama")),
        str(tmp_path / "to" / "out"),
        "--scheme=fp8",
        f"--data={data}",
    ]
    monkeypatch.setattr("sys.argv", argv)
    monkeypatch.setattr("engine.quantizer.make._copy_rest", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    assert exit_status_of(main) == 128 + signal.SIGTERM
    assert not list((tmp_path / "to").iterdir())


@pytest.mark.parametrize(
    ("model", "flags", "words"),
    [
        (
            "llama",
            ["--scheme=w4a16"],
            "groups of 128 do not divide the 64 inputs of model.layers.0.self_attn.q_proj: choose another "
            "--group-size, such as 32 or 16, which divides the inputs of all matrices",
        ),
        ("llama", ["--scheme=gptq", "--group-size=64"], "do not divide the 96 inputs of model.layers.0.mlp.down_proj"),
        ("llama", ["--scheme=w4a16", "--group-size=0"], "--group-size must be > 0, got 0"),
        (
            "llama",
            ["--scheme=w8a8", "--group-size=32"],
            "--group-size is for w4a16, awq, gptq: w8a8 has a scale per output",
        ),
        ("llama", ["--scheme=w8a8", "--alpha=0.5"], "--alpha is for smoothquant, not for w8a8"),
        ("llama", ["--scheme=smoothquant", "--alpha=2"], "--alpha must be from 0 to 1, got 2"),
        ("llama", ["--scheme=fp8", "--max-tokens=1"], "--max-prompts and --max-tokens must be at least 2"),
        (
            str(DATA / "w8a8"),
            ["--scheme=fp8"],
            "is quantised already (compressed-tensors int-quantized, 8 bits): quantise",
        ),
        ("nowhere", ["--scheme=fp8"], "there is no model folder nowhere"),
    ],
)
def test_wrong_wishes_are_refused(
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    model: str,
    flags: list[str],
    words: str,
) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"token_ids": [1, 2]}\n{"token_ids": [3, 4]}\n')
    folder = str(checkpoint(model)) if model == "llama" else model
    assert main(["quantize", folder, str(tmp_path / "out"), f"--data={data}", *flags]) == 2
    assert words in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.jsonl"]


def test_a_disk_without_room_is_named_before_the_work(
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data, out = tmp_path / "prompts.jsonl", tmp_path / "to" / "out"
    data.write_text('{"token_ids": [1, 2]}\n{"token_ids": [3, 4]}\n')
    words = ["quantize", str(checkpoint("llama")), str(out), "--scheme=fp8", f"--data={data}"]
    monkeypatch.setattr("engine.quantizer.make._Maker", None)
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    assert main(words) == 2
    assert re.search(rf"{out} takes about 0\.\d MB, and 0\.0 MB are free there: make room", capsys.readouterr().err)
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.jsonl"]


@pytest.mark.parametrize("change", ["other weights", "cut off", "gone"])
def test_a_checkpoint_that_changes_meanwhile_is_named(
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    change: str,
) -> None:
    """After the first layer: pages that were cut off are not read, which would end the process."""
    model_dir = Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
    weights, data = model_dir / "model.safetensors", tmp_path / "prompts.jsonl"
    data.write_text('{"token_ids": [1, 2]}\n{"token_ids": [3, 4]}\n')
    make_layer, made = _Maker.make_layer, list[int]()

    def make_and_change(maker: _Maker, index: int) -> None:
        make_layer(maker, index)
        made.append(index)
        if change == "cut off":
            os.truncate(weights, 1000)
            return
        weights.rename(tmp_path / "before")
        if change == "other weights":
            shutil.copyfile(tmp_path / "before", weights)

    monkeypatch.setattr(_Maker, "make_layer", make_and_change)
    (tmp_path / "to").mkdir()
    words = ["quantize", str(model_dir), str(tmp_path / "to" / "out"), "--scheme=fp8", f"--data={data}"]
    assert main(words) == 2
    assert f"{weights} has changed since the run began, so nothing is written: run it again" in capsys.readouterr().err
    assert made == [0]
    assert not list((tmp_path / "to").iterdir())


def test_experts_in_one_tensor_are_refused(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="as MXFP4 and `tandem quantize` store them"):
        quantize_checkpoint(checkpoint("gpt-oss"), tmp_path / "awq", "awq")


def test_encoder_decoder_models_are_refused(tmp_path: Path) -> None:
    model_dir = build_encoder_decoder("t5", tmp_path / "t5")
    with pytest.raises(ConfigurationError, match=r"T5ForConditionalGeneration cannot be quantised.*--quantize int8"):
        open_float_checkpoint(model_dir)


def test_a_folder_that_exists_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize", "tandem-draft", str(tmp_path), "--scheme=fp8", "--data=none.jsonl"]) == 2
    assert f"{tmp_path} exists already" in capsys.readouterr().err


def test_a_link_that_leads_nowhere_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is found at once, and not when the work is done."""
    out = tmp_path / "out"
    out.symlink_to(tmp_path / "nowhere")
    assert main(["quantize", "tandem-draft", str(out), "--scheme=fp8", "--data=none.jsonl"]) == 2
    assert f"{out} exists already" in capsys.readouterr().err


def test_prompts_that_overflow_are_named(
    checkpoint: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model whose activations are infinite cannot be judged, nor can sums of their products be inverted."""
    with pytest.raises(ConfigurationError, match="are NaN, infinite or too large: use other prompts"):
        round_by_errors(torch.ones(2, 4), torch.full((4, 4), math.inf), torch.ones(2, 1))
    model_dir = Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
    tensors = load_file(model_dir / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] *= 1e38
    save_file(tensors, model_dir / "model.safetensors", {"format": "pt"})
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"token_ids": [1, 2]}\n{"token_ids": [3, 4]}\n')
    words = ["quantize", str(model_dir), str(tmp_path / "out"), "--scheme=w8a8", f"--data={data}"]
    assert main(words) == 2
    assert "layer 1: activations of the prompts are NaN or infinite: check that" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_logits_of_the_quantised_model_that_are_infinite_are_no_fault_of_the_original() -> None:
    meter, base = QualityMeter(), torch.randn(2, 8)
    quantized = base.clone()
    quantized[0, 3] = math.inf
    meter.add(torch.tensor([1, 2]), base, quantized)
    with pytest.raises(ConfigurationError, match="the quantised model's logits of the held-out prompts are NaN"):
        meter.quality(1)


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (1e3, r"logits of the held-out prompts give their tokens e\^-\d+ on average: check that it answers them"),
        (1e38, "logits of the held-out prompts are NaN or infinite: check that it answers them"),
    ],
)
def test_logits_that_cannot_be_compared_are_named(
    checkpoint: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], factor: float, words: str
) -> None:
    model_dir = Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
    tensors = load_file(model_dir / "model.safetensors")
    tensors["lm_head.weight"] *= factor
    save_file(tensors, model_dir / "model.safetensors", {"format": "pt"})
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps(prompt) + "\n" for prompt in random_prompts()))
    command = ["quantize", str(model_dir), str(tmp_path / "out"), "--scheme=w8a8", f"--data={data}"]
    assert main(command) == 2
    assert re.search(words, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_factors_that_fp16_does_not_hold_are_not_folded(
    checkpoint: Callable[[str], Path], tmp_path: Path, quantize: Quantize, family: str
) -> None:
    """Channels that are 0 for all prompts have tiny factors with `--alpha 1`: a norm or bias would become infinite."""
    model_dir = Path(shutil.copytree(checkpoint(family), tmp_path / "model"))
    tensors = load_file(model_dir / "model.safetensors")
    next(tensor for name, tensor in tensors.items() if name.endswith("embed_tokens.weight"))[:, 7] = 0
    save_file({name: tensor.half() for name, tensor in tensors.items()}, model_dir / "model.safetensors")
    report = quantize(model_dir, "smoothquant", random_prompts(), "--alpha=1")
    assert report["mean_kl"] < 0.1
    assert all(torch.isfinite(tensor.float()).all() for tensor in load_tensors(tmp_path / "smoothquant").values())


def test_shapes_are_checked_before_prompts_are_read(
    checkpoint: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model_dir = Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
    raw = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps(raw | {"intermediate_size": 10**6}))
    assert main(["quantize", str(model_dir), str(tmp_path / "out"), "--scheme=fp8", "--data=none.jsonl"]) == 2
    assert re.search(r"has shape \[\d+, 64\], config.json implies \[1000000, 64\]", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "is not valid JSON"),
        ('{"eos_token_id": "2"}', "eos_token_id must be a token id or a list of them, got '2'"),
        (None, "is no file, or a link that leads nowhere: remove it"),
    ],
)
@pytest.mark.parametrize("command", ["quantize", "partition"])
def test_a_broken_generation_config_is_named_before_the_work(
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
    content: str | None,
    reason: str,
) -> None:
    model_dir = Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
    path = model_dir / "generation_config.json"
    path.unlink(missing_ok=True)
    if content is None:
        path.mkdir()
    else:
        path.write_text(content)
    flags = ["--scheme=fp8", f"--data={tmp_path / 'none.jsonl'}"] if command == "quantize" else []
    assert main([command, str(model_dir), str(tmp_path / "out"), *flags]) == 2
    said = capsys.readouterr().err
    assert str(path) in said
    assert reason in said
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
