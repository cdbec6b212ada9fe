"""Drafters that know the answer, or parts of it."""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from itertools import count
from random import Random

from engine.sequence import Sequence
from engine.speculation.cost import StepCost
from engine.speculation.drafter import Drafts


def free_tokens() -> Iterator[float]:
    """A clock by which every step takes as long, so that guesses cost nothing: `partial(next, free_tokens())`."""
    return map(float, count())


class FakeDrafter:
    """Guesses from known continuations, by request id; `mistakes` is the share of guesses that are another token."""

    def __init__(self, continuations: Mapping[str, Items[int]], mistakes: float = 0.0, vocab_size: int = 200) -> None:
        self._continuations = continuations
        self._mistakes = mistakes
        self._vocab_size = vocab_size
        self._random = Random(0)

    def prepare_thread(self) -> None:
        """Any thread will do."""

    def prepare(self, sequence: Sequence) -> None:
        """Nothing is needed."""

    def use_cores(self, lent: tuple[int, ...]) -> None:
        """None are needed."""

    def limits(self, sequences: Items[Sequence], most: Items[int]) -> list[int]:
        """Anything goes."""
        return list(most)

    def draft(self, sequences: Items[Sequence], lengths: Items[int]) -> list[Drafts]:
        """The truth, with mistakes."""
        return [self._guess(sequence, length) for sequence, length in zip(sequences, lengths, strict=True)]

    def _guess(self, sequence: Sequence, length: int) -> Drafts:
        known = self._continuations[sequence.request.request_id]
        truth = known[sequence.num_generated : sequence.num_generated + length]
        wrong = self._random.random
        return tuple((token + 1) % self._vocab_size if wrong() < self._mistakes else token for token in truth)

    def round_cost(self) -> StepCost:
        """Nothing."""
        return StepCost()

    def forget(self, sequence: Sequence) -> None:
        """Nothing is kept."""
