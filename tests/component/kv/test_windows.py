"""KV behind sliding windows is freed, and nothing changes: long answers are those of transformers, token by token."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.engine import Engine
from engine.kv.block_pool import BlockPool
from engine.model_runner import ModelRunner
from engine.scheduler import Scheduler
from engine.sequence import SequenceState
from engine.settings import SchedulerConfig
from engine.speculation.drafters import Drafter, DraftModel
from mesh.domain.kv import Degrees
from mesh.domain.kv_groups import NO_BLOCK
from mesh.domain.request import SequenceSpec
from mesh.domain.tokens import SampledToken
from tests.component.arms import load_arm
from tests.component.checkpoints import WINDOW
from tests.component.parity import TOLERANCE, expect, prompts, run_mixed
from tests.component.ranks.ranked import ranked_runner
from tests.component.remote_families import load_reference
from tests.fakes.drafters import FakeDrafter, eager_speculator, known
from tests.fakes.requests import make_request

NUM_NEW = 5 * WINDOW
MODELS = [
    *((family, "compiled") for family in ("gemma2", "gpt-oss", "mistral", "gemma4", "llama4")),
    *((family, "torch") for family in ("qwen2-window", "gemma4-moe", "llama4")),
    ("gemma3n", "cpu"),
    ("gemma3", "stages"),
]


@contextmanager
def loaded(model_dir: Path, arm: str) -> Iterator[ModelRunner]:
    """With "stages" the compiled decoder has two, and two batches are in flight."""
    if arm != "stages":
        yield load_arm(model_dir, arm, num_blocks=400)
        return
    with ranked_runner(model_dir, Degrees(1, 2), num_blocks=400) as runner:
        yield runner


def serve(
    runner: ModelRunner, scheduler: Scheduler, asked: list[SequenceState], drafter: Drafter
) -> tuple[dict[str, list[SampledToken]], dict[str, int], int]:
    """Tokens and cached tokens of each request, whose preempted attempts are replayed, and the number of these."""
    engine = Engine(scheduler, runner, speculator=eager_speculator(drafter, 3))
    tokens: dict[str, list[SampledToken]] = {}
    cached: dict[str, int] = {}
    num_replays = 0
    for sequence in asked:
        scheduler.add(sequence)
    is_idle = False
    while scheduler.has_work or not is_idle:
        result = engine.step()
        is_idle = result.is_idle
        for output in result.outputs:
            tokens.setdefault(output.request_id, []).extend(output.tokens)
            cached.setdefault(output.request_id, output.cached_tokens)
        for lost in result.preempted:
            spec, done = lost.spec, tuple(token.id for token in tokens.get(lost.spec.request_id, ()))
            prompt = spec.token_ids[: spec.num_prompt_tokens]
            again = replace(spec, attempt=spec.attempt + 1, token_ids=(*prompt, *done))
            scheduler.add(SequenceState(again))
            num_replays += 1
        assert not result.failed
        scheduler.check_integrity()
    return tokens, cached, num_replays


def new_scheduler(
    runner: ModelRunner, num_blocks: int, max_batch_tokens: int = 13, max_in_flight: int = 1
) -> Scheduler:
    layout = runner.kv_cache.layout
    config = SchedulerConfig(
        layout.block_size,
        max_batch_tokens,
        10,
        max_model_len=200,
        max_in_flight=max_in_flight,
        windows=layout.windows,
        windows_are_chunks=layout.windows_are_chunks,
    )
    return Scheduler(config, BlockPool(num_blocks))


def with_forks(spec: SequenceSpec) -> SequenceState:
    sequence = SequenceState(spec)
    sequence.forks = [SequenceState(replace(spec, request_id=f"{spec.request_id}-{fork}")) for fork in range(2)]
    return sequence


@pytest.mark.parametrize(("family", "arm"), MODELS)
def test_long_answers_are_those_of_transformers(checkpoint: Callable[[str], Path], family: str, arm: str) -> None:
    with loaded(checkpoint(family), arm) as runner:
        check_long_answers(runner, checkpoint(family), family, max_in_flight=2 if arm == "stages" else 1)


def check_long_answers(runner: ModelRunner, model_dir: Path, family: str, max_in_flight: int) -> None:
    groups, model = runner.kv_cache.layout.groups, load_reference(model_dir)
    assert groups.have_windows
    assert (groups.count == 1) == (family == "mistral")
    expected = [expect(model, prompt, NUM_NEW) for prompt in prompts()]
    answers = {f"{i}{fork}": each.token_ids for i, each in enumerate(expected) for fork in ("", "-0", "-1")}
    drafter = FakeDrafter(known(answers), 0.3)
    requests = [make_request(str(i), each.prompt, max_new_tokens=NUM_NEW) for i, each in enumerate(expected)]

    def check(tokens: dict[str, list[SampledToken]]) -> None:
        for name, found in tokens.items():
            of_prompt = expected[int(name[0])]
            assert [token.id for token in found] == of_prompt.token_ids
            rows = of_prompt.logprobs[len(of_prompt.prompt) - 1 :]
            logprobs = [float(row[token.id]) for row, token in zip(rows, found, strict=True)]
            assert [token.logprob for token in found] == pytest.approx(logprobs, abs=TOLERANCE)

    scheduler = new_scheduler(runner, runner.kv_cache.num_blocks, max_in_flight=max_in_flight)
    tokens, _, _ = serve(runner, scheduler, [with_forks(request) for request in requests], drafter)
    check(tokens)
    assert len(tokens) == 9
    assert scheduler.load().drafted_tokens > 0
    again = [SequenceState(replace(request, attempt=9)) for request in requests]
    tokens, cached, _ = serve(runner, scheduler, again, drafter)
    check(tokens)
    size = groups.block_size
    assert cached == {str(i): (len(each.prompt) - 1) // size * size for i, each in enumerate(expected)}
    longest = max(len(prompt) for prompt in prompts()) + NUM_NEW
    few_blocks = groups.num_blocks_at_once(longest, 13) + groups.count + 1
    few = new_scheduler(runner, few_blocks, max_in_flight=max_in_flight)
    twice = [replace(request, request_id=name) for i, request in enumerate(requests) for name in (f"{i}", f"{i}-0")]
    tokens, _, num_replays = serve(runner, few, [SequenceState(request) for request in twice], drafter)
    check(tokens)
    assert num_replays or family in ("mistral", "llama4"), "where little is held behind admission, all fit"


def test_a_draft_model_has_its_kv_in_the_blocks_of_the_first_group(checkpoint: Callable[[str], Path]) -> None:
    """A model that drafts for itself is always right."""
    runner, draft = (
        load_arm(checkpoint("qwen2-window"), "torch", num_blocks=200, keep_all_kv=keep) for keep in (False, True)
    )
    drafter = DraftModel(draft, runner.kv_cache.layout, max_model_len=200, max_batch_tokens=64)
    scheduler, prompt = new_scheduler(runner, 200, max_batch_tokens=64), prompts()[2]
    serve(runner, scheduler, [SequenceState(make_request("a", prompt, max_new_tokens=NUM_NEW))], drafter)
    assert scheduler.load().accepted_tokens == scheduler.load().drafted_tokens > NUM_NEW // 2


@pytest.mark.parametrize("arm", ["compiled", "cpu"])
@pytest.mark.parametrize("family", ["gemma4", "gemma4-moe"])
def test_int8_kv_of_one_group_is_no_scale_of_another(checkpoint: Callable[[str], Path], family: str, arm: str) -> None:
    """Its groups have heads of two sizes, so that scales lie where another group has numbers: four of -1 are a NaN."""
    runner = load_arm(checkpoint(family), arm, kv_dtype="int8", num_blocks=400)
    fresh = run_mixed(runner)
    runner.kv_cache.tensor.view(torch.uint8)[:, :, NO_BLOCK + 1 :] = 0xFF
    again = run_mixed(runner)
    assert [run.tokens for run in again] == [run.tokens for run in fresh]
    assert [run.prompt_logprobs for run in again] == [run.prompt_logprobs for run in fresh]
