"""Encoder-decoder models say what transformers says: in mixed batches, in every way they compute, and after replays."""

import shutil
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.t5.modeling_t5 import T5Attention

from checkpoint.model_facts import read_model_facts
from decode_worker.settings import DecodeSettings
from engine.loading.load_runner import draft_block_bytes, load_model_runner
from engine.model_runner import ModelRunner
from engine.models.encoder_decoder.step import PositionBias
from engine.models.read_config import load_config, load_decoder_config
from engine.settings import Speculation
from mesh.domain.errors import ConfigurationError
from mesh.domain.worker import WorkerRole
from router.served_model import LimitPolicy
from router.settings import RouterSettings
from router.workers.membership import capacity_tokens
from tests.component.arms import ARMS, settings
from tests.component.driving import Driver, Run
from tests.component.encoder_decoders import FORMS, START_TOKEN_ID, EncoderDecoderReference, build_encoder_decoder
from tests.component.sampling.test_speculation import answer, ids
from tests.component.test_load import edit_config
from tests.defects import Repaired
from tests.fakes.drafters import FakeDrafter, known
from tests.fakes.requests import make_request
from tests.made_once import made_once
from worker.load_engine import load_engine
from worker.runner_settings import EngineLimits

TOLERANCE = 1e-4
NUM_NEW = 40
LENGTHS = (1, 15, 16, 33, 70)
PROMPTS = tuple(tuple((7 * i + 31 * j) % 260 + 3 for j in range(length)) for i, length in enumerate(LENGTHS))

Checkpoint = Callable[[str], Path]


