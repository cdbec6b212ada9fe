"""`smoothquant` and `awq` of mixtures of experts: folded factors change nothing, they pay where channels are large, the
compiled decoder serves the result, and experts that prompts hardly reach are told.
"""

import json
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.loading.load_runner import load_model_runner
from engine.loading.resolve import resolve
from engine.quantized_formats.matrix import QuantizedMatrix
from engine.quantized_formats.storage import MatrixStorage
from engine.quantizer.float_checkpoint import open_float_checkpoint
from engine.quantizer.make import expected_bytes, quantize_checkpoint
from engine.quantizer.quality import Quality
from engine.quantizer.rare_experts import MIN_TOKENS, find_rare, settle_rare
from engine.quantizer.schemes import make_scheme
from engine.quantizer.statistics import InputStatistics
from tandem_cli.main import main
from tests.component.arms import load_arm, settings
from tests.component.checkpoints import VOCAB_SIZE
from tests.component.parity import NUM_NEW, expect_prompts, logprob_differences, require_same, run_mixed
from tests.component.weights.quantized import describe

Checkpoint = Callable[[str], Path]
MIXTURES = ("mixtral", "qwen2-moe", "qwen3-moe", "deepseek")
GROUP_SIZES = {"qwen2-moe": 16}
_FACTOR = 30.0
_READERS = re.compile(r"\.(q_proj|k_proj|v_proj|gate_proj|up_proj|w1|w3|gate|shared_expert_gate)\.weight$")
_DOWN = re.compile(r"\.(\d+)\.(down_proj|w2)\.weight$")


def random_prompts(count: int, seed: int) -> list[list[int]]:
    generator = random.Random(seed)
    return [[generator.randrange(VOCAB_SIZE) for _ in range(generator.randrange(20, 50))] for _ in range(count)]


def quantize(model_dir: Path, out: Path, scheme: str, family: str) -> Quality:
    """With prompts that reach all experts."""
    checkpoint = open_float_checkpoint(model_dir)
    made = make_scheme(scheme, group_size=GROUP_SIZES.get(family, 32), alpha=0.5, dtype=checkpoint.dtype)
    done = quantize_checkpoint(checkpoint, out, made, random_prompts(16, 1), random_prompts(6, 2), lambda _: None)
    assert done.num_rare_experts == 0
    assert expected_bytes(checkpoint, made) == pytest.approx(done.num_bytes, rel=0.1)
    return done.quality


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("name", ["smoothquant", "awq"])
def test_without_rounding_the_model_computes_the_same(
    checkpoint: Checkpoint, tmp_path: Path, family: str, name: str
) -> None:
    """transformers' log-probs of the original are those of the engine for what is written."""
    opened = open_float_checkpoint(checkpoint(family))
    scheme = make_scheme(name, group_size=GROUP_SIZES.get(family, 32), alpha=0.5, dtype=torch.float32)
    exact = replace(scheme, weights=MatrixStorage("plain", 8), activations=None, round=_keep)
    out = tmp_path / "out"
    made = quantize_checkpoint(opened, out, exact, random_prompts(16, 1), random_prompts(2, 2), lambda _: None)
    assert made.quality.mean_kl == pytest.approx(0, abs=1e-6)
    assert made.quality.top1_agreement == 1
    original, written = (load_file(folder / "model.safetensors") for folder in (opened.folder, out))
    written = {key: tensor for key, tensor in written.items() if not key.endswith("_scale")}
    save_file(written, out / "model.safetensors", {"format": "pt"})
    describe(out, None)
    changed = {key for key, tensor in written.items() if not torch.allclose(tensor, original[key], rtol=0.05)}
    for kind in (r"post_attention_layernorm", r"(mlp|moe)\.gate", r"experts\.1\.(down_proj|w2)"):
        assert any(re.search(kind, key) for key in changed), kind
    runner = load_model_runner(settings(out, enforce_eager=True))
    for run, expected in zip(run_mixed(runner), expect_prompts(opened.folder), strict=True):
        require_same(run, expected)


def _keep(weight: Tensor, _: InputStatistics) -> QuantizedMatrix:
    return QuantizedMatrix(weight.clone(), torch.ones(len(weight), 1))


