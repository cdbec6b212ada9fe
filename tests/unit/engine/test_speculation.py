"""Guesses: what is looked up, what it costs, how many pay."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_worker.settings import DecodeSettings
from engine.batch import ScheduledBatch, ScheduledSequence
from engine.engine import Engine
from engine.kv.block_pool import BlockPool
from engine.runner import FinishBatch, LayerHook, RunnerOutput
from engine.scheduler import Scheduler
from engine.sequence import SequenceState
from engine.settings import SchedulerConfig, Speculation
from engine.speculation.cost import Acceptance, CostFit, DraftCosts, StepCost, plan_lengths
from engine.speculation.drafters import DraftModel, NgramDrafter
from engine.speculation.mtp import MtpDrafter
from mesh.domain.errors import ConfigurationError
from mesh.domain.tokens import SampledToken
from tandem_cli.model_files.model_folders import BUNDLED_MODELS
from tests.fakes.drafters import FakeDrafter, eager_speculator
from tests.fakes.requests import make_request
from tests.fakes.runner import FakeKVStore, FakeRunner, fake_continuation

DRAFT = BUNDLED_MODELS / "tandem-draft"

# int8, 135M parameters, one core: 10.4, 16.6 and 33.9 ms for 1, 8 and 32 tokens.
_CPU = DraftCosts(StepCost(0.0097, 0.00076), StepCost())


def look_up(token_ids: list[int], length: int) -> tuple[int, ...]:
    drafter, sequence = NgramDrafter(), SequenceState(make_request("a", token_ids))
    [limit] = drafter.limits([sequence], [length])
    [drafts] = drafter.draft([sequence], [limit])
    return drafts


def test_looks_up_what_followed_the_longest_match() -> None:
    assert look_up([7, 1, 2, 3, 40, 9, 1, 2, 3, 50, 8, 7, 1, 2, 3], 2) == (40, 9)
    assert look_up([9, 1, 2, 3, 40, 9, 1, 2, 3, 50, 8, 9, 1, 2, 3], 1) == (50,)  # the latest of equals
    assert look_up([1, 2, 3, 4, 2, 3], 4) == ()  # two tokens alike are too few
    assert look_up([5, 6, 5, 6, 5, 6], 5) == (5, 6, 5, 6, 5)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=60), st.integers(1, 6))
def test_an_index_that_grows_finds_what_a_new_one_does(token_ids: list[int], length: int) -> None:
    drafter, sequence = NgramDrafter(), SequenceState(make_request("a", token_ids[:1]))
    for token_id in token_ids[1:]:
        drafter.limits([sequence], [length])
        sequence.token_ids.append(token_id)
    limits = drafter.limits([sequence], [length])
    assert drafter.draft([sequence], limits) == [look_up(token_ids, length)]
    drafter.forget(sequence)


def test_a_long_prompt_is_indexed_over_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    token_ids = [*range(30), 1, 2, 3]
    expected = look_up(token_ids, 4)
    assert expected == (4, 5, 6, 7)
    monkeypatch.setattr("engine.speculation.drafters._MAX_INDEXED", 10)
    drafter, sequence = NgramDrafter(), SequenceState(make_request("a", token_ids))
    for _ in range(3):
        assert drafter.limits([sequence], [4]) == [0]
        assert drafter.draft([sequence], [0]) == [()]
    assert drafter.draft([sequence], drafter.limits([sequence], [4])) == [expected]


class FailingRunner(FakeRunner):
    """Its second step fails for one request."""

    def begin(self, batch: ScheduledBatch, on_layers: LayerHook | None = None) -> FinishBatch:
        self.refused = {"bad": "not finite"} if self.num_steps else {}
        return super().begin(batch, on_layers)


def test_a_draft_model_that_fails_for_a_request_drafts_for_the_others() -> None:
    store = FakeKVStore(8)
    runner = FailingRunner(store)
    drafter = DraftModel(runner, store.layout, max_model_len=100, max_batch_tokens=64)
    sequences = [SequenceState(make_request(name, [1, 2, 3])) for name in ("good", "bad")]
    for place, sequence in enumerate(sequences):
        sequence.block_table = [3 * place, 3 * place + 1, 3 * place + 2]
    limits = drafter.limits(sequences, [4, 4])
    good, bad = (tuple(fake_continuation([1, 2, 3], count)) for count in (4, 1))
    assert drafter.draft(sequences, limits) == [good, bad]
    assert drafter.limits(sequences, [4, 4]) == [4, 0]
    drafter.forget(sequences[1])
    assert drafter.limits(sequences, [4, 4]) == [4, 4], "another request may have its id"


def test_rounds_that_were_held_up_do_not_end_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does the first one of a process, which is slow."""
    times = iter([0.0, 1000.0, 1007.0])
    monkeypatch.setattr("engine.speculation.drafters.time", SimpleNamespace(perf_counter=lambda: next(times)))
    drafter = DraftModel(FakeRunner(store := FakeKVStore(8)), store.layout, max_model_len=100, max_batch_tokens=64)
    sequence = SequenceState(make_request("a", [1]))
    sequence.block_table = [0, 1, 2]
    sequence.token_ids += drafter.draft([sequence], [1])[0]
    assert drafter.round_cost() == StepCost(), "it was the first one"
    sequence.token_ids += drafter.draft([sequence], [1])[0]
    first = drafter.round_cost()
    assert first.seconds(1, 0) == pytest.approx(7.0, rel=0.1)
    later = [drafter.round_cost().seconds(1, 0) for _ in range(2000)]
    assert later == sorted(later, reverse=True)
    assert later[-1] < 1.0
    assert len(sequence.token_ids) == 3