@pytest.fixture(scope="session")
def encoder_decoder(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return lambda form: made_once(tmp_path_factory, form, partial(build_encoder_decoder, form))


@pytest.fixture(scope="session")
def reference(encoder_decoder: Checkpoint) -> Callable[[str], EncoderDecoderReference]:
    return lru_cache(lambda form: EncoderDecoderReference.load(encoder_decoder(form)))


def runner_of(model_dir: Path, arm: str = "cpu", **changes: object) -> ModelRunner:
    runner = load_model_runner(settings(model_dir, **{"num_blocks": 160} | ARMS[arm] | changes))
    assert runner.attention_backend == arm
    return runner


def add(driver: Driver, name: str, prompt: tuple[int, ...], generated: tuple[int, ...] = (), **options: object) -> Run:
    ids = (*prompt, START_TOKEN_ID, *generated)
    options = {"max_new_tokens": NUM_NEW, "num_prompt_tokens": len(prompt) + 1, "top_logprobs": 3} | options
    return driver.add(make_request(name, ids, **options))


def run_mixed(runner: ModelRunner) -> list[Run]:
    """Prompts of different lengths, alone and two in a step, beside decodes, which join and leave."""
    driver = Driver(runner)
    runs = [add(driver, f"r{i}", prompt, max_new_tokens=NUM_NEW - 3 * i) for i, prompt in enumerate(PROMPTS)]
    driver.step((runs[0], 2))
    driver.step((runs[0], 1), (runs[1], 16), (runs[2], 17))
    driver.step((runs[0], 1), (runs[1], 1), (runs[2], 1), (runs[3], 34))
    driver.step((runs[2], 1), (runs[0], 1))
    driver.finish(*runs)
    return runs


def require_same(run: Run, theirs: EncoderDecoderReference) -> None:
    spec = run.sequence.spec
    prompt, before = spec.token_ids[: spec.num_prompt_tokens - 1], spec.token_ids[spec.num_prompt_tokens :]
    rows = theirs.logprobs(prompt, [*before, *run.token_ids])[len(before) :]
    for token, row in zip(run.tokens, rows, strict=True):
        assert token.id == int(row.argmax())
        assert token.logprob == pytest.approx(float(row[token.id]), abs=TOLERANCE)
        assert [top.logprob for top in token.top] == pytest.approx(row.topk(3).values.tolist(), abs=TOLERANCE)


@pytest.mark.parametrize("arm", ["cpu", "torch"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form(
    encoder_decoder: Checkpoint, reference: Callable[[str], EncoderDecoderReference], form: str, arm: str
) -> None:
    for run in run_mixed(runner_of(encoder_decoder(form), arm)):
        require_same(run, reference(form))


def test_tokens_are_those_of_generate(
    encoder_decoder: Checkpoint, reference: Callable[[str], EncoderDecoderReference]
) -> None:
    driver = Driver(runner_of(encoder_decoder("t5-1.1")))
    run = add(driver, "r", PROMPTS[3])
    driver.finish(run)
    theirs = reference("t5-1.1").generate(PROMPTS[3], NUM_NEW, eos_token_id=None, use_cache=False)
    assert run.token_ids == theirs
    assert len(set(theirs)) > 5


def test_penalties_look_at_the_decoders_tokens_only(
    encoder_decoder: Checkpoint, reference: Callable[[str], EncoderDecoderReference]
) -> None:
    driver = Driver(runner_of(encoder_decoder("t5-1.1")))
    run = add(driver, "r", PROMPTS[3], sampling={"repetition_penalty": 1.5})
    driver.finish(run)
    options = {"eos_token_id": None, "use_cache": False, "repetition_penalty": 1.5}
    assert run.token_ids == reference("t5-1.1").generate(PROMPTS[3], NUM_NEW, **options)


def test_tiles_of_long_prompts(
    encoder_decoder: Checkpoint,
    reference: Callable[[str], EncoderDecoderReference],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.models.encoder_decoder.step._MAX_BIAS_ELEMENTS", 1000)
    driver = Driver(runner_of(encoder_decoder("t5")))
    run = add(driver, "r", PROMPTS[4], max_new_tokens=3)
    driver.finish(run)
    require_same(run, reference("t5"))


@pytest.mark.parametrize("cut", [1, 7, 30])
def test_a_replay_goes_on_the_same(encoder_decoder: Checkpoint, cut: int) -> None:
    driver = Driver(runner_of(encoder_decoder("t5")))
    whole = add(driver, "whole", PROMPTS[3])
    driver.finish(whole)
    again = add(driver, "again", PROMPTS[3], tuple(whole.token_ids[:cut]))
    beside = add(driver, "beside", PROMPTS[1])
    driver.finish(again, beside)
    assert again.token_ids == whole.token_ids[cut:]
    for ours, theirs in zip(again.tokens, whole.tokens[cut:], strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)


def test_guesses_change_no_token(encoder_decoder: Checkpoint) -> None:
    runner = runner_of(encoder_decoder("t5-1.1"))
    asked = [
        make_request(f"r{i}", (*prompt, START_TOKEN_ID), max_new_tokens=30) for i, prompt in enumerate(PROMPTS[:4])
    ]
    plain, _ = answer(runner, None, asked, whole_prompts=True)
    guessed, scheduler = answer(runner, FakeDrafter(known(ids(plain)), mistakes=0.3), asked, whole_prompts=True)
    assert ids(guessed) == ids(plain)
    assert scheduler.load().accepted_tokens > 10


def test_layer_groups_are_announced(encoder_decoder: Checkpoint) -> None:
    driver = Driver(runner_of(encoder_decoder("t5")))
    driver.step((add(driver, "r", PROMPTS[1]), 16))
    assert driver.announced == [(0, 2), (2, 1)]


@pytest.mark.parametrize("kv_dtype", ["float16", "int8", "fp8"])
def test_kv_in_fewer_bits(
    encoder_decoder: Checkpoint, reference: Callable[[str], EncoderDecoderReference], kv_dtype: str
) -> None:
    driver = Driver(runner_of(encoder_decoder("t5"), "torch" if kv_dtype == "fp8" else "cpu", kv_dtype=kv_dtype))
    run = add(driver, "r", PROMPTS[3], max_new_tokens=12)
    driver.finish(run)
    rows = reference("t5").logprobs(PROMPTS[3], run.token_ids)
    differences = [abs(token.logprob - float(row[token.id])) for token, row in zip(run.tokens, rows, strict=True)]
    assert 0 < max(differences) < (0.01 if kv_dtype == "float16" else 0.3)


@pytest.mark.parametrize("form", ["t5", "t5-1.1"])
def test_int8_stays_close(
    encoder_decoder: Checkpoint, reference: Callable[[str], EncoderDecoderReference], form: str
) -> None:
    driver = Driver(runner_of(encoder_decoder(form), quantize="int8", kv_dtype="float32"))
    run = add(driver, "r", PROMPTS[3], max_new_tokens=12)
    driver.finish(run)
    rows = reference(form).logprobs(PROMPTS[3], run.token_ids)
    differences = [abs(token.logprob - float(row[token.id])) for token, row in zip(run.tokens, rows, strict=True)]
    assert 0 < max(differences) < 0.5


def test_what_is_refused(encoder_decoder: Checkpoint) -> None:
    model_dir = encoder_decoder("t5")
    with pytest.raises(ConfigurationError, match="decoder-only"):
        load_decoder_config(model_dir)
    assert load_config(model_dir).whole_prompts
    with pytest.raises(ConfigurationError, match=r"draft_model .*/t5 does not fit T5For"):
        draft_block_bytes(Speculation("draft", 4, model_dir), settings(model_dir))
    with pytest.raises(ConfigurationError, match=r"set kv_dtype to another type than int8, or dtype to float32$"):
        load_model_runner(settings(model_dir, dtype="float16", kv_dtype="int8"))
    driver = Driver(runner_of(model_dir))
    with pytest.raises(ValueError, match="in one step"):
        driver.step((add(driver, "r", PROMPTS[3]), 10))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"relative_attention_num_buckets": 3}, "relative_attention_num_buckets must be an integer from 4 on, got 3"),
        ({"relative_attention_num_buckets": 1}, "relative_attention_num_buckets must be an integer from 4 on, got 1"),
        (
            {"relative_attention_num_buckets": 9, "relative_attention_max_distance": 4},
            "relative_attention_max_distance must be an integer from 5 on, got 4",
        ),
    ],
)
def test_distances_that_have_no_scale(
    encoder_decoder: Checkpoint, tmp_path: Path, changes: dict[str, int], message: str
) -> None:
    model_dir = shutil.copytree(encoder_decoder("t5"), tmp_path / "model")
    edit_config(model_dir, **changes)
    with pytest.raises(ConfigurationError, match=message):
        load_config(model_dir)


