"""PromptPace in virtual time, alone and with the scheduler that it limits."""

import pytest

from engine.kv.block_pool import BlockPool
from engine.prompt_pace import PromptPace
from engine.runner import RunnerOutput
from engine.scheduler import Scheduler
from engine.sequence import SequenceState
from engine.settings import SchedulerConfig
from mesh.domain.tokens import SampledToken
from tests.fakes.requests import make_request

DECODE_S, TOKEN_S = 0.010, 0.0001


def run(pace: PromptPace, num_steps: int, decode_s: float = DECODE_S, token_s: float = TOKEN_S) -> list[float]:
    """Seconds of steps that have as many prompt tokens as the pace allows."""
    seconds = []
    for _ in range(num_steps):
        num_tokens = pace.max_prompt_tokens()
        assert num_tokens is not None
        seconds.append(decode_s + token_s * num_tokens)
        pace.observe(4, num_tokens, seconds[-1])
    return seconds


def test_without_a_limit_nothing_is_limited() -> None:
    pace = PromptPace()
    pace.observe(4, 0, DECODE_S)
    assert pace.max_prompt_tokens() is None


@pytest.mark.parametrize("stretch", [1.5, 2.0, 4.0])
def test_steps_with_prompts_are_as_long_as_the_limit_says(stretch: float) -> None:
    pace = PromptPace(stretch)
    run(pace, 20)
    mixed = [seconds for seconds in run(pace, 64) if seconds > DECODE_S]
    assert max(mixed) == pytest.approx(stretch * DECODE_S, rel=0.02)


def test_one_step_in_sixteen_is_measured_without_prompts_and_the_pace_follows_the_load() -> None:
    pace = PromptPace(2.0)
    run(pace, 20)
    assert sum(seconds == DECODE_S for seconds in run(pace, 160)) == 10
    slower = run(pace, 400, decode_s=5 * DECODE_S)
    assert slower[-2] == pytest.approx(10 * DECODE_S, rel=0.05)
    quicker = run(pace, 400, decode_s=DECODE_S)
    assert quicker[-2] == pytest.approx(2 * DECODE_S, rel=0.1)


def test_a_prompt_gets_ahead_however_dear_its_tokens_are() -> None:
    pace = PromptPace(1.1)
    run(pace, 4, token_s=1.0)
    assert pace.max_prompt_tokens() == 8


def test_a_step_of_prompts_alone_teaches_nothing() -> None:
    pace = PromptPace(2.0)
    pace.observe(0, 256, 5.0)
    assert pace.max_prompt_tokens() == 0  # the first step with decodes is measured without prompts


@pytest.mark.parametrize(("is_transferred", "sizes"), [(True, [1, 10]), (False, [1, 63])])
def test_the_scheduler_limits_prompts_beside_sequences_that_were_prefilled_elsewhere(
    is_transferred: bool, sizes: list[int]
) -> None:
    scheduler = Scheduler(SchedulerConfig(16, max_batch_tokens=64, max_num_seqs=8, max_model_len=512), BlockPool(64))
    first = SequenceState(make_request("first", [1] * 40, max_new_tokens=50))
    if is_transferred:
        scheduler.reserve(first)
        scheduler.commit(first.key, 7)
    else:
        scheduler.add(first)
        run_step(scheduler, max_prompt_tokens=10)
    scheduler.add(SequenceState(make_request("second", [2] * 200, max_new_tokens=50)))
    for _ in range(3):
        assert run_step(scheduler, max_prompt_tokens=10) == sizes


def run_step(scheduler: Scheduler, max_prompt_tokens: int) -> list[int]:
    """Numbers of tokens of the sequences in the step."""
    batch = scheduler.schedule(max_prompt_tokens)
    sampled = (SampledToken(7, -0.5),)
    scheduler.update(batch, [RunnerOutput(sampled if item.needs_sampling else ()) for item in batch.items])
    return [item.num_tokens for item in batch.items]
