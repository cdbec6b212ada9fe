"""NgramDrafter: drafts what followed an earlier occurrence of the last tokens (prompt lookup, Saxena 2023)."""

from collections.abc import Sequence

from engine.sequence import SequenceKey, SequenceState
from engine.speculation.cost import StepCost
from engine.speculation.drafter import Drafts

_KEY_TOKENS = 3
"""Length of the n-grams in the index."""
_MAX_CANDIDATES = 8
"""Earlier occurrences that are compared, latest first."""
_MAX_COMPARED = 16
"""Tokens before an occurrence that are compared."""


class NgramIndex:
    """The last occurrence of each n-gram in a sequence, with a chain to the earlier ones (as in LZ77)."""

    def __init__(self) -> None:
        self._latest: dict[tuple[int, ...], int] = {}
        self._previous: list[int] = []  # by the stop position of an n-gram: that of its previous occurrence, or 0

    def catch_up(self, token_ids: list[int]) -> None:
        """Index all n-grams except the last one, which `find` looks up."""
        for stop in range(len(self._previous), len(token_ids)):
            ngram = tuple(token_ids[stop - _KEY_TOKENS : stop]) if stop >= _KEY_TOKENS else None
            self._previous.append(self._latest.get(ngram, 0) if ngram else 0)
            if ngram:
                self._latest[ngram] = stop

    def find(self, token_ids: list[int]) -> int:
        """Position after the earlier occurrence with the longest matching context; 0 if there is none.

        Call `catch_up` first.
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


class NgramDrafter:
    """Keeps an index per sequence; a replay rebuilds it from the token ids."""

    def __init__(self) -> None:
        self._indices: dict[SequenceKey, NgramIndex] = {}
        self._positions: list[int] = []

    def prepare_thread(self) -> None:
        pass

    def prepare(self, sequence: SequenceState) -> None:
        pass

    def use_cores(self, lent: tuple[int, ...]) -> None:
        pass

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
        index.catch_up(sequence.token_ids)
        return index.find(sequence.token_ids)


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
