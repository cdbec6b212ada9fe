"""The compiled decoder computes the very same numbers however a prompt is cut: in passes, behind a cached prefix, or
again by a replay; with sliding windows, too.
"""

import random
from functools import lru_cache
from pathlib import Path

import pytest

from engine.model_runner import ModelRunner
from tests.component import checkpoints
from tests.component.arms import load_arm
from tests.component.driving import Driver, Run
from tests.defects import Repaired
from tests.fakes.requests import make_request

WINDOWS = (5, 33, 40, 100)
NUM_NEW = 12
Numbers = list[float]


@lru_cache(maxsize=1)
def prompt() -> list[int]:
    generator = random.Random(3)
    return [generator.randrange(256) for _ in range(600)]


@pytest.fixture(scope="module", params=[None, *WINDOWS])
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with this window in all its layers; None: without."""
    facts = {"sliding_window": request.param, "head_dim": 32, "num_key_value_heads": 2, "max_position_embeddings": 1024}
    with pytest.MonkeyPatch.context() as patch:
        family = {"windowed": lambda: checkpoints.llama_like("mistral", **facts)}
        patch.setattr(checkpoints, "FAMILIES", family)
        return checkpoints.build_checkpoint("windowed", tmp_path_factory.mktemp("windowed"))


@pytest.fixture(params=[{}, {"quantize": "int8"}, {"kv_dtype": "float16"}], ids=["fp32", "int8", "kv16"])
def runner(request: pytest.FixtureRequest, model_dir: Path) -> ModelRunner:
    return load_arm(model_dir, "compiled", num_blocks=400, **request.param)


def begin(driver: Driver) -> Run:
    return driver.add(make_request("r", prompt(), max_new_tokens=NUM_NEW, prompt_logprobs=True))


def numbers(run: Run) -> Numbers:
    return [scored.logprob or 0.0 for scored in run.prompt_logprobs] + [token.logprob for token in run.tokens]


def whole(runner: ModelRunner) -> Run:
    driver = Driver(runner)
    run = begin(driver)
    driver.finish(run, chunk=512)
    return run


def test_passes_of_other_lengths(runner: ModelRunner, repaired: Repaired) -> None:
    expected = numbers(whole(runner))
    for first, chunk in ((64, 64), (50, 50), (16, 1000), (48, 33)):
        driver = Driver(runner, seed=chunk)
        run = begin(driver)
        driver.step((run, first))
        driver.finish(run, chunk=chunk)
        assert numbers(run) == expected
    repaired("M15", "passes of 33 to 584 tokens, prefix hits, preemptions; windows of 5 to 100: equal to the bit")


@pytest.mark.parametrize("cached", [16, 112, 560])
def test_a_cached_prefix(runner: ModelRunner, cached: int) -> None:
    """The blocks of a prefix that others computed in their passes are taken over."""
    expected = whole(runner)
    driver = Driver(runner)
    other = driver.add(make_request("other", prompt()[:cached], max_new_tokens=1))
    driver.finish(other, chunk=48)
    run = begin(driver)
    run.sequence.block_table = other.sequence.block_table[: cached // 16]
    run.sequence.num_computed_tokens = cached
    driver.finish(run)
    assert numbers(run) == [p.logprob for p in expected.prompt_logprobs[cached:]] + [t.logprob for t in expected.tokens]


@pytest.mark.parametrize("lost_after", [1, 7])
def test_a_replay(runner: ModelRunner, lost_after: int) -> None:
    expected = whole(runner)
    history = [*prompt(), *expected.token_ids[:lost_after]]
    driver = Driver(runner, seed=2)
    run = driver.add(make_request("r", history, max_new_tokens=NUM_NEW, num_prompt_tokens=len(prompt())))
    driver.finish(run, chunk=100)
    assert run.tokens == expected.tokens[lost_after:]
