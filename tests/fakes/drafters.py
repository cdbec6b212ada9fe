"""Drafters that know the answer, most of the time."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import count
from random import Random

from engine.sequence import SequenceState
from engine.speculation.cost import CostFit, StepCost
from engine.speculation.drafters import Drafter, Drafts
from engine.speculation.speculator import Speculator

Truth = Callable[[SequenceState, int], Sequence[int]]


def known(continuations: Mapping[str, Sequence[int]]) -> Truth:
    """What each request generates, by its id."""

    def look_up(sequence: SequenceState, length: int) -> Sequence[int]:
        return continuations[sequence.spec.request_id][sequence.num_generated : sequence.num_generated + length]

    return look_up


def eager_speculator(drafter: Drafter, max_drafts: int) -> Speculator:
    """Guesses as much as it may: every step takes a second, however many tokens it computes."""
    fit = CostFit()
    for num_tokens in range(1, 100):
        fit.learn(num_tokens, 1, 1.0)
    return Speculator(drafter, max_drafts, fit, clock=partial(next, map(float, count())))


class FakeDrafter(Drafter):
    """Guesses `truth(sequence, length)`; `mistakes` is the share of guesses that are another token."""

    borrows_cores = False

    def __init__(self, truth: Truth, mistakes: float = 0.0, vocab_size: int = 200) -> None:
        self._truth = truth
        self._mistakes = mistakes
        self._vocab_size = vocab_size
        self._random = Random(0)

    def prepare(self, choices: Sequence[SequenceState]) -> "Sequence[Future[None]]":
        return ()

    def use_cores(self, lent: tuple[int, ...]) -> None:
        """The fake computes nothing, so lent cores do not matter."""

    def limits(self, sequences: Sequence[SequenceState], max_drafts: Sequence[int]) -> list[int]:
        """Anything goes."""
        return list(max_drafts)

    def draft(self, sequences: Sequence[SequenceState], lengths: Sequence[int]) -> list[Drafts]:
        """The truth, with mistakes."""
        return [self._guess(sequence, length) for sequence, length in zip(sequences, lengths, strict=True)]

    def _guess(self, sequence: SequenceState, length: int) -> Drafts:
        wrong = self._random.random
        return tuple(
            (token + 1) % self._vocab_size if wrong() < self._mistakes else token
            for token in self._truth(sequence, length)
        )

    def round_cost(self) -> StepCost:
        return StepCost()

    def forget(self, sequence: SequenceState) -> None:
        """Nothing is kept."""
