"""Choices that share their prompt's KV say what each of them says alone."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.engine import Engine
from engine.kv.block_pool import BlockPool
from engine.model_runner import ModelRunner
from engine.scheduler import Scheduler
from engine.sequence import SequenceState
from engine.settings import SchedulerConfig
from engine.speculation.drafters import NgramDrafter
from engine.speculation.speculator import Speculator
from mesh.domain.request import Fork, SequenceSpec
from mesh.domain.tokens import SampledToken
from tests.component.arms import ARMS, load_arm
from tests.fakes.requests import make_request

Checkpoint = Callable[[str], Path]


def new_scheduler(runner: ModelRunner, num_blocks: int = 0, **limits: Any) -> Scheduler:
    layout = runner.kv_cache.layout
    config = SchedulerConfig(
        layout.block_size, max_num_seqs=16, max_model_len=512, state_blocks=layout.state_blocks, **limits
    )
    return Scheduler(config, BlockPool(num_blocks or runner.kv_cache.num_blocks))


def run(
    runner: ModelRunner,
    asked: list[SequenceState],
    speculator: Speculator | None = None,
    max_batch_tokens: int = 64,
    scheduler: Scheduler | None = None,
) -> tuple[dict[str, list[SampledToken]], int]:
    """Tokens by request, and the number of prompt tokens computed; without a prefix cache, or with the scheduler's."""
    scheduler = scheduler or new_scheduler(runner, max_batch_tokens=max_batch_tokens, prefix_caching=False)
    pool = scheduler.pool
    engine = Engine(scheduler, runner, speculator=speculator)
    for sequence in asked:
        scheduler.add(sequence)
    tokens: dict[str, list[SampledToken]] = {}
    while scheduler.has_work:
        for output in engine.step().outputs:
            tokens.setdefault(output.request_id, []).extend(output.tokens)
        scheduler.check_integrity()
    assert pool.num_free == pool.num_blocks
    return tokens, scheduler.load().computed_tokens


def choices(length: int, seed: int = 0) -> SequenceSpec:
    sampling = {"temperature": 0.9, "top_k": 30, "repetition_penalty": 1.2}
    request = make_request("0", [7 * i % 250 for i in range(length)], max_new_tokens=12, sampling=sampling)
    request = replace(request, sampling=replace(request.sampling, seed=seed))
    return replace(request, forks=tuple(Fork(str(number), 0, seed + number) for number in (1, 2, 3)), top_logprobs=2)


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("length", [1, 5, 33, 48])
def test_forks_are_what_each_is_alone(checkpoint: Checkpoint, arm: str, length: int) -> None:
    runner = load_arm(checkpoint("llama"), arm)
    request = choices(length)
    first = SequenceState(request)
    first.forks = [SequenceState(fork) for fork in request.forked()]
    together, num_computed = run(runner, [first])
    assert num_computed == (length if length > 1 else 0)
    assert len({tuple(token.id for token in tokens) for tokens in together.values()}) == 4
    for each in (replace(request, forks=()), *request.forked()):
        alone, _ = run(runner, [SequenceState(each)])
        if arm == "compiled":  # to the last bit
            assert together[each.request_id] == alone[each.request_id]
        shared, own = together[each.request_id], alone[each.request_id]
        assert [token.id for token in shared] == [token.id for token in own]
        assert [token.logprob for token in shared] == pytest.approx([token.logprob for token in own], abs=1e-4)


def test_forks_that_guess_ahead_are_the_same(checkpoint: Checkpoint) -> None:
    runner, request = load_arm(checkpoint("llama"), "compiled"), choices(37)
    answers = []
    for speculator in (None, Speculator(NgramDrafter(), 4)):
        first = SequenceState(replace(request, sampling=replace(request.sampling, temperature=0.3, max_new_tokens=40)))
        first.forks = [SequenceState(fork) for fork in first.spec.forked()]
        answers.append(run(runner, [first], speculator)[0])
    assert answers[0] == answers[1]
