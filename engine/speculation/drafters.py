"""Drafters: they propose the next tokens of sequences. The contract, and the two that exist.

NgramDrafter drafts what followed an earlier occurrence of the last tokens (prompt lookup, Saxena 2023). DraftModel
drafts by a smaller model with the same vocabulary (Leviathan et al. 2023).

The draft model has its own KV cache with the same block ids: a block allocated for the large model's KV is allocated
for the draft model's, too, so block pool, prefix cache and transfers need no changes. It leaves the blocks of recurrent
states empty, and where the large model has groups of layers (mesh/domain/kv_groups.py), all but those of the first
group. Tokens that the draft model has not computed, after a prompt, a replay or a pause, are computed in chunks before
it drafts. It samples with the same parameters and random draws as the large model, so that the two agree as often as
possible.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Protocol

import structlog

from engine.batch import ScheduledBatch, ScheduledSequence
from engine.runner import Runner, RunnerOutput
from engine.sequence import SequenceState
from engine.speculation.cost import CostFit, StepCost
from mesh.domain.kv import KVLayout
from mesh.domain.kv_groups import NO_BLOCK
from mesh.domain.tokens import SequenceKey

log = structlog.get_logger(__name__)

Drafts = tuple[int, ...]

_KEY_TOKENS = 3
"""Length of the n-grams in the index."""
_MAX_CANDIDATES = 8
"""Earlier occurrences that are compared, latest first."""
_MAX_COMPARED = 16
"""Tokens before an occurrence that are compared."""
_MAX_INDEXED = 4096
"""Tokens of a sequence that a step indexes, in 2 ms at most: a long prompt holds up the steps of all others."""
_DOUBT_DECAY = 0.998
"""Per step without drafts: the measured cost of a round counts for less, so that a drafter is tried again."""
_MAX_ROUND_TOKENS = 2
"""Tokens that a sequence computes in a round once it has caught up: the last accepted draft and the token after it."""


class Drafter(Protocol):
    """Proposes the next tokens of sequences. Plug point: NgramDrafter, DraftModel. Used by the engine's thread only.
    The first three methods are for drafters with a model.

    Drafts may be any tokens: wrong drafts cost time, but never change the output.
    """

    def prepare(self, choices: Sequence[SequenceState]) -> "Sequence[Future[None]]":
        """Prepare what the choices of a request need; same contract as Runner.prepare."""
        return ()

    @property
    def borrows_cores(self) -> bool:
        """True if drafts are computed on cores that `use_cores` has lent."""
        return False

    def use_cores(self, lent: tuple[int, ...]) -> None:
        """Lend cores to the next `draft`, as `Runner.use_cores` does."""
        return

    def limits(self, sequences: Sequence[SequenceState], max_drafts: Sequence[int]) -> list[int]:
        """The number of tokens it can draft for each sequence now, at most its entry in `max_drafts`.

        Called before each `draft`, for the same sequences.
        """
        ...

    def draft(self, sequences: Sequence[SequenceState], lengths: Sequence[int]) -> list[Drafts]:
        """Drafts for each sequence, at most its entry in `lengths`. The block tables have blocks for their KV."""
        ...

    def learn(self, item: ScheduledSequence, output: RunnerOutput) -> None:
        """Take what a step of the model has computed for a sequence, which has not got its tokens yet."""
        return

    def round_cost(self) -> StepCost:
        """The cost of one more draft token for each of a number of sequences."""
        ...

    def forget(self, sequence: SequenceState) -> None:
        """Drop all state of `sequence`; unknown sequences are ignored."""
        ...


class NgramIndex:
    """The last occurrence of each n-gram in a sequence, with a chain to the earlier ones (as in LZ77)."""

    def __init__(self) -> None:
        self._latest: dict[tuple[int, ...], int] = {}
        self._previous: list[int] = []  # by the stop position of an n-gram: that of its previous occurrence, or 0

    def catch_up(self, token_ids: list[int]) -> bool:
        """Index n-grams, up to _MAX_INDEXED. True once all are indexed except the last one, which `find` looks up."""
        first, end = len(self._previous), len(token_ids)
        for stop in range(first, min(first + _MAX_INDEXED, end)):
            ngram = tuple(token_ids[stop - _KEY_TOKENS : stop]) if stop >= _KEY_TOKENS else None
            self._previous.append(self._latest.get(ngram, 0) if ngram else 0)
            if ngram:
                self._latest[ngram] = stop
        return len(self._previous) == end

    def find(self, token_ids: list[int]) -> int:
        """Position after the earlier occurrence with the longest matching context; 0 if there is none.

        Call `catch_up` first, until it returns True.
        """
        position = self._latest.get(tuple(token_ids[-_KEY_TOKENS:]), 0)
        best, best_length = 0, 0
        for _ in range(_MAX_CANDIDATES):
            if position == 0:
                break
            length = _common(token_ids, position)
            if length > best_length:
                best, best_length = position, length
            position = self._previous[position]
        return best


class NgramDrafter(Drafter):
    """Keeps an index per sequence; a replay rebuilds it from the token ids."""

    def __init__(self) -> None:
        self._indices: dict[SequenceKey, NgramIndex] = {}
        self._positions: list[int] = []

    def limits(self, sequences: Sequence[SequenceState], max_drafts: Sequence[int]) -> list[int]:
        pairs = list(zip(sequences, max_drafts, strict=True))
        self._positions = [self._find(sequence) if limit else 0 for sequence, limit in pairs]
        return [limit if position else 0 for position, limit in zip(self._positions, max_drafts, strict=True)]

    def draft(self, sequences: Sequence[SequenceState], lengths: Sequence[int]) -> list[Drafts]:
        return [
            _continuation(sequence.token_ids, position, length)
            for sequence, position, length in zip(sequences, self._positions, lengths, strict=True)
        ]

    def round_cost(self) -> StepCost:
        return StepCost()

    def forget(self, sequence: SequenceState) -> None:
        self._indices.pop(sequence.key, None)

    def _find(self, sequence: SequenceState) -> int:
        index = self._indices.setdefault(sequence.key, NgramIndex())
        return index.find(sequence.token_ids) if index.catch_up(sequence.token_ids) else 0


def _common(token_ids: list[int], position: int) -> int:
    """Number of tokens before `position` that equal those at the end, up to the limit."""
    length, limit = 0, min(position, _MAX_COMPARED)
    while length < limit and token_ids[position - 1 - length] == token_ids[-1 - length]:
        length += 1
    return length


def _continuation(token_ids: list[int], position: int, length: int) -> Drafts:
    """`length` tokens from `position` on; at the end of the sequence they continue at `position`, as in a loop."""
    period = len(token_ids) - position
    return tuple(token_ids[position + i % period] for i in range(length))


class DraftModel(Drafter):
    """A Drafter with its own model runner. A sequence for which that fails, such as with NaN, gets no more drafts.

    `layout` is that of the large model's KV, `max_model_len` the longest sequence of the draft model,
    `max_batch_tokens` the limit on tokens per round. If all groups of layers have a window, a sequence whose beginning
    has left that of the first group gets no drafts.
    """

    def __init__(self, runner: Runner, layout: KVLayout, *, max_model_len: int, max_batch_tokens: int) -> None:
        self._layout = layout
        self._runner = runner
        self._max_model_len = max_model_len
        self._max_batch_tokens = max_batch_tokens
        self._shadows: dict[SequenceKey, SequenceState] = {}
        self._failed: set[SequenceKey] = set()
        self._fit: CostFit | None = None
        self._trust = 1.0  # in the measured cost
        self._is_warm = False

    def prepare(self, choices: Sequence[SequenceState]) -> "Sequence[Future[None]]":
        return self._runner.prepare(choices)

    @property
    def borrows_cores(self) -> bool:
        return self._runner.borrows_cores

    def use_cores(self, lent: tuple[int, ...]) -> None:
        self._runner.use_cores(lent)

    def limits(self, sequences: Sequence[SequenceState], max_drafts: Sequence[int]) -> list[int]:
        return [
            0 if self._cannot_draft(sequence) else max(0, min(limit, self._max_model_len - sequence.num_tokens))
            for sequence, limit in zip(sequences, max_drafts, strict=True)
        ]

    def _cannot_draft(self, sequence: SequenceState) -> bool:
        windows = self._layout.windows
        has_left = windows and windows[0] and sequence.block_table[0] == NO_BLOCK
        return bool(has_left) or sequence.key in self._failed

    def draft(self, sequences: Sequence[SequenceState], lengths: Sequence[int]) -> list[Drafts]:
        """Sequences that the draft model has not caught up with get no drafts yet."""
        num_wanted = dict(zip((sequence.key for sequence in sequences), lengths, strict=True))
        shadows = [self._follow(sequence) for sequence in sequences if num_wanted[sequence.key]]
        batch = self._batch(self._first_round(shadows))
        while batch.items:
            unfinished = [sequence for sequence in self._run(batch) if sequence.num_drafted < num_wanted[sequence.key]]
            batch = self._batch([(sequence, 1) for sequence in unfinished])
        return [self._drafts(sequence) if num_wanted[sequence.key] else () for sequence in sequences]

    def round_cost(self) -> StepCost:
        """Fitted to measured rounds; zero before the first one. It shrinks from call to call while there are no rounds:
        one that a busy machine has held up must not be the last.
        """
        if self._fit is None:
            return StepCost()
        cost = StepCost(*(self._trust * seconds for seconds in self._fit.cost))
        self._trust *= _DOUBT_DECAY
        return cost

    def forget(self, sequence: SequenceState) -> None:
        self._failed.discard(sequence.key)
        shadow = self._shadows.pop(sequence.key, None)
        if shadow is not None:
            self._runner.forget(shadow)

    def _follow(self, sequence: SequenceState) -> SequenceState:
        """Update the draft model's copy of a sequence to its verified tokens, without drafts."""
        shadow = self._shadow(sequence)
        first = shadow.num_tokens - shadow.num_drafted
        drafts, verified = shadow.token_ids[first:], sequence.token_ids[first:]
        rejected = (i for i, (draft, token) in enumerate(zip(drafts, verified, strict=False)) if draft != token)
        num_accepted = next(rejected, min(len(drafts), len(verified)))
        shadow.num_computed_tokens = min(shadow.num_computed_tokens, first + num_accepted)
        shadow.token_ids[first:] = verified
        shadow.num_drafted = 0
        shadow.block_table = sequence.block_table[self._layout.state_blocks :: self._layout.groups.count]
        return shadow

    def _shadow(self, sequence: SequenceState) -> SequenceState:
        shadow = self._shadows.get(sequence.key)
        if shadow is None:
            spec = replace(sequence.spec, top_logprobs=0, prompt_logprobs=False, adapter="")
            shadow = self._shadows[sequence.key] = SequenceState(spec)
        return shadow

    def _first_round(self, shadows: list[SequenceState]) -> list[tuple[SequenceState, int]]:
        """The sequences with uncomputed tokens, and how many of these fit; sequences with the fewest come first."""
        counts: list[tuple[SequenceState, int]] = []
        budget = self._max_batch_tokens
        for shadow in sorted(shadows, key=lambda shadow: shadow.num_uncomputed_tokens):
            count = min(budget, shadow.num_uncomputed_tokens)
            if count > 0:
                counts.append((shadow, count))
                budget -= count
        return counts

    def _batch(self, counts: Sequence[tuple[SequenceState, int]]) -> ScheduledBatch:
        """The next tokens of these sequences: so many of each."""
        return ScheduledBatch(tuple(ScheduledSequence(each, each.num_computed_tokens, n) for each, n in counts))

    def _run(self, batch: ScheduledBatch) -> list[SequenceState]:
        """Run one round. Returns the sequences that got a token; the others are still catching up, or have failed."""
        began_s = time.perf_counter()
        outputs = self._runner.begin(batch)()
        drafted = []
        for item, output in zip(batch.items, outputs, strict=True):
            shadow = item.sequence
            if output.failure is not None:
                log.warning("no more drafts for a request", request_id=shadow.key[0], error=str(output.failure))
                self._failed.add(shadow.key)
                continue
            shadow.num_computed_tokens += item.num_tokens
            shadow.token_ids += [token.id for token in output.tokens]
            shadow.num_drafted += len(output.tokens)
            if output.tokens:
                self._continue_from(shadow, output)
                drafted.append(shadow)
        if self._is_warm and all(item.num_tokens <= _MAX_ROUND_TOKENS for item in batch.items):
            self._fit = self._fit or CostFit()
            self._fit.learn(batch.num_tokens, 0, time.perf_counter() - began_s)
        self._is_warm, self._trust = True, 1.0  # the first round of a process is slow
        return drafted

    def _continue_from(self, shadow: SequenceState, output: RunnerOutput) -> None:
        """Prepare the next round of a sequence that has got a draft."""

    def _drafts(self, sequence: SequenceState) -> Drafts:
        shadow = self._shadows[sequence.key]
        return tuple(shadow.token_ids[shadow.num_tokens - shadow.num_drafted :])
