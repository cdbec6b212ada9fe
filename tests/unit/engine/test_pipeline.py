"""An engine with several batches in flight: same tokens, no sequence in two, nothing freed or left behind."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import ScheduledBatch
from engine.engine import Engine, StepResult
from engine.kv.block_pool import BlockPool
from engine.runner import FinishBatch, LayerHook
from engine.scheduler import Scheduler
from engine.sequence import SequenceState
from engine.settings import SchedulerConfig
from engine.speculation.drafters import NgramDrafter
from mesh.domain.tokens import SequenceKey
from tests.fakes.drafters import eager_speculator
from tests.fakes.requests import make_request
from tests.fakes.runner import FAKE_LAYOUT, FakeKVStore, FakeRunner, fake_continuation

NUM_BLOCKS = 14


class StagedRunner(FakeRunner):
    """A FakeRunner whose steps end later, in the order in which they began."""

    def __init__(self, max_in_flight: int) -> None:
        super().__init__(FakeKVStore(NUM_BLOCKS))
        self.in_flight: list[ScheduledBatch] = []
        self.known: set[SequenceKey] = set()
        """Sequences that it has computed and not forgotten."""
        self._max_in_flight = max_in_flight

    @property
    def computing(self) -> list[SequenceKey]:
        return [item.sequence.key for batch in self.in_flight for item in batch.items]

    def begin(self, batch: ScheduledBatch, on_layers: LayerHook | None = None) -> FinishBatch:
        finish = super().begin(batch, on_layers)
        self.in_flight.append(batch)
        assert len(self.in_flight) <= self._max_in_flight
        assert len(self.computing) == len(set(self.computing)), "a sequence is in flight twice"
        self.known.update(self.computing)

        def end() -> list:
            assert self.in_flight.pop(0) is batch, "steps are finished in another order than they began"
            return finish()

        return end

    def forget(self, sequence: SequenceState) -> None:
        assert sequence.key not in self.computing
        self.known.discard(sequence.key)


class Rig:
    """An engine with what it has answered."""

    def __init__(self, max_in_flight: int, *, guesses: bool = False) -> None:
        config = SchedulerConfig(
            FAKE_LAYOUT.block_size, max_batch_tokens=12, max_num_seqs=8, max_model_len=40, max_in_flight=max_in_flight
        )
        self.runner = StagedRunner(max_in_flight)
        self.scheduler = Scheduler(config, BlockPool(NUM_BLOCKS))
        speculator = eager_speculator(NgramDrafter(), 3) if guesses else None
        self.engine = Engine(self.scheduler, self.runner, speculator=speculator)
        self.sequences: list[SequenceState] = []
        self.answers: dict[str, list[int]] = {}
        self.finished: set[str] = set()

    def add(self, prompt: list[int], max_new: int) -> None:
        request = make_request(f"r{len(self.sequences)}", prompt, max_new_tokens=max_new)
        self.sequences.append(SequenceState(request))
        self.scheduler.add(self.sequences[-1])
        self.answers[request.request_id] = []

    def step(self) -> StepResult:
        result = self.engine.step()
        for output in result.outputs:
            assert output.first_index == len(self.answers[output.request_id])
            self.answers[output.request_id] += [token.id for token in output.tokens]
            if output.finish_reason is not None:
                self.finished.add(output.request_id)
        self.scheduler.check_integrity()
        return result

    def run(self) -> None:
        while not self.step().is_idle:
            pass


PROMPTS = st.lists(st.integers(1, 2), min_size=1, max_size=14)
ACTIONS = st.one_of(
    st.tuples(st.just("add"), PROMPTS, st.integers(1, 12)),
    st.tuples(st.just("abort"), st.integers(0, 20)),
    st.tuples(st.just("step")),
)


@given(st.integers(1, 4), st.booleans(), st.lists(ACTIONS, max_size=60))
@settings(max_examples=200)
def test_tokens_are_those_of_one_batch_in_flight(max_in_flight: int, guesses: bool, actions: list[tuple]) -> None:
    rig, aborted, preempted = Rig(max_in_flight, guesses=guesses), set(), set()
    for name, *arguments in actions:
        if name == "add":
            rig.add(*arguments)
        elif name == "abort" and rig.sequences:
            sequence = rig.sequences[arguments[0] % len(rig.sequences)]
            rig.engine.abort(sequence)
            aborted.add(sequence.spec.request_id)
        elif name == "step":
            preempted.update(each.spec.request_id for each in rig.step().preempted)
    while not (result := rig.step()).is_idle or result.preempted:
        preempted.update(each.spec.request_id for each in result.preempted)
    for sequence in rig.sequences:
        name, spec = sequence.spec.request_id, sequence.spec
        expected = fake_continuation(spec.token_ids, spec.sampling.max_new_tokens)
        assert rig.answers[name] == expected[: len(rig.answers[name])]
        assert name in rig.finished | aborted | preempted
        assert name not in rig.finished or rig.answers[name] == expected
    assert rig.runner.known == set()
    assert rig.scheduler.pool.num_free == NUM_BLOCKS


def keys_of(batch: ScheduledBatch) -> list[str]:
    return [item.sequence.spec.request_id for item in batch.items]


@pytest.mark.parametrize(("max_in_flight", "sizes"), [(1, [5]), (2, [3, 2]), (3, [2, 2, 1])])
def test_sequences_are_dealt_out_evenly(max_in_flight: int, sizes: list[int]) -> None:
    rig = Rig(max_in_flight)
    for number in range(5):
        rig.add([number + 1], 6)
    batches: list[list[str]] = []
    begin: Callable[..., FinishBatch] = rig.runner.begin
    rig.runner.begin = lambda batch, *rest: (batches.append(keys_of(batch)), begin(batch, *rest))[1]  # type: ignore
    rig.run()
    assert [len(batch) for batch in batches[: 4 * max_in_flight]] == sizes * 4
    assert rig.finished == set(rig.answers)


def test_an_old_sequence_waits_for_the_younger_one_that_it_preempts() -> None:
    rig = Rig(2)
    for number in range(2):
        rig.add([number + 1] * 14, 26)  # together they need more blocks than there are
    results = [rig.step() for _ in range(60)]
    assert [each.spec.request_id for result in results for each in result.preempted] == ["r1"]
    assert rig.answers["r0"] == fake_continuation([1] * 14, 26)


def test_a_wait_for_a_batch_in_flight_counts_its_tokens() -> None:
    """Limits for steps that are stuck grow with their tokens."""
    rig, waited_for = Rig(2), []
    begin = rig.runner.begin

    def begin_and_note(batch: ScheduledBatch, on_layers: LayerHook | None = None) -> FinishBatch:
        finish = begin(batch, on_layers)

        def end() -> list:
            waited_for.append(rig.engine.num_step_tokens)
            return finish()

        return end

    rig.runner.begin = begin_and_note  # type: ignore[method-assign]
    rig.add([1] * 6, 1)
    rig.add([2] * 6, 1)
    while not rig.step().is_idle:
        rig.engine.num_step_tokens = 0  # as a command between two steps does
    assert waited_for == [12, 6]
