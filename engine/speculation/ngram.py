"""Guesses by looking it up: what followed the last time that the same tokens came (prompt lookup, Saxena 2023)."""

from collections.abc import Sequence as Items

from engine.sequence import Sequence, SequenceKey
from engine.speculation.cost import StepCost
from engine.speculation.drafter import Drafts

_KEY_TOKENS = 3
"""Tokens that must have come before."""
_MOST_PLACES = 8
"""Places that are compared, latest first."""
_MOST_COMPARED = 16
"""Tokens before a place that are compared."""


class NgramIndex:
    """Where each run of _KEY_TOKENS tokens came last in a sequence, and where before that (chains as in LZ77)."""

    def __init__(self) -> None:
        self._latest: dict[tuple[int, ...], int] = {}
        self._before: list[int] = []  # by the end of a run: the end of the same run before it, or 0

    def catch_up(self, token_ids: list[int]) -> None:
        """Index all runs but the last one, which is what will be looked for."""
        for end in range(len(self._before), len(token_ids)):
            run = tuple(token_ids[end - _KEY_TOKENS : end]) if end >= _KEY_TOKENS else None
            self._before.append(self._latest.get(run, 0) if run else 0)
            if run:
                self._latest[run] = end

    def find(self, token_ids: list[int]) -> int:
        """Position of what followed the run most like the one at the end; 0 if it never came. Call `catch_up` first."""
        place = self._latest.get(tuple(token_ids[-_KEY_TOKENS:]), 0)
        best, best_length = 0, 0
        for _ in range(_MOST_PLACES):
            if place == 0:
                break
            length = _common(token_ids, place)
            if length > best_length:
                best, best_length = place, length
            place = self._before[place]
        return best


class NgramDrafter:
    """Keeps an index for each sequence; a replay builds it from the ids."""

    def __init__(self) -> None:
        self._indices: dict[SequenceKey, NgramIndex] = {}
        self._found: list[int] = []

    def prepare_thread(self) -> None:
        """Any thread will do."""

    def prepare(self, sequence: Sequence) -> None:
        """Nothing is needed."""

    def use_cores(self, lent: tuple[int, ...]) -> None:
        """None are needed."""

    def limits(self, sequences: Items[Sequence], most: Items[int]) -> list[int]:
        """See Drafter.limits."""
        self._found = [self._find(sequence) if limit else 0 for sequence, limit in zip(sequences, most, strict=True)]
        return [limit if place else 0 for place, limit in zip(self._found, most, strict=True)]

    def draft(self, sequences: Items[Sequence], lengths: Items[int]) -> list[Drafts]:
        """See Drafter.draft."""
        return [
            _continuation(sequence.token_ids, place, length)
            for sequence, place, length in zip(sequences, self._found, lengths, strict=True)
        ]

    def round_cost(self) -> StepCost:
        """Next to nothing."""
        return StepCost()

    def forget(self, sequence: Sequence) -> None:
        """Drop the sequence's index."""
        self._indices.pop(sequence.key, None)

    def _find(self, sequence: Sequence) -> int:
        index = self._indices.setdefault(sequence.key, NgramIndex())
        index.catch_up(sequence.token_ids)
        return index.find(sequence.token_ids)


def _common(token_ids: list[int], place: int) -> int:
    """How many tokens before `place` are as those at the end."""
    length, most = 0, min(place, _MOST_COMPARED)
    while length < most and token_ids[place - 1 - length] == token_ids[-1 - length]:
        length += 1
    return length


def _continuation(token_ids: list[int], place: int, length: int) -> Drafts:
    """What followed at `place`; where that reaches the end it goes round, as text that repeats itself does."""
    period = len(token_ids) - place
    return tuple(token_ids[place + i % period] for i in range(length))