class LayerRunner(FailingRunner):
    """Stands for a layer of multi-token prediction: a step has a hidden state for each token, and gives one."""

    def begin(self, batch: ScheduledBatch, on_layers: LayerHook | None = None) -> FinishBatch:
        assert sum(map(len, batch.previous)) == batch.num_tokens
        finish = super().begin(batch, on_layers)
        return lambda: [replace(output, hidden=list(output.tokens)) for output in finish()]  # type: ignore[arg-type]


def test_a_layer_that_fails_behind_its_first_draft_drafts_for_the_others() -> None:
    """It sees what follows the prompt alone, in the blocks from there on."""
    runner = LayerRunner(store := FakeKVStore(8))
    drafter = MtpDrafter(runner, store.layout, max_model_len=100, max_batch_tokens=64)
    sequences = [SequenceState(make_request(name, range(1, 7))) for name in ("good", "bad")]
    for place, sequence in enumerate(sequences):
        sequence.block_table = [4 * place, 4 * place + 1, 4 * place + 2]
        assert drafter.limits([sequence], [4]) == [0], "it has seen nothing yet"
        sampled = RunnerOutput((SampledToken(50, 0.0, ()),), hidden=[0])  # type: ignore[arg-type]
        drafter.learn(ScheduledSequence(sequence, 0, 6), sampled)
        sequence.token_ids.append(50)
    good, bad = (tuple(fake_continuation([50], count)) for count in (3, 1))
    assert drafter.draft(sequences, drafter.limits(sequences, [3, 3])) == [good, bad]
    assert drafter.limits(sequences, [4, 4]) == [4, 0]


def test_a_replay_that_is_handed_over_gets_one_token_and_no_guesses() -> None:
    """The last chunk of its prompt, whose end earlier attempts have generated, may be a single token."""
    config = SchedulerConfig(4, max_batch_tokens=8, max_num_seqs=2, max_model_len=64, prefix_caching=False)
    scheduler = Scheduler(config, BlockPool(8))
    drafter = FakeDrafter(lambda sequence, length: fake_continuation(sequence.token_ids, length))
    engine = Engine(scheduler, FakeRunner(FakeKVStore(8)), speculator=eager_speculator(drafter, 4))
    for name, is_handed_over in (("here", False), ("there", True)):
        known = [*range(1, 6), *fake_continuation(range(1, 6), 4)]
        request = make_request(name, known, num_prompt_tokens=5, max_new_tokens=20)
        scheduler.add(sequence := SequenceState(request, hand_over=is_handed_over))
        engine.step()
        [output] = engine.step().outputs
        assert len(output.tokens) == (1 if is_handed_over else 5)
        assert sequence.num_computed_tokens == len(known) + len(output.tokens) - 1
        engine.abort(sequence)
        scheduler.check_integrity()


def test_guesses_stop_where_they_do_not_pay() -> None:
    alone = plan_lengths([0.5], [8], _CPU)
    assert 2 <= alone[0] <= 4
    assert plan_lengths([0.05], [8], _CPU) == [0]
    assert plan_lengths([0.5] * 32, [8] * 32, _CPU) == [0] * 32
    mixed = plan_lengths([0.95, *[0.5] * 31], [8] * 32, _CPU)
    assert mixed[0] > 1
    assert set(mixed[1:]) == {0}
    assert plan_lengths([0.95], [0], _CPU) == [0]


def test_a_slow_guesser_must_be_good() -> None:
    as_slow_as_the_model = DraftCosts(_CPU.step, _CPU.step)
    assert plan_lengths([0.7], [8], as_slow_as_the_model) == [0]
    a_tenth = DraftCosts(_CPU.step, StepCost(0.001, 0.0001))
    assert plan_lengths([0.7], [8], a_tenth)[0] > 1