@pytest.mark.parametrize("both_directions", [True, False])
@pytest.mark.parametrize("num_buckets", [4, 5, 7, 9, 32, 33])
def test_any_number_of_buckets_is_that_of_transformers(num_buckets: int, both_directions: bool) -> None:
    distances, longest = torch.arange(-40, 41), num_buckets // 2 + 1
    for max_distance in (longest, longest + 1, 128):
        bias = PositionBias(torch.arange(num_buckets).float()[:, None], max_distance, both_directions=both_directions)
        ours = bias(torch.tensor([0]), distances)[0, 0].long()
        theirs = T5Attention._relative_position_bucket(distances, both_directions, num_buckets, max_distance)
        assert ours.tolist() == theirs.tolist(), max_distance


@pytest.mark.parametrize("form", ["t5", "t5-1.1"])
@pytest.mark.parametrize("growth", [1.0, 1e4])
def test_float16_keeps_large_numbers(
    encoder_decoder: Checkpoint, tmp_path: Path, form: str, growth: float, repaired: Repaired
) -> None:
    """With a growth of 10,000 the residual passes fp16's 65,504, as in the large T5s."""
    model_dir = Path(shutil.copytree(encoder_decoder(form), tmp_path / form))
    tensors = {
        name: tensor * (growth if name.endswith("DenseReluDense.wo.weight") else 1.0)
        for name, tensor in load_file(model_dir / "model.safetensors").items()
    }
    save_file(tensors, model_dir / "model.safetensors", metadata={"format": "pt"})
    theirs = EncoderDecoderReference.load(model_dir)
    driver = Driver(runner_of(model_dir, "torch", dtype="float16"))
    run = add(driver, "r", PROMPTS[3], max_new_tokens=8)
    driver.finish(run)
    rows = theirs.logprobs(PROMPTS[3], run.token_ids)
    largest = max(abs(token.logprob - float(row[token.id])) for token, row in zip(run.tokens, rows, strict=True))
    assert largest < 0.05
    repaired("M16", "T5 in fp16 with residuals over 65,504: log-probs within 0.05 of fp32's")


def test_the_longest_sequence_is_what_clients_count(encoder_decoder: Checkpoint, repaired: Repaired) -> None:
    for asked, longest in ((0, 2048), (100, 100)):
        worker = DecodeSettings(
            model=str(encoder_decoder("t5")), registry_address="none", kv_cache_bytes=1 << 24, max_model_len=asked
        )
        engine_limits = EngineLimits(64, 4)
        info = load_engine(worker, engine_limits).worker_info(WorkerRole.DECODE, engine_limits)
        router = RouterSettings(model=worker.model)
        limits = LimitPolicy(router, read_model_facts(encoder_decoder("t5"))).resolve({capacity_tokens(info)})
        assert limits.max_total_tokens == longest
    repaired("M16", "T5's longest total is 2,048 tokens, as the documentation says")


def test_bfloat16_is_near(encoder_decoder: Checkpoint, reference: Callable[[str], EncoderDecoderReference]) -> None:
    driver = Driver(runner_of(encoder_decoder("t5"), "torch", dtype="bfloat16"))
    run = add(driver, "r", PROMPTS[1], max_new_tokens=4)
    driver.finish(run)
    rows = reference("t5").logprobs(PROMPTS[1], run.token_ids)
    for token, row in zip(run.tokens, rows, strict=True):
        assert token.logprob == pytest.approx(float(row[token.id]), abs=0.5)
    assert not torch.isnan(rows).any()
