"""Adds guesses to planned batches where they pay. Pure but for the drafter.

Each step: which sequences could be guessed for, how many guesses are worth their cost (engine/speculation/cost.py, with
each sequence's own acceptance), room for their KV, the guesses. What the step then says about them is learnt from.
"""

import time
from collections.abc import Callable
from dataclasses import replace

from engine.batch import RunnerOutput, ScheduledBatch, ScheduledSequence
from engine.scheduler import Scheduler
from engine.sequence import Sequence, SequenceKey
from engine.speculation.acceptance import Acceptance
from engine.speculation.cost import CostFit, Prices, plan_lengths
from engine.speculation.drafter import Drafter, Drafts

# Before any guess was tried, and what idle guessers drift back to.
_HOPE = 0.8

Clock = Callable[[], float]


class Speculator:
    """Owned by the engine's thread. `max_drafts` is the most guesses of a sequence in a step; `fit` is what is known
    about the cost of steps.
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
        self._began_s = 0.0

    def extend(self, batch: ScheduledBatch, scheduler: Scheduler) -> ScheduledBatch:
        """The batch with guesses behind the last tokens of sequences that decode. Tell `learn` what came of it."""
        prices = Prices(self._fit.cost, self.drafter.round_cost())
        sequences = [item.sequence for item in batch.items if _decodes(item)]
        lengths = self._plan(sequences, scheduler, prices) if sequences else []
        left = max(0, scheduler.config.max_batch_tokens - batch.num_tokens)
        for place, length in enumerate(lengths):
            lengths[place] = scheduler.make_room(sequences[place], min(length, left)) if length else 0
            left -= lengths[place]
        if any(lengths):
            drafts = self.drafter.draft(sequences, lengths)
            batch = _with_drafts(batch, dict(zip((s.key for s in sequences), drafts, strict=True)))
        self._began_s = self._clock()
        return batch

    def learn(self, batch: ScheduledBatch, outputs: list[RunnerOutput]) -> None:
        """The batch, as `extend` returned it, has been computed."""
        seconds = self._clock() - self._began_s
        if all(item.num_tokens - len(item.drafts) == 1 for item in batch.items):
            self._fit.learn(batch.num_tokens, seconds)
        num_drafts = 0
        for item, output in zip(batch.items, outputs, strict=True):
            num_drafts += len(item.drafts)
            if item.drafts:
                acceptance = self._acceptance.setdefault(item.sequence.key, Acceptance())
                acceptance.learn(len(output.tokens) - 1, len(item.drafts))
                self._overall.learn(len(output.tokens) - 1, len(item.drafts))
            elif (known := self._acceptance.get(item.sequence.key)) is not None:
                known.idle()
        if num_drafts == 0:
            self._overall.idle()

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept for `sequence`."""
        self._acceptance.pop(sequence.key, None)
        self.drafter.forget(sequence)

    def _plan(self, sequences: list[Sequence], scheduler: Scheduler, prices: Prices) -> list[int]:
        """How many guesses each should get. Who is known to guess badly is not even asked."""
        chances, least = list(map(self._chance, sequences)), prices.least_chance(len(sequences))
        most = [
            self._most(sequence, scheduler) if chance > least else 0
            for sequence, chance in zip(sequences, chances, strict=True)
        ]
        if not any(most):
            return most
        return plan_lengths(chances, self.drafter.limits(sequences, most), prices)

    def _most(self, sequence: Sequence, scheduler: Scheduler) -> int:
        """Guesses that could be emitted, with the token that is sampled behind them."""
        end = min(sequence.request.max_total_tokens, scheduler.config.max_model_len)
        return max(0, min(self._max_drafts, end - sequence.num_tokens - 1))

    def _chance(self, sequence: Sequence) -> float:
        overall = self._overall.chance(_HOPE)
        known = self._acceptance.get(sequence.key)
        return overall if known is None else known.chance(overall)


def _decodes(item: ScheduledSequence) -> bool:
    """True past a sequence's first token: what is sampled at the end of a prompt may go to another worker."""
    return item.num_tokens == 1 and item.samples and item.start >= item.sequence.num_prompt_tokens


def _with_drafts(batch: ScheduledBatch, drafts: dict[SequenceKey, Drafts]) -> ScheduledBatch:
    items = [
        replace(item, num_tokens=item.num_tokens + len(own), drafts=own)
        if (own := drafts.get(item.sequence.key, ()))
        else item
        for item in batch.items
    ]
    return replace(batch, items=tuple(sorted(items, key=lambda item: item.num_tokens > 1)))
