"""DraftModel: drafts by a smaller model with the same vocabulary (Leviathan et al. 2023).

The draft model has its own KV cache with the same block ids: a block allocated for the large model's KV is allocated
for the draft model's, too, so block pool, prefix cache and transfers need no changes. Tokens that the draft model has
not computed, after a prompt, a replay or a pause, are computed in chunks before it drafts.

It samples with the same parameters and random draws as the large model, so that the two agree as often as possible.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

from engine.batch import Runner, ScheduledBatch, ScheduledSequence
from engine.sequence import SequenceKey, SequenceState
from engine.speculation.cost import CostFit, StepCost
from engine.speculation.drafter import Drafts

# Tokens that a sequence computes per round once it has caught up: the last right draft and the token sampled after it.
_MAX_ROUND_TOKENS = 2


class DraftModel:
    """A Drafter with its own model runner.

    `max_model_len` is the longest sequence of the draft model, `max_batch_tokens` the limit on tokens per round.
    """

    def __init__(self, runner: Runner, *, max_model_len: int, max_batch_tokens: int) -> None:
        self._runner = runner
        self._max_model_len = max_model_len
        self._max_batch_tokens = max_batch_tokens
        self._shadows: dict[SequenceKey, SequenceState] = {}
        self._fit: CostFit | None = None

    def prepare_thread(self) -> None:
        self._runner.prepare_thread()

    def prepare(self, sequence: SequenceState) -> "Future[None] | None":
        return self._runner.prepare(sequence)

    def use_cores(self, lent: tuple[int, ...]) -> None:
        self._runner.use_cores(lent)

    def limits(self, sequences: Sequence[SequenceState], max_drafts: Sequence[int]) -> list[int]:
        return [
            max(0, min(limit, self._max_model_len - sequence.num_tokens))
            for sequence, limit in zip(sequences, max_drafts, strict=True)
        ]

    def draft(self, sequences: Sequence[SequenceState], lengths: Sequence[int]) -> list[Drafts]:
        """Sequences that the draft model has not caught up with get no drafts yet."""
        num_wanted = dict(zip((sequence.key for sequence in sequences), lengths, strict=True))
        shadows = [self._follow(sequence) for sequence in sequences if num_wanted[sequence.key]]
        batch = self._first_round(shadows)
        while batch.items:
            self._run(batch)
            unfinished = [
                item.sequence
                for item in batch.items
                if 0 < item.sequence.num_drafted < num_wanted[item.sequence.key]  # 0: still catching up
            ]
            batch = ScheduledBatch(tuple(ScheduledSequence(s, s.num_computed_tokens, 1) for s in unfinished))
        return [self._drafts(sequence) if num_wanted[sequence.key] else () for sequence in sequences]

    def round_cost(self) -> StepCost:
        """Fitted to measured rounds; zero before the first one."""
        return self._fit.cost if self._fit is not None else StepCost()

    def forget(self, sequence: SequenceState) -> None:
        shadow = self._shadows.pop(sequence.key, None)
        if shadow is not None:
            self._runner.forget(shadow)

    def _follow(self, sequence: SequenceState) -> SequenceState:
        """Update the draft model's copy of a sequence to its verified tokens, without drafts."""
        shadow = self._shadows.get(sequence.key)
        if shadow is None:
            request = replace(sequence.request, top_logprobs=0, prompt_logprobs=False)
            shadow = self._shadows[sequence.key] = SequenceState(request)
        first = shadow.num_tokens - shadow.num_drafted
        drafts, verified = shadow.token_ids[first:], sequence.token_ids[first:]
        num_right = next((i for i, pair in enumerate(zip(drafts, verified, strict=False)) if pair[0] != pair[1]), None)
        num_right = min(len(drafts), len(verified)) if num_right is None else num_right
        shadow.num_computed_tokens = min(shadow.num_computed_tokens, first + num_right)
        shadow.token_ids[first:] = verified
        shadow.num_drafted = 0
        shadow.block_table = sequence.block_table
        return shadow

    def _first_round(self, shadows: list[SequenceState]) -> ScheduledBatch:
        """A batch of the uncomputed tokens; sequences with the fewest come first."""
        items: list[ScheduledSequence] = []
        budget = self._max_batch_tokens
        for shadow in sorted(shadows, key=lambda shadow: shadow.num_uncomputed_tokens):
            count = min(budget, shadow.num_uncomputed_tokens)
            if count > 0:
                items.append(ScheduledSequence(shadow, shadow.num_computed_tokens, count))
                budget -= count
        return ScheduledBatch(tuple(items))

    def _run(self, batch: ScheduledBatch) -> None:
        began_s = time.perf_counter()
        outputs = self._runner.run(batch)
        for item, output in zip(batch.items, outputs, strict=True):
            shadow = item.sequence
            shadow.num_computed_tokens = item.end
            shadow.token_ids += [token.id for token in output.tokens]
            shadow.num_drafted += len(output.tokens)
        if all(item.num_tokens <= _MAX_ROUND_TOKENS for item in batch.items):
            self._fit = self._fit or CostFit()
            self._fit.learn(batch.num_tokens, time.perf_counter() - began_s)

    def _drafts(self, sequence: SequenceState) -> Drafts:
        shadow = self._shadows[sequence.key]
        return tuple(shadow.token_ids[shadow.num_tokens - shadow.num_drafted :])
