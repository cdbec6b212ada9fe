"""The engine says what Hugging Face transformers says, for every family, in mixed batches, in every way it computes."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.loading.load_runner import load_model_runner
from mesh.domain.host import Cores
from tests.component.arms import ARMS, load_arm, settings
from tests.component.checkpoints import (
    COMPILED_MIXED,
    FAMILIES,
    MIXED_FAMILIES,
    OTHER_FAMILIES,
    RECURRENT_FAMILIES,
    WINDOW,
    build_checkpoint,
    llama_like,
    randomise,
    save_tokenizer,
)
from tests.component.driving import Driver, Run
from tests.component.parity import check_half_precision, check_parity, half_tolerance, prompts, run_mixed
from tests.fakes.requests import make_request

Checkpoint = Callable[[str], Path]


@pytest.fixture
def three_threads() -> Iterator[None]:
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(checkpoint: Checkpoint, family: str, arm: str) -> None:
    check_parity(checkpoint(family), load_arm(checkpoint(family), arm))


@pytest.mark.parametrize("family", [*OTHER_FAMILIES, *RECURRENT_FAMILIES, *MIXED_FAMILIES])
def test_every_other_family(checkpoint: Checkpoint, family: str) -> None:
    check_parity(checkpoint(family), load_model_runner(settings(checkpoint(family))))


@pytest.mark.parametrize("family", MIXED_FAMILIES)
def test_layers_of_several_sizes_in_the_eager_decoder(checkpoint: Checkpoint, family: str) -> None:
    check_parity(checkpoint(family), load_arm(checkpoint(family), "cpu"))


_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_hidden_layers": 4}
_WINDOWS = {"use_sliding_window": True, "sliding_window": WINDOW}


@pytest.mark.parametrize(
    ("model_type", "facts", "unstated"),
    [
        ("qwen3_moe", _WINDOWS, ()),
        ("qwen2_moe", _WINDOWS | {"max_window_layers": 2}, ("layer_types",)),
        ("qwen2_moe", _WINDOWS | {"max_window_layers": 4}, ()),
        ("qwen2_moe", {"qkv_bias": False}, ()),
    ],
    ids=["qwen3-windows", "qwen2-windows", "qwen2-layer-types", "qwen2-no-biases"],
)
def test_windows_and_biases_of_qwen_mixtures(
    tmp_path: Path, model_type: str, facts: dict[str, Any], unstated: tuple[str, ...]
) -> None:
    shared = {"shared_expert_intermediate_size": 48} if model_type == "qwen2_moe" else {}
    torch.manual_seed(0)
    model = llama_like(model_type, **_EXPERTS | shared | facts)
    randomise(model)
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    path = tmp_path / "config.json"
    stated = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in stated.items() if key not in unstated}))
    check_parity(tmp_path, load_model_runner(settings(tmp_path)))


def test_windows_of_ministral(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """transformers takes Mistral with layer_types for Ministral."""
    copy = Path(shutil.copytree(checkpoint("mistral"), tmp_path / "copy"))
    raw = json.loads((copy / "config.json").read_text())
    types = ["full_attention", "sliding_attention", "full_attention"]
    (copy / "config.json").write_text(json.dumps(raw | {"layer_types": types}))
    check_parity(copy, load_model_runner(settings(copy)))


def test_tiles_of_long_chunks(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.attention.torch_sdpa.MAX_MASK_ELEMENTS", 100)
    for family in ("llama", "mistral"):
        check_parity(checkpoint(family), load_arm(checkpoint(family), "torch"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gemma3n", "bloom", "lfm2", "gemma4", "jamba", "mamba"])
def test_half_precision_on_cpu(checkpoint: Checkpoint, family: str, dtype: str) -> None:
    tolerance = half_tolerance(family, dtype)
    check_half_precision(checkpoint(family), settings(checkpoint(family), dtype=dtype), tolerance)


def test_sharded_checkpoint(tmp_path: Path) -> None:
    model_dir = build_checkpoint("qwen2-window", tmp_path, max_shard_size="100KB")
    assert len(list(model_dir.glob("*.safetensors"))) > 2
    check_parity(model_dir, load_model_runner(settings(model_dir)))


@pytest.mark.parametrize("arm", ARMS)
def test_batches_do_not_change_tokens(checkpoint: Checkpoint, arm: str) -> None:
    mixed = run_mixed(load_arm(checkpoint("llama"), arm))
    for run, prompt in zip(mixed, prompts(), strict=True):
        driver = Driver(load_arm(checkpoint("llama"), arm), seed=1)
        alone = driver.add(make_request("alone", prompt, max_new_tokens=len(run.tokens)))
        driver.finish(alone)
        assert alone.token_ids == run.token_ids


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("family", ["llama", "llama-dynamic", "mistral"])
def test_replay_continues_the_same(checkpoint: Checkpoint, family: str, arm: str) -> None:
    check_replay(Driver(load_arm(checkpoint(family), arm)))


def check_replay(driver: Driver) -> None:
    whole, replayed = replay(driver)
    assert replayed.token_ids == whole.token_ids[5:]


def replay(driver: Driver) -> tuple[Run, Run]:
    """A run, and one that goes on after its first 5 tokens."""
    prompt = prompts()[1]
    whole = driver.add(make_request("whole", prompt, max_new_tokens=12))
    driver.finish(whole)
    history = [*prompt, *whole.token_ids[:5]]
    replayed = driver.add(make_request("replay", history, max_new_tokens=12, num_prompt_tokens=len(prompt)))
    driver.finish(replayed, chunk=9)
    return whole, replayed


_OF_STATES = ["lfm2", "qwen3.5-moe", "nemotron-h", "falcon-h1", "mamba2", "jamba", "mamba", "falcon-mamba"]
_REPLAYED = ["bloom", "falcon-40b", "gemma2", "gemma3", "gptj", "qwen2-moe", "gpt-oss", "llama4"]
_REPLAYED += [*_OF_STATES, *COMPILED_MIXED]


@pytest.mark.parametrize("quantize", ["none", "int8"])
@pytest.mark.parametrize("family", _REPLAYED)
def test_compiled_replay_gives_the_same_numbers(checkpoint: Checkpoint, family: str, quantize: str) -> None:
    """ALiBi, soft caps, two kinds of rotary positions, norms after attention, blocks side by side, experts, states."""
    whole, replayed = replay(Driver(load_arm(checkpoint(family), "compiled", quantize=quantize)))
    assert replayed.tokens == whole.tokens[5:]


@pytest.mark.parametrize("family", ["bloom", "gemma3", "gemma3n", "qwen2-moe"])
def test_replay_of_other_families(checkpoint: Checkpoint, family: str) -> None:
    check_replay(Driver(load_model_runner(settings(checkpoint(family)))))


@pytest.mark.parametrize("arm", ARMS)
def test_layer_groups_are_announced(checkpoint: Checkpoint, arm: str) -> None:
    driver = Driver(load_arm(checkpoint("llama"), arm))
    driver.step((driver.add(make_request("r", [1, 2, 3])), 3))
    assert driver.announced == [(0, 2), (2, 1)]


def test_groups_of_little_kv_have_more_layers(checkpoint: Checkpoint) -> None:
    runner = load_model_runner(settings(checkpoint("llama"), group_bytes=1 << 20))
    driver = Driver(runner)
    driver.step((driver.add(make_request("r", [1, 2, 3])), 3))
    assert driver.announced == [(0, runner.config.num_layers)]


def test_prompt_logprobs_in_pieces(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.model_runner._MAX_LOGITS", 1000)
    check_parity(checkpoint("llama"), load_model_runner(settings(checkpoint("llama"))))


def test_empty_prompt_logprobs_for_one_token(checkpoint: Checkpoint) -> None:
    driver = Driver(load_model_runner(settings(checkpoint("llama"))))
    run = driver.add(make_request("r", [5], prompt_logprobs=True))
    driver.step((run, 1))
    assert run.prompt_logprobs == []
    assert len(run.tokens) == 1


@pytest.mark.usefixtures("three_threads")
def test_many_threads_of_the_eager_decoder(checkpoint: Checkpoint) -> None:
    check_parity(checkpoint("llama"), load_arm(checkpoint("llama"), "cpu"))


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize(
    "family",
    ["qwen3", "gemma3", "gptj", "qwen2-moe", "gpt-oss", "lfm2", "falcon-h1", "mamba2", "jamba", *COMPILED_MIXED],
)
def test_many_threads_of_the_compiled_decoder_change_nothing(checkpoint: Checkpoint, family: str) -> None:
    many = run_mixed(load_arm(checkpoint(family), "compiled"))
    torch.set_num_threads(1)
    alone = run_mixed(load_arm(checkpoint(family), "compiled"))
    assert [run.tokens for run in many] == [run.tokens for run in alone]


@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_lent_cores_come_and_go(checkpoint: Checkpoint, quantize: str) -> None:
    runner = load_arm(checkpoint("llama"), "compiled", quantize=quantize)
    own: Cores = ()
    lent: Cores = (max(os.sched_getaffinity(0)),)
    runs = []
    for cores in (own, lent, own):
        runner.use_cores(cores)
        runs.append([run.tokens for run in run_mixed(runner)])
    assert runs[0] == runs[1] == runs[2]