@given(
    st.lists(st.floats(0, 1), max_size=12), st.integers(0, 6), st.floats(0, 0.02), st.floats(0, 0.002), st.booleans()
)
def test_planned_guesses_make_more_tokens_a_second_than_none(
    rates: list[float], most: int, fixed_s: float, token_s: float, is_repeated: bool
) -> None:
    costs = DraftCosts(_CPU.step, StepCost(fixed_s, token_s), is_repeated)
    lengths = plan_lengths(rates, [most] * len(rates), costs)
    assert all(length <= most for length in lengths)
    tokens = sum(sum(rate**n for n in range(length + 1)) for rate, length in zip(rates, lengths, strict=True))
    rounds = [sum(length >= n for length in lengths) for n in range(1, max(lengths, default=0) + 1)]
    drafting_s = sum(costs.round.seconds(count, 0) for count in rounds)
    num_again = tokens - len(rates) if is_repeated else 0
    speed = tokens / (costs.step.seconds(len(rates) + sum(lengths) + num_again, len(rates)) + drafting_s)
    assert speed >= len(rates) / costs.step.seconds(len(rates), len(rates)) * 0.999


def test_cost_is_learnt_from_steps_and_survives_interruptions() -> None:
    fit = CostFit()
    for turn in range(200):
        num_tokens = 1 + turn % 5
        fit.learn(num_tokens, 1, _CPU.step.seconds(num_tokens, 1) * (40 if turn % 50 == 49 else 1))
    assert 0.7 < fit.cost.fixed_s / _CPU.step.fixed_s < 1.4
    assert 0.3 < fit.cost.token_s / _CPU.step.token_s < 3


def test_sequences_and_tokens_have_costs_of_their_own() -> None:
    """Without drafts, nobody could tell. A step with drafts tells at once, and drafts that seemed to pay stop."""
    costs, fit = {"sequences": StepCost(0.02, 0.003, 0.008), "tokens": StepCost(0.02, 0.011)}, {}
    for name, cost in costs.items():
        fit[name] = CostFit()
        for num_sequences in (1, 2, 4, 8):
            for _ in range(20):
                fit[name].learn(num_sequences, num_sequences, cost.seconds(num_sequences, num_sequences))
    assert fit["sequences"].cost == fit["tokens"].cost
    assert plan_lengths([0.8] * 8, [8] * 8, DraftCosts(fit["tokens"].cost, StepCost()))[0] > 0
    for name, cost in costs.items():
        fit[name].learn(24, 8, cost.seconds(24, 8))
        assert fit[name].cost == pytest.approx(cost, rel=0.2, abs=0.001)
    drafts = {
        name: plan_lengths([0.8] * 8, [8] * 8, DraftCosts(each.cost, StepCost()))[0] for name, each in fit.items()
    }
    assert drafts["sequences"] > 0
    assert drafts["tokens"] == 0


def test_the_first_steps_of_a_process_are_forgotten() -> None:
    fit = CostFit()
    for seconds in (0.5, 0.1, *[0.01] * 3):
        fit.learn(1, 1, seconds)
    assert fit.cost.seconds(1, 1) == pytest.approx(0.01)


def test_cost_of_steps_that_are_all_alike_is_split_as_usual() -> None:
    fit = CostFit()
    for _ in range(50):
        fit.learn(8, 8, 0.02)
    assert abs(fit.cost.seconds(8, 8) - 0.02) < 1e-4
    assert 10 < fit.cost.fixed_s / fit.cost.token_s < 14


def test_acceptance_follows_what_happens_and_forgets() -> None:
    acceptance = Acceptance()
    assert acceptance.rate(0.8) == 0.8
    for _ in range(20):
        acceptance.learn(0, 3)
    assert acceptance.rate(0.8) < 0.2
    for _ in range(200):
        acceptance.idle()
    assert acceptance.rate(0.8) > 0.7
    for _ in range(20):
        acceptance.learn(4, 4)
    assert acceptance.rate(0.8) > 0.95


@pytest.mark.parametrize(
    ("asked", "kind", "most"),
    [
        ({}, "none", 0),
        ({"speculative": "ngram"}, "ngram", 8),
        ({"num_speculative_tokens": 3}, "ngram", 3),
        ({"num_speculative_tokens": 3, "speculative": "none"}, "none", 0),
        ({"draft_model": str(DRAFT)}, "draft", 8),
    ],
)
def test_what_settings_mean(asked: dict[str, Any], kind: str, most: int) -> None:
    settings = DecodeSettings(model="/models/large", registry_address="none", **asked)
    assert settings.speculation() == Speculation(kind, most, DRAFT if kind == "draft" else None)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"speculative": "medusa"}, "one of auto, none, ngram, mtp, draft"),
        ({"speculative": "draft"}, "needs a draft_model"),
        ({"speculative": "ngram", "draft_model": "/m"}, "do not fit"),
        ({"num_speculative_tokens": 65}, r"in \[0, 64\]"),
    ],
)
def test_settings_that_make_no_sense(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        DecodeSettings(model="/models/large", registry_address="none", **asked)
