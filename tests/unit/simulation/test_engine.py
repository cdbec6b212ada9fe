"""The modelled engine in virtual time. Steps of its decodes take 10 ms for one sequence, 11 ms for two."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from engine.sequence import SequenceState
from mesh.domain.request import SamplingParams, SequenceSpec
from mesh.domain.tokens import SampledToken, SequenceOutput
from tandem_cli.simulation.engine import ModelledEngine
from tandem_cli.simulation.profile import WorkerProfile
from tandem_cli.simulation.virtual_time import run_in_virtual_time
from tests.unit.simulation.profiles import TIMES, worker

NO_CONTEXT = replace(worker(), times=replace(TIMES, prompt_context_s=0.0, decode_context_s=0.0))


def sequence(name: str, num_prompt: int, num_new: int, *, hand_over: bool = False) -> SequenceState:
    sampling = SamplingParams(max_new_tokens=num_new, seed=0, ignore_eos=True)
    return SequenceState(SequenceSpec(name, 0, (5,) * num_prompt, num_prompt, sampling), hand_over)


class Watched:
    """An engine with a log of its steps: end, sequences with their numbers of new tokens."""

    def __init__(self, profile: WorkerProfile) -> None:
        self.steps: list[tuple[float, dict[str, int]]] = []
        self.engine = ModelledEngine(profile, SampledToken(5, -1.0), self._note)

    def _note(self, outputs: list[SequenceOutput], preempted: list[SequenceState]) -> None:
        now_s = round(asyncio.get_running_loop().time(), 6)
        self.steps.append((now_s, {output.request_id: len(output.tokens) for output in outputs}))

    def add(self, sequence: SequenceState) -> None:
        self.engine.post(lambda scheduler: scheduler.add(sequence))


def run(
    profile: WorkerProfile, work: Callable[[Watched], None], later: dict[float, Callable[[Watched], None]]
) -> Watched:
    async def main() -> Watched:
        watched, loop = Watched(profile), asyncio.get_running_loop()
        work(watched)
        for at_s, more in later.items():
            loop.call_at(at_s, more, watched)
        await asyncio.sleep(100)
        watched.engine.scheduler.check_integrity()
        assert watched.engine.pool.num_free == profile.num_blocks
        return watched

    return run_in_virtual_time(main())


def test_steps_of_decodes_are_taken_at_once() -> None:
    watched = run(NO_CONTEXT, lambda watched: watched.add(sequence("a", 100, 51)), {})
    assert watched.steps == [(0.1, {"a": 1}), (0.6, {"a": 50})]
    assert watched.engine.busy_s == pytest.approx(0.6)


def test_a_sequence_holds_the_blocks_of_its_state() -> None:
    """Two sequences of 7 blocks fit without states; of 17 blocks each, the second waits for the first. With three
    groups of layers it has to wait, too, unless two of these see 16 tokens only.
    """

    def work(watched: Watched) -> None:
        watched.add(sequence("a", 100, 51))
        watched.add(sequence("b", 100, 51))

    windows = [({"windows": (0, *[seen] * 2)}, most) for seen, most in ((999, 1), (16, 2))]
    for facts, most in (({}, 2), ({"state_blocks": 10}, 1), *windows):
        watched = run(replace(NO_CONTEXT, num_blocks=33, **facts), work, {})
        assert max(len(tokens) for _, tokens in watched.steps) == most
        assert sum(sum(tokens.values()) for _, tokens in watched.steps) == 102


def test_steps_take_longer_while_neighbours_compute() -> None:
    """The neighbour computes from 0.3 s on, for a second."""
    stretched = replace(NO_CONTEXT, stretch=3.0)

    async def main() -> tuple[Watched, list[bool]]:
        watched, loop, busy = Watched(stretched), asyncio.get_running_loop(), list[bool]()
        watched.engine = ModelledEngine(
            stretched,
            SampledToken(5, -1.0),
            watched._note,
            neighbours=lambda: float(0.3 <= loop.time() < 1.3),
            on_busy=busy.append,
        )
        watched.add(sequence("a", 100, 71))
        await asyncio.sleep(100)
        return watched, busy

    watched, busy = run_in_virtual_time(main())
    # 0.1 s of prompt, 20 steps of 10 ms, 1 s of steps of 30 ms (34, planned in fives), 16 steps of 10 ms.
    assert watched.steps[-1][0] == pytest.approx(0.1 + 70 * 0.01 + 35 * 0.02, abs=0.11)
    assert sum(tokens["a"] for _, tokens in watched.steps) == 71
    assert busy == [True, False]


@pytest.mark.parametrize(("begun_s", "ended_s"), [(0.05, 100.0), (0.0, 0.15)], ids=["begins", "rests"])
def test_a_running_step_goes_on_at_another_pace(begun_s: float, ended_s: float) -> None:
    """The neighbour computes in one part of a prompt that takes 0.1 s alone: half of it takes three times as long."""
    stretched = replace(NO_CONTEXT, stretch=3.0)

    async def main() -> Watched:
        watched, loop = Watched(stretched), asyncio.get_running_loop()
        watched.engine = ModelledEngine(
            stretched, SampledToken(5, -1.0), watched._note, neighbours=lambda: float(begun_s <= loop.time() < ended_s)
        )
        for changed_s in (begun_s, ended_s):
            loop.call_at(changed_s, watched.engine.keep_pace)
        watched.add(sequence("a", 100, 1))
        await asyncio.sleep(100)
        return watched

    watched = run_in_virtual_time(main())
    assert watched.steps == [(0.2, {"a": 1})]
    assert watched.engine.busy_s == pytest.approx(0.2)


def test_prompts_beside_neighbours_have_a_pace_of_their_own() -> None:
    """The neighbour computes all the time: the prompt's 0.1 s take five times as long, decodes three times."""
    stretched = replace(NO_CONTEXT, stretch=3.0)

    async def main() -> Watched:
        watched = Watched(stretched)
        watched.engine = ModelledEngine(
            stretched, SampledToken(5, -1.0), watched._note, prompt_stretch=5.0, neighbours=lambda: 1.0
        )
        watched.add(sequence("a", 100, 2))
        await asyncio.sleep(100)
        return watched

    assert run_in_virtual_time(main()).steps == [(0.5, {"a": 1}), (0.53, {"a": 1})]


