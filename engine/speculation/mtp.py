"""MtpDrafter: drafts by the model's own layer of multi-token prediction (engine/models/mtp.py).

The layer computes drafts from hidden states of the model, which only the worker that samples has. So it sees a sequence
from the first token on that this worker has sampled, and knows what is before from these hidden states alone. The
layer's KV of that token is the first of the block that holds the token in the model's KV.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.batch import HiddenStates, ScheduledBatch, ScheduledSequence
from engine.runner import Runner, RunnerOutput
from engine.sequence import SequenceState
from engine.speculation.drafters import DraftModel, Drafts
from mesh.domain.kv import KVLayout
from mesh.domain.tokens import SequenceKey

_MAX_PENDING = 64
"""The most tokens of a sequence that wait for the next drafts. With more, the layer sees it from the latest on."""


@dataclass(slots=True)
class _Seen:
    """The layer sees a sequence's tokens at positions `first` to `end` - 1. It has yet to compute the last
    `num_pending` of them, from the hidden states in `pending`, oldest first: those of the tokens before them.
    """

    first: int
    end: int
    pending: list[HiddenStates] = field(default_factory=list)
    num_pending: int = 0

    def add(self, hidden: HiddenStates) -> None:
        self.pending.append(hidden)
        self.num_pending += len(hidden)

    def take(self, count: int) -> list[HiddenStates]:
        """Remove the first `count` hidden states."""
        taken, self.num_pending = [], self.num_pending - count
        while count > 0:
            rows = self.pending.pop(0)
            taken.append(rows[:count])
            if len(rows) > count:
                self.pending.insert(0, rows[count:])
            count -= len(taken[-1])
        return taken

    def clear(self) -> None:
        self.pending, self.num_pending = [], 0


@dataclass(frozen=True, slots=True)
class _SeenTokens(ScheduledSequence):
    """`start` counts from `first`, the position of the first token that the layer sees."""

    first: int = 0

    @property
    def needs_sampling(self) -> bool:
        return self.first + self.end == self.sequence.num_tokens

    def token_ids(self) -> list[int]:
        return self.sequence.token_ids[self.first + self.start : self.first + self.end]


class MtpDrafter(DraftModel):
    """A DraftModel that needs the hidden states of the model: its outputs must have `hidden`."""

    def __init__(self, runner: Runner, layout: KVLayout, *, max_model_len: int, max_batch_tokens: int) -> None:
        super().__init__(runner, layout, max_model_len=max_model_len, max_batch_tokens=max_batch_tokens)
        self._seen: dict[SequenceKey, _Seen] = {}

    def limits(self, sequences: Sequence[SequenceState], max_drafts: Sequence[int]) -> list[int]:
        limits = super().limits(sequences, max_drafts)
        return [
            limit if (seen := self._seen.get(sequence.key)) is not None and seen.end == sequence.num_tokens else 0
            for sequence, limit in zip(sequences, limits, strict=True)
        ]

    def learn(self, item: ScheduledSequence, output: RunnerOutput) -> None:
        if output.hidden is None or not output.tokens:
            return
        first, end = item.last_known + 1, item.last_known + 1 + len(output.tokens)
        seen = self._seen.get(item.sequence.key)
        if seen is None or seen.end != first or seen.num_pending + len(output.tokens) > _MAX_PENDING:
            seen = self._seen[item.sequence.key] = _Seen(first, end)
        seen.add(output.hidden)
        seen.end = end

    def draft(self, sequences: Sequence[SequenceState], lengths: Sequence[int]) -> list[Drafts]:
        drafts = super().draft(sequences, lengths)
        for sequence, own in zip(sequences, drafts, strict=True):
            if own:
                self._seen[sequence.key].clear()  # the hidden state that gave the last draft
        return drafts

    def forget(self, sequence: SequenceState) -> None:
        super().forget(sequence)
        self._seen.pop(sequence.key, None)

    def _follow(self, sequence: SequenceState) -> SequenceState:
        """The layer computes right drafts again, now from hidden states of the model."""
        shadow, seen = self._shadow(sequence), self._seen[sequence.key]
        first = shadow.num_tokens - shadow.num_drafted
        shadow.token_ids[first:] = sequence.token_ids[first:]
        shadow.num_drafted = 0
        shadow.num_computed_tokens = sequence.num_tokens - seen.num_pending
        shadow.block_table = sequence.block_table[self._layout.state_blocks + seen.first // self._layout.block_size :]
        return shadow

    def _batch(self, counts: Sequence[tuple[SequenceState, int]]) -> ScheduledBatch:
        items, previous = list[_SeenTokens](), list[HiddenStates]()
        for sequence, count in counts:
            seen = self._seen[sequence.key]
            previous += seen.take(count)
            items.append(_SeenTokens(sequence, sequence.num_computed_tokens - seen.first, count, first=seen.first))
        return ScheduledBatch(tuple(items), previous=tuple(previous))

    def _continue_from(self, shadow: SequenceState, output: RunnerOutput) -> None:
        assert output.hidden is not None
        self._seen[shadow.key].add(output.hidden)
