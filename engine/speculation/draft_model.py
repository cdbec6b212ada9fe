"""Guesses by a smaller model of the same vocabulary, which runs ahead of the large one (Leviathan et al. 2023).

Its KV lies in a cache of its own with the same block ids: wherever a sequence has room for the large model's KV, it has
room for this one's, and block pool, prefix cache and transfers need not know of it. What it has not seen of a sequence,
after a prompt, a replay or a pause, it computes in chunks before it guesses.

It samples as the large model will, with the same parameters and the same random draws, so that the two agree most.
"""

import time
from collections.abc import Sequence as Items
from concurrent.futures import Future
from dataclasses import replace

from engine.batch import Runner, ScheduledBatch, ScheduledSequence
from engine.sequence import Sequence, SequenceKey
from engine.speculation.cost import CostFit, StepCost
from engine.speculation.drafter import Drafts

# What one guess computes at most: the token after the last guess that was right, and the one sampled behind it.
_TOKENS_OF_A_GUESS = 2


class DraftModel:
    """`max_model_len` tokens are the most it can look at; `max_batch_tokens` are the most it computes at once."""

    def __init__(self, runner: Runner, *, max_model_len: int, max_batch_tokens: int) -> None:
        self._runner = runner
        self._max_model_len = max_model_len
        self._max_batch_tokens = max_batch_tokens
        self._shadows: dict[SequenceKey, Sequence] = {}
        self._fit: CostFit | None = None

    def prepare_thread(self) -> None:
        """See Drafter.prepare_thread."""
        self._runner.prepare_thread()

    def prepare(self, sequence: Sequence) -> "Future[None] | None":
        """See Drafter.prepare."""
        return self._runner.prepare(sequence)

    def use_cores(self, lent: tuple[int, ...]) -> None:
        """See Drafter.use_cores."""
        self._runner.use_cores(lent)

    def limits(self, sequences: Items[Sequence], most: Items[int]) -> list[int]:
        """See Drafter.limits."""
        return [
            max(0, min(limit, self._max_model_len - sequence.num_tokens))
            for sequence, limit in zip(sequences, most, strict=True)
        ]

    def draft(self, sequences: Items[Sequence], lengths: Items[int]) -> list[Drafts]:
        """See Drafter.draft. Those that have not been caught up with get none yet."""
        wanted = dict(zip((sequence.key for sequence in sequences), lengths, strict=True))
        shadows = [self._follow(sequence) for sequence in sequences if wanted[sequence.key]]
        batch = self._first_round(shadows)
        while batch.items:
            self._run(batch)
            going_on = [
                item.sequence
                for item in batch.items
                if 0 < item.sequence.num_guessed < wanted[item.sequence.key]  # 0: not caught up with yet
            ]
            batch = ScheduledBatch(tuple(ScheduledSequence(s, s.num_computed_tokens, 1) for s in going_on))
        return [self._guesses(sequence) if wanted[sequence.key] else () for sequence in sequences]

    def round_cost(self) -> StepCost:
        """As measured; nothing before anything was."""
        return self._fit.cost if self._fit is not None else StepCost()

    def forget(self, sequence: Sequence) -> None:
        """See Drafter.forget."""
        shadow = self._shadows.pop(sequence.key, None)
        if shadow is not None:
            self._runner.forget(shadow)

    def _follow(self, sequence: Sequence) -> Sequence:
        """The draft model's view of a sequence, with the tokens that hold and no guesses."""
        shadow = self._shadows.get(sequence.key)
        if shadow is None:
            request = replace(sequence.request, top_logprobs=0, prompt_logprobs=False)
            shadow = self._shadows[sequence.key] = Sequence(request)
        first = shadow.num_tokens - shadow.num_guessed
        guessed, held = shadow.token_ids[first:], sequence.token_ids[first:]
        num_right = next((i for i, pair in enumerate(zip(guessed, held, strict=False)) if pair[0] != pair[1]), None)
        num_right = min(len(guessed), len(held)) if num_right is None else num_right
        shadow.num_computed_tokens = min(shadow.num_computed_tokens, first + num_right)
        shadow.token_ids[first:] = held
        shadow.num_guessed = 0
        shadow.block_table = sequence.block_table
        return shadow

    def _first_round(self, shadows: list[Sequence]) -> ScheduledBatch:
        """What is not computed yet, those first that need least."""
        items: list[ScheduledSequence] = []
        left = self._max_batch_tokens
        for shadow in sorted(shadows, key=lambda shadow: shadow.num_uncomputed_tokens):
            count = min(left, shadow.num_uncomputed_tokens)
            if count > 0:
                items.append(ScheduledSequence(shadow, shadow.num_computed_tokens, count))
                left -= count
        return ScheduledBatch(tuple(items))

    def _run(self, batch: ScheduledBatch) -> None:
        began_s = time.perf_counter()
        outputs = self._runner.run(batch)
        for item, output in zip(batch.items, outputs, strict=True):
            shadow = item.sequence
            shadow.num_computed_tokens = item.end
            shadow.token_ids += [token.id for token in output.tokens]
            shadow.num_guessed += len(output.tokens)
        if all(item.num_tokens <= _TOKENS_OF_A_GUESS for item in batch.items):
            self._fit = self._fit or CostFit()
            self._fit.learn(batch.num_tokens, time.perf_counter() - began_s)

    def _guesses(self, sequence: Sequence) -> Drafts:
        shadow = self._shadows[sequence.key]
        return tuple(shadow.token_ids[shadow.num_tokens - shadow.num_guessed :])
