"""Speculator: adds drafts to scheduled batches where they pay off. Pure except for the drafter.

Each step: find the sequences that decode, decide how many drafts are worth their cost (engine/speculation/cost.py, with
the acceptance of each sequence), allocate blocks for their KV, draft. After the step, update acceptance and cost.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from engine.batch import ScheduledBatch, ScheduledSequence, batch_order
from engine.runner import RunnerOutput
from engine.sequence import SequenceState
from engine.speculation.cost import Acceptance, CostFit, DraftCosts, plan_lengths
from engine.speculation.drafters import Drafter, Drafts
from mesh.domain.tokens import SequenceKey

if TYPE_CHECKING:
    from engine.scheduler import Scheduler

# Prior acceptance rate of a draft, before the first one and after long pauses.
_PRIOR_RATE = 0.8

Clock = Callable[[], float]


class Speculator:
    """Plans and requests drafts. Owned by the engine's thread.

    `max_drafts` limits the drafts of a sequence in a step; `fit` is the cost model to start with.
    """

    def __init__(
        self, drafter: Drafter, max_drafts: int, fit: CostFit | None = None, clock: Clock = time.perf_counter
    ) -> None:
        self.drafter = drafter
        self._max_drafts = max_drafts
        self._clock = clock
        self._fit = fit or CostFit()
        self._overall = Acceptance()
        self._acceptance: dict[SequenceKey, Acceptance] = {}
        self._undrafted: set[SequenceKey] = set()  # sequences that get no more drafts
        self._began_s: dict[int, float] = {}  # by the number of a batch in flight

    def extend(self, batch: ScheduledBatch, scheduler: "Scheduler") -> ScheduledBatch:
        """The batch with drafts appended to sequences that decode. Call `learn` with it after the step."""
        has_states = scheduler.config.state_blocks > 0
        costs = DraftCosts(self._fit.cost, self.drafter.round_cost(), is_repeated=has_states)
        sequences = [item.sequence for item in batch.items if _decodes(item)]
        lengths = self._plan(sequences, scheduler, costs) if sequences else []
        # The next step computes right drafts once more, between two tokens of their sequence.
        num_next = len(sequences) if has_states else 0
        budget = max(0, scheduler.config.max_batch_tokens - batch.num_tokens - num_next)
        for index, length in enumerate(lengths):
            lengths[index] = scheduler.allocate_for_drafts(sequences[index], min(length, budget)) if length else 0
            budget -= lengths[index]
        if any(lengths):
            drafts = self.drafter.draft(sequences, lengths)
            batch = _with_drafts(batch, dict(zip((s.key for s in sequences), drafts, strict=True)), has_states)
        self._began_s[batch.number] = self._clock()
        return batch

    def learn(self, batch: ScheduledBatch, outputs: list[RunnerOutput]) -> None:
        """Update acceptance and cost with the outputs of a batch that `extend` returned. A sequence whose drafts have
        spoiled the step gets no more.
        """
        seconds = self._clock() - self._began_s.pop(batch.number)
        if not batch.num_prompt_tokens:
            self._fit.learn(batch.num_tokens, len(batch.items), seconds)
        num_drafts = 0
        for item, output in zip(batch.items, outputs, strict=True):
            num_drafts += len(item.drafts)
            self.drafter.learn(item, output)
            if item.drafts and not output.tokens:
                self._undrafted.add(item.sequence.key)
            elif item.drafts:
                acceptance = self._acceptance.setdefault(item.sequence.key, Acceptance())
                acceptance.learn(len(output.tokens) - 1, len(item.drafts))
                self._overall.learn(len(output.tokens) - 1, len(item.drafts))
            elif (idle := self._acceptance.get(item.sequence.key)) is not None:
                idle.idle()
        if num_drafts == 0:
            self._overall.idle()

    def forget(self, sequence: SequenceState) -> None:
        """Drop the acceptance and the drafter's state of `sequence`."""
        self._acceptance.pop(sequence.key, None)
        self._undrafted.discard(sequence.key)
        self.drafter.forget(sequence)

    def _plan(self, sequences: list[SequenceState], scheduler: "Scheduler", costs: DraftCosts) -> list[int]:
        """Number of drafts per sequence. The drafter is not called for sequences with a low acceptance."""
        rates, min_rate = list(map(self._rate, sequences)), costs.min_rate(len(sequences))
        limits = [
            self._limit(sequence, scheduler) if rate > min_rate and sequence.key not in self._undrafted else 0
            for sequence, rate in zip(sequences, rates, strict=True)
        ]
        if not any(limits):
            return limits
        return plan_lengths(rates, self.drafter.limits(sequences, limits), costs)

    def _limit(self, sequence: SequenceState, scheduler: "Scheduler") -> int:
        """Drafts that the sequence can emit, together with the token sampled after them."""
        max_tokens = min(sequence.spec.max_total_tokens, scheduler.config.max_model_len)
        return max(0, min(self._max_drafts, max_tokens - sequence.num_tokens - 1))

    def _rate(self, sequence: SequenceState) -> float:
        overall = self._overall.rate(_PRIOR_RATE)
        acceptance = self._acceptance.get(sequence.key)
        return overall if acceptance is None else acceptance.rate(overall)


def _decodes(item: ScheduledSequence) -> bool:
    """True after the sequence's first token, unless another worker continues it: that one gets a single token. Where a
    snapshot is taken, the state must be that behind the item.
    """
    sequence = item.sequence
    is_at_end = sequence.is_decoding and item.needs_sampling and item.start >= sequence.num_prompt_tokens
    return is_at_end and not sequence.hand_over and not sequence.saving


def _with_drafts(batch: ScheduledBatch, drafts: dict[SequenceKey, Drafts], has_states: bool) -> ScheduledBatch:
    """With a recurrent state, the last token is computed again, too: drafts that spoil the step spoil its results."""
    items = [
        replace(
            item,
            num_tokens=item.num_tokens + len(tokens),
            drafts=tokens,
            num_repeated=1 + len(tokens) if has_states else 0,
        )
        if (tokens := drafts.get(item.sequence.key, ()))
        else item
        for item in batch.items
    ]
    return replace(batch, items=tuple(sorted(items, key=batch_order)))