def plant_outliers(model_dir: Path, out: Path) -> Path:
    """A model that computes the same, with large channels after norms, and others inside of each expert."""
    shutil.copytree(model_dir, out)
    tensors = load_file(model_dir / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("layernorm.weight"):
            tensor[[3, 40, 57]] *= _FACTOR
        elif _READERS.search(name):
            tensor[:, [3, 40, 57]] /= _FACTOR
    for name in tensors:
        if match := _DOWN.search(name):
            up = name.replace("down_proj", "up_proj").replace("w2", "w3")
            channel = (7 * int(match[1]) + 5) % tensors[name].shape[1]
            tensors[up][channel] *= _FACTOR
            tensors[name][:, channel] /= _FACTOR
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize(("scheme", "plain"), [("awq", "w4a16"), ("smoothquant", "w8a8")])
def test_factors_pay_where_channels_are_large(
    checkpoint: Checkpoint, tmp_path: Path, family: str, scheme: str, plain: str
) -> None:
    model_dir = plant_outliers(checkpoint(family), tmp_path / "outliers")
    qualities = [quantize(model_dir, tmp_path / name, name, family) for name in (scheme, plain)]
    assert qualities[0].mean_kl < qualities[1].mean_kl
    assert qualities[0].logprob_difference < qualities[1].logprob_difference


@pytest.mark.parametrize(("family", "scheme"), [("mixtral", "awq"), ("qwen3-moe", "awq"), ("qwen2-moe", "smoothquant")])
def test_the_compiled_decoder_serves_what_is_made(
    checkpoint: Checkpoint, tmp_path: Path, family: str, scheme: str
) -> None:
    """As the eager decoder computes it; with int4 widened to floats, equal but for the order of sums."""
    out = tmp_path / "out"
    quantize(checkpoint(family), out, scheme, family)
    assert resolve(settings(out))[0].quantize == {"awq": "int4", "smoothquant": "int8"}[scheme]
    eager, served = run_mixed(load_arm(out, "cpu", dtype="float32")), run_mixed(load_arm(out, "compiled"))
    assert all(len(run.token_ids) == NUM_NEW for run in served)
    assert logprob_differences(served, eager)[0] < 0.2
    if scheme == "awq":
        exact = run_mixed(load_arm(out, "compiled", dtype="float32"))
        assert [run.token_ids for run in exact] == [run.token_ids for run in eager]
        assert logprob_differences(exact, eager)[1] < 1e-3


def test_rare_experts_take_the_statistics_of_their_layer() -> None:
    """Each token is counted by as many experts as it chooses, so experts together have the statistics of the layer."""
    tokens, statistics = torch.randn(3 * MIN_TOKENS, 8), dict[str, InputStatistics]()
    for expert, routed in enumerate((tokens[:MIN_TOKENS], tokens[MIN_TOKENS:-1], tokens[-1:])):
        statistics[f"experts.{expert}.gate_up"] = counted(routed)
        statistics[f"experts.{expert}.down"] = counted(routed[:, :4])
    statistics["qkv"] = counted(tokens[:1])
    of_layer, kept = counted(tokens), statistics["experts.1.gate_up"]
    rare = find_rare(statistics)
    assert rare == {"experts.2"}
    settle_rare(statistics, rare)
    assert torch.allclose(statistics["experts.2.gate_up"].gram, of_layer.gram, atol=1e-4)
    means = [InputStatistics.mean_of([each]) for each in (statistics["experts.2.gate_up"], of_layer)]
    assert torch.allclose(*means)
    assert torch.equal(statistics["experts.2.gate_up"].largest, of_layer.largest)
    assert statistics["experts.2.down"].num_tokens == 0
    assert not statistics["experts.2.down"].gram.any()
    assert statistics["experts.1.gate_up"] is kept


def counted(x: Tensor) -> InputStatistics:
    statistics = InputStatistics(x.shape[1], needs_gram=True)
    statistics.add(x)
    return statistics


def test_rare_experts_are_told(checkpoint: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One prompt to calibrate with reaches no expert often enough: all of them have `down` as rounding to nearest."""
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"token_ids": [1, 2, 3]}\n{"token_ids": [3, 4]}\n')
    words = ["quantize", str(checkpoint("qwen2-moe")), f"--data={data}", "--group-size=16"]
    assert main([*words, str(tmp_path / "awq"), "--scheme=awq"]) == 0
    assert f"16 of 16 experts got fewer than {MIN_TOKENS} tokens to calibrate with" in capsys.readouterr().out
    assert main([*words, str(tmp_path / "w4a16"), "--scheme=w4a16", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rare_experts"] == 0, "it needs no statistics"
    awq, nearest = (load_file(tmp_path / scheme / "model.safetensors") for scheme in ("awq", "w4a16"))
    for name, tensor in nearest.items():
        if ".experts." in name and ".down_proj." in name:
            assert torch.equal(awq[name], tensor), name