def test_a_newcomer_waits_for_the_running_step_only() -> None:
    watched = run(
        NO_CONTEXT,
        lambda watched: watched.add(sequence("a", 100, 51)),
        {0.125: lambda watched: watched.add(sequence("b", 100, 2))},
    )
    steps = dict(watched.steps)
    assert steps[0.13] == {"a": 3}
    # Decode and prompt share a step, which reads the weights once; the second step has both as decodes.
    assert steps[0.19] == {"a": 1, "b": 1}
    assert steps[0.201] == {"a": 1, "b": 1}
    assert sum(tokens.get("a", 0) for tokens in steps.values()) == 51


def test_a_long_prompt_is_computed_in_passes() -> None:
    watched = run(NO_CONTEXT, lambda watched: watched.add(sequence("a", 1000, 1)), {})
    assert watched.steps == [(0.512, {}), (1.0, {"a": 1})]
    assert watched.engine.prompt_tokens == 1000


def test_context_makes_steps_longer() -> None:
    watched = run(worker(), lambda watched: watched.add(sequence("a", 100, 51)), {})
    # 50 steps with contexts of 101 to 150 tokens.
    assert watched.steps[-1][0] == pytest.approx(0.1 + 50 * 0.01 + 50 * 125.5e-6, abs=1e-4)


@pytest.mark.parametrize("stop_s", [0.0, 0.05], ids=["idle", "in a step"])
def test_a_stopped_engine_computes_nothing_more(stop_s: float) -> None:
    async def main() -> Watched:
        watched = Watched(NO_CONTEXT)
        if stop_s:
            watched.add(sequence("a", 600, 51))
            await asyncio.sleep(stop_s)
        watched.engine.stop()
        watched.add(sequence("b", 100, 51))
        await asyncio.sleep(100)
        return watched

    assert run_in_virtual_time(main()).steps == []


def test_blocks_bound_the_steps_at_once_and_youngest_sequences_are_preempted() -> None:
    names: list[str] = []
    tight = replace(NO_CONTEXT, num_blocks=10)

    class Preempting(Watched):
        def _note(self, outputs: list[SequenceOutput], preempted: list[SequenceState]) -> None:
            names.extend(sequence.spec.request_id for sequence in preempted)
            super()._note(outputs, preempted)

    async def main() -> None:
        watched = Preempting(tight)
        watched.add(sequence("a", 60, 90))
        watched.add(sequence("b", 60, 90))
        await asyncio.sleep(100)
        assert sum(tokens.get("a", 0) for _, tokens in watched.steps) == 90
        watched.engine.scheduler.check_integrity()

    run_in_virtual_time(main())
    assert names == ["b"]
