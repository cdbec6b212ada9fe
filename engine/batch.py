"""The work of one engine step: ScheduledBatch, which the scheduler plans and a Runner executes.

A batch is in flight from `schedule` to `update`. There may be as many as the model has pipeline stages.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from engine.sequence import SequenceState
from mesh.domain.tokens import SequenceKey


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """Compute `num_tokens` tokens of `sequence`, starting at position `start` (its num_computed_tokens).

    The last of them may be `drafts`: proposed tokens that follow the sequence's own. The step samples after each draft;
    a sampled token counts if all drafts before it were right (Leviathan et al. 2023).

    `num_repeated`: the number of tokens at the end that will be computed once more. A recurrent state cannot go back,
    so it stays at the token before them. They are a prompt's last token, which the worker that takes over the sequence,
    or a fork, computes again; or a sequence's last token and its drafts, until it is known how many are right.
    """

    sequence: SequenceState
    start: int
    num_tokens: int
    drafts: tuple[int, ...] = ()
    num_repeated: int = 0

    @property
    def end(self) -> int:
        """Position after the last one computed in this step."""
        return self.start + self.num_tokens

    @property
    def last_known(self) -> int:
        """Position of the last computed token that is no draft."""
        return self.end - len(self.drafts) - 1

    @property
    def needs_sampling(self) -> bool:
        """True if the step reaches the last known token of the sequence, so that the next one is sampled."""
        return self.last_known + 1 == self.sequence.num_tokens

    def token_ids(self) -> list[int]:
        """Ids of the tokens to compute, drafts included."""
        return self.sequence.token_ids[self.start : self.end] + list(self.drafts)


def batch_order(item: ScheduledSequence) -> tuple[bool, str]:
    """The sort key of a batch: single tokens come first, because attention treats them alike, a prompt's last token
    included; rows with the same adapter come together, so that its matrices are read once."""
    return item.num_tokens > 1, item.sequence.spec.adapter


class HiddenStates(Protocol):
    """A tensor [rows, hidden_size] on the model's device."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice, /) -> "HiddenStates": ...


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """The work of one step. Items with a single token come first.

    `copies` are pairs of blocks (source, target) to copy before the forward pass, `saves` those to copy after it.
    `number` identifies the batch to the scheduler while the batch is in flight. `previous`, for a layer of multi-token
    prediction: the hidden states of the tokens before those of the step.
    """

    items: tuple[ScheduledSequence, ...]
    copies: tuple[tuple[int, int], ...] = ()
    number: int = 0
    saves: tuple[tuple[int, int], ...] = ()
    previous: tuple[HiddenStates, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step, drafts included."""
        return sum(item.num_tokens for item in self.items)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of prompts. Sequences that decode do not count, even where they compute several tokens again."""
        return sum(item.num_tokens for item in self.items if item.num_tokens > 1 and not item.sequence.is_decoding)

    @property
    def num_decoding(self) -> int:
        """Number of sequences that decode, also those of which several tokens are computed again."""
        return sum(item.sequence.is_decoding for item in self.items)

    @property
    def num_decodes(self) -> int:
        """Number of leading items with exactly one token: decodes, and prompts with one token left."""
        return next((i for i, item in enumerate(self.items) if item.num_tokens > 1), len(self.items))


class BatchesInFlight:
    """The batches in flight of one scheduler, by number."""

    def __init__(self) -> None:
        self._last_number = 0
        self._keys: dict[int, tuple[SequenceKey, ...]] = {}
        self._computing: set[SequenceKey] = set()
        self._aborted: dict[SequenceKey, SequenceState] = {}

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def aborted(self) -> Iterable[SequenceState]:
        """Aborted sequences whose blocks will be freed when their batch ends."""
        return self._aborted.values()

    def has(self, sequence: SequenceState) -> bool:
        """True if a batch in flight contains this sequence."""
        return sequence.key in self._computing

    def begin(self, sequences: Iterable[SequenceState]) -> int:
        """Register a batch of these sequences; returns its number."""
        self._last_number += 1
        self._keys[self._last_number] = keys = tuple(sequence.key for sequence in sequences)
        self._computing.update(keys)
        return self._last_number

    def abort(self, sequence: SequenceState) -> None:
        """Mark a sequence of a batch in flight as aborted."""
        self._aborted[sequence.key] = sequence

    def end(self, number: int) -> list[SequenceState]:
        """Remove a computed batch; returns its sequences that were aborted meanwhile.

        Raises ValueError if no such batch is in flight.
        """
        keys = self._keys.pop(number, None)
        if keys is None:
            raise ValueError(f"batch {number} is not in flight")
        self._computing.difference_update(keys)
        return [self._aborted.pop(key) for key in keys if key in self._aborted]
