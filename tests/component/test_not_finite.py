"""NaN and infinity: a request whose numbers are not finite fails by name, and nothing else changes."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.loading.load_runner import load_model_runner
from engine.model_runner import ModelRunner
from engine.models.read_config import load_decoder_config
from engine.models.result_rows import last_writing_layer
from engine.runner import RunnerOutput
from mesh.domain.errors import InvalidRequest, ModelFailed
from tests.component.arms import embedding, load_arm, settings
from tests.component.driving import Driver, Run
from tests.component.encoder_decoders import build_encoder_decoder
from tests.component.sampling.test_speculation import answer, ids
from tests.defects import Repaired
from tests.fakes.drafters import FakeDrafter
from tests.fakes.requests import make_request

Checkpoint = Callable[[str], Path]

BAD_TOKEN = 77
WAYS: dict[str, dict[str, Any]] = {
    "compiled": {},
    "compiled-int8": {"quantize": "int8"},
    "compiled-int8-kv16": {"quantize": "int8", "kv_dtype": "float16"},
    "cpu": {},
    "cpu-int8": {"quantize": "int8"},
    "torch": {},
    "torch-bfloat16": {"dtype": "bfloat16"},
    "torch-fp8": {"kv_dtype": "fp8"},
}


def load(model_dir: Path, way: str) -> ModelRunner:
    """A runner whose embedding of one token is NaN."""
    runner = load_arm(model_dir, way.partition("-")[0], **WAYS[way])
    embedding(runner)[BAD_TOKEN] = float("nan")
    return runner


def good_prompts() -> list[list[int]]:
    return [list(range(1, 21)), list(range(100, 140)), list(range(30, 37))]


def finished(driver: Driver, prompt: list[int], name: str = "good") -> Run:
    run = driver.add(make_request(name, prompt, max_new_tokens=6, top_logprobs=2))
    driver.finish(run)
    return run


def failure(output: RunnerOutput) -> str:
    assert isinstance(output.failure, ModelFailed)
    assert not output.tokens
    return str(output.failure)


def require_equal(run: Run, expected: Run, way: str) -> None:
    """Equal to the bit where a row does not depend on its batch: in the compiled decoder, and in int8."""
    if way == "compiled" or "int8" in way:
        assert run.tokens == expected.tokens
        return
    if way == "torch-bfloat16":  # nearly equal tokens may change places
        assert run.tokens[0].logprob == pytest.approx(expected.tokens[0].logprob, abs=0.3)
        return
    assert run.token_ids == expected.token_ids
    assert [t.logprob for t in run.tokens] == pytest.approx([t.logprob for t in expected.tokens], abs=1e-4)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", [0, 5, 17])
def test_one_fails_and_its_neighbours_do_not_notice(
    checkpoint: Checkpoint, way: str, place: int, repaired: Repaired
) -> None:
    runner = load(checkpoint("llama"), way)
    alone = [finished(Driver(runner, seed=seed), prompt) for seed, prompt in enumerate(good_prompts())]
    runner.kv_cache.clear_blocks(range(runner.kv_cache.num_blocks))
    driver = Driver(runner)
    good = [
        driver.add(make_request(f"good-{i}", p, max_new_tokens=6, top_logprobs=2)) for i, p in enumerate(good_prompts())
    ]
    bad_prompt = list(range(200, 218))
    bad_prompt[place] = BAD_TOKEN
    bad = driver.add(make_request("bad", bad_prompt))
    driver.step(*((run, len(run.sequence.token_ids) - 2) for run in good))
    outputs = driver.step((good[0], 1), (good[1], 2), (bad, 18), (good[2], 2))
    assert "NaN or infinity" in failure(outputs[2])
    assert [output.failure for output in outputs[:2] + outputs[3:]] == [None] * 3
    driver.finish(*good)
    for run, expected in zip(good, alone, strict=True):
        require_equal(run, expected, way)
    later = driver.add(make_request("later", good_prompts()[0], max_new_tokens=6, top_logprobs=2))
    later.sequence.block_table = bad.sequence.block_table[:]
    driver.finish(later)
    require_equal(later, alone[0], way)
    repaired("M7", "a request whose numbers are not finite fails by name; its neighbours get the very same numbers")


@pytest.mark.parametrize(
    ("family", "way"), [*(("llama", way) for way in WAYS), ("gemma2", "compiled"), ("granite", "compiled-int8")]
)
def test_a_generated_token_that_breaks(checkpoint: Checkpoint, family: str, way: str) -> None:
    """Logits may be capped (Gemma 2) or scaled (Granite) before their log-probs are computed."""
    runner = load(checkpoint(family), way)
    driver = Driver(runner)
    runs = [driver.add(make_request(name, range(20), max_new_tokens=8)) for name in ("good", "bad")]
    driver.step((runs[0], 20), (runs[1], 20))
    runs[1].sequence.token_ids[-1] = BAD_TOKEN
    outputs = driver.step((runs[0], 1), (runs[1], 1))
    assert outputs[0].failure is None
    failure(outputs[1])


@pytest.mark.parametrize(
    ("family", "way"),
    [
        *(("llama", way) for way in WAYS),
        *(("gemma4", "compiled"), ("gemma4", "cpu-int8"), ("gemma3n", "cpu")),
        *(("qwen3.5", way) for way in ("compiled", "cpu", "torch")),
        *(("bamba", "compiled"), ("lfm2", "cpu")),
    ],
)
def test_a_wrong_draft_that_breaks_changes_nothing(checkpoint: Checkpoint, family: str, way: str) -> None:
    runner = load(checkpoint(family), way)
    asked = [make_request(f"r{i}", prompt, max_new_tokens=12) for i, prompt in enumerate(good_prompts())]
    plain, _ = answer(runner, None, asked)
    bad = FakeDrafter(lambda sequence, most: ([BAD_TOKEN] * most) if sequence.spec.request_id == "r1" else [])
    drafted, scheduler = answer(runner, bad, asked)
    assert ids(drafted) == ids(plain)
    counters = scheduler.load()
    assert counters.drafted_tokens > counters.accepted_tokens == 0
    assert bool(torch.isfinite(runner.kv_cache.tensor.to(torch.float32)).all())


@pytest.mark.parametrize("family", ["llama", "falcon-h1"])
@pytest.mark.parametrize(("kv_dtype", "factor"), [("float32", 2e38), ("float16", 1e6), ("int8", 2e38)])
def test_values_of_the_last_layer_that_break(
    checkpoint: Checkpoint, tmp_path: Path, family: str, kv_dtype: str, factor: float
) -> None:
    """In a chunk of whose rows nobody reads the result: no later row may find it in the cache."""
    model_dir = tmp_path / family
    shutil.copytree(checkpoint(family), model_dir)
    layer, tensors = last_writing_layer(load_decoder_config(model_dir)), load_file(model_dir / "model.safetensors")
    tensors[f"model.layers.{layer}.self_attn.v_proj.weight"] *= factor
    save_file(tensors, model_dir / "model.safetensors", {"format": "pt"})
    driver = Driver(load_arm(model_dir, "compiled", kv_dtype=kv_dtype))
    [output] = driver.step((driver.add(make_request("bad", range(100, 160))), 40))
    assert "NaN or infinity" in failure(output)


@pytest.mark.parametrize(
    ("arm", "quantize"), [("compiled", "none"), ("compiled", "int8"), ("cpu", "none"), ("torch", "none")]
)
@pytest.mark.parametrize("layer", [0, -1])
@pytest.mark.parametrize(
    ("family", "name", "row"),
    [
        ("llama", "k_proj", 3),
        ("gemma2", "k_proj", 3),  # with a soft cap
        ("falcon-h1", "k_proj", 3),
        ("deepseek-v3", "kv_a_proj_with_mqa", -3),  # of those that are rotated
    ],
)
def test_keys_that_break(
    checkpoint: Checkpoint, tmp_path: Path, family: str, name: str, row: int, layer: int, arm: str, quantize: str
) -> None:
    """A number in a key is too large for KV of 16 bits: softmax may make any number of its score. Results
    of its head are NaN then, beside numbers of other heads in a row that is quantised next.
    """
    model_dir = tmp_path / family
    shutil.copytree(checkpoint(family), model_dir)
    tensors = load_file(model_dir / "model.safetensors")
    layer %= load_decoder_config(model_dir).num_layers
    tensors[f"model.layers.{layer}.self_attn.{name}.weight"][row] *= 1e7
    save_file(tensors, model_dir / "model.safetensors", {"format": "pt"})
    driver = Driver(load_arm(model_dir, arm, kv_dtype="float16", quantize=quantize))
    [output] = driver.step((driver.add(make_request("bad", range(100, 160))), 40))
    assert "NaN or infinity" in failure(output)


@pytest.mark.parametrize("arm", ["compiled", "cpu", "torch"])
def test_a_generated_token_whose_key_breaks(checkpoint: Checkpoint, tmp_path: Path, arm: str) -> None:
    model_dir = tmp_path / "llama"
    shutil.copytree(checkpoint("llama"), model_dir)
    tensors, prompt = load_file(model_dir / "model.safetensors"), list(range(100, 120))
    embeddings = tensors["model.embed_tokens.weight"] * tensors["model.layers.0.input_layernorm.weight"]
    others, bad = embeddings[prompt].double(), embeddings[BAD_TOKEN].double()
    apart = bad - torch.linalg.lstsq(others.T, bad).solution @ others  # the prompt's keys do not change with it
    tensors["model.layers.0.self_attn.k_proj.weight"] += (1e7 * apart / apart.norm()).float()
    save_file(tensors, model_dir / "model.safetensors", {"format": "pt"})
    driver = Driver(load_arm(model_dir, arm, kv_dtype="float16"))
    runs = [driver.add(make_request(name, prompt, max_new_tokens=8)) for name in ("good", "bad")]
    assert [output.failure for output in driver.step(*((run, len(prompt)) for run in runs))] == [None] * 2
    runs[0].sequence.token_ids[-1], runs[1].sequence.token_ids[-1] = prompt[0], BAD_TOKEN
    outputs = driver.step(*((run, 1) for run in runs))
    assert outputs[0].failure is None
    assert "NaN or infinity" in failure(outputs[1])


def test_a_failed_grammar_does_not_hide_what_breaks(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = load(checkpoint("llama"), "torch")
    monkeypatch.setattr(runner._masks, "failure", lambda _: "the grammar is too large")
    driver = Driver(runner)
    run = driver.add(make_request("bad", [1, BAD_TOKEN, *range(20)]))
    [output] = driver.step((run, 22))
    assert isinstance(output.failure, InvalidRequest)
    assert bool(torch.isfinite(runner.kv_cache.tensor).all())


def test_logits_alone_that_overflow(checkpoint: Checkpoint) -> None:
    runner = load_arm(checkpoint("llama"), "torch", dtype="float16")
    runner.model._output._lm_head._weight.mul_(1e5)
    driver = Driver(runner)
    failure(driver.step((driver.add(make_request("r", range(20))), 20))[0])


def test_prompt_logprobs_of_what_is_not_finite(checkpoint: Checkpoint) -> None:
    driver = Driver(load(checkpoint("llama"), "torch"))
    run = driver.add(make_request("bad", [1, BAD_TOKEN, *range(20)], prompt_logprobs=True))
    failure(driver.step((run, 8))[0])


def test_an_encoder_that_breaks(tmp_path: Path) -> None:
    runner = load_model_runner(settings(build_encoder_decoder("t5", tmp_path)))
    embedding(runner)[BAD_TOKEN] = float("nan")

    def neighbours_of(token: int) -> tuple[Run, list[Run]]:
        """The request with this token, and the others of its batch once they have ended. Batches are of equal shape,
        because that may change the last bit of the eager decoder's results.
        """
        prompts = [[5, 6, 7, 8, 1, 0], [9, token, 10, 1, 0], [*range(20, 40), 1, 0]]
        driver = Driver(runner)
        first, second, third = (
            driver.add(make_request(f"r{i}", prompt, max_new_tokens=5)) for i, prompt in enumerate(prompts)
        )
        outputs = driver.step(*((run, len(run.sequence.token_ids)) for run in (first, second, third)))
        if token == BAD_TOKEN:
            failure(outputs[1])
        driver.finish(first, third)
        return second, [first, third]

    _, calm = neighbours_of(8)
    broken, others = neighbours_of(BAD_TOKEN)
    assert not broken.tokens
    assert [run.tokens for run in others] == [run.tokens for run in calm]


@pytest.fixture(autouse=True)
def _in_place() -> Iterator[None]:
    with torch.no_grad():
        yield
