"""The engine says what Hugging Face transformers says, for every family, in mixed batches."""

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.load import RunnerSettings, load_model_runner
from tests.component.checkpoints import FAMILIES, build_checkpoint
from tests.component.driving import Driver
from tests.component.parity import check_half_precision, check_parity, prompts, run_mixed
from tests.fakes.requests import make_request

Checkpoint = Callable[[str], Path]


def settings(model_dir: Path, **changes: object) -> RunnerSettings:
    return RunnerSettings(model_dir, **{"num_blocks": 64, "block_size": 16, "layers_per_group": 2} | changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(checkpoint: Checkpoint, family: str) -> None:
    check_parity(checkpoint(family), settings(checkpoint(family)))


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2-window"])
def test_torch_backend(checkpoint: Checkpoint, family: str) -> None:
    check_parity(checkpoint(family), settings(checkpoint(family), attention="torch"))


def test_tiles_of_long_chunks(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.attention.torch_sdpa.MAX_MASK_ELEMENTS", 100)
    for family in ("llama", "mistral"):
        check_parity(checkpoint(family), settings(checkpoint(family)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_on_cpu(checkpoint: Checkpoint, dtype: str) -> None:
    tolerance = 0.3 if dtype == "bfloat16" else 0.05
    check_half_precision(checkpoint("qwen3"), settings(checkpoint("qwen3"), dtype=dtype), tolerance)


def test_sharded_checkpoint(tmp_path: Path) -> None:
    model_dir = build_checkpoint("qwen2-window", tmp_path, max_shard_size="100KB")
    assert len(list(model_dir.glob("*.safetensors"))) > 2
    check_parity(model_dir, settings(model_dir))


def test_batches_do_not_change_tokens(checkpoint: Checkpoint) -> None:
    mixed = run_mixed(settings(checkpoint("llama")))
    for run, prompt in zip(mixed, prompts(), strict=True):
        driver = Driver(load_model_runner(settings(checkpoint("llama"))), seed=1)
        alone = driver.add(make_request("alone", prompt, max_new_tokens=len(run.tokens)))
        driver.finish(alone)
        assert alone.token_ids == run.token_ids


@pytest.mark.parametrize("family", ["llama", "llama-dynamic", "mistral"])
def test_replay_continues_the_same(checkpoint: Checkpoint, family: str) -> None:
    driver = Driver(load_model_runner(settings(checkpoint(family))))
    prompt = prompts()[1]
    whole = driver.add(make_request("whole", prompt, max_new_tokens=12))
    driver.finish(whole)
    history = [*prompt, *whole.token_ids[:5]]
    replayed = driver.add(make_request("replay", history, max_new_tokens=12, num_prompt_tokens=len(prompt)))
    driver.finish(replayed, chunk=9)
    assert replayed.token_ids == whole.token_ids[5:]


def test_layer_groups_are_announced(checkpoint: Checkpoint) -> None:
    driver = Driver(load_model_runner(settings(checkpoint("llama"))))
    driver.step((driver.add(make_request("r", [1, 2, 3])), 3))
    assert driver.announced == [(0, 2), (2, 1)]


def test_prompt_logprobs_in_pieces(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.model_runner._MAX_LOGITS", 1000)
    check_parity(checkpoint("llama"), settings(checkpoint("llama")))


def test_empty_prompt_logprobs_for_one_token(checkpoint: Checkpoint) -> None:
    driver = Driver(load_model_runner(settings(checkpoint("llama"))))
    run = driver.add(make_request("r", [5], prompt_logprobs=True))
    driver.step((run, 1))
    assert run.prompt_logprobs == []
    assert len(run.tokens) == 1


def test_many_threads(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.attention.cpu._MIN_TOKENS_PER_THREAD", 1)
    monkeypatch.setattr("torch.get_num_threads", lambda: 3)
    check_parity(checkpoint("llama"), settings(checkpoint("llama")))
