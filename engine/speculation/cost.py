"""What steps cost, learnt from the steps themselves, and how many guesses are worth that.

A step takes a time of its own, for reading the weights, and some more for each token. Where the latter is small,
guesses are nearly free; in a large batch, or on a slow device, only good ones pay.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import NamedTuple

# Before anything is measured: what 12 tokens add doubles a step.
_USUAL_SHARE = 1 / 12
# Weight of that belief, in steps that differ by one token from the usual ones.
_BELIEF = 4.0
_MEMORY = 0.99
# What a guess must gain beyond its cost: some of that, such as a draft model's way through the prompt, is not priced.
_MARGIN = 1.15
# A step that takes this many times what was expected was interrupted, and says less.
_MOST_SURPRISE = 3.0


class StepCost(NamedTuple):
    """Seconds of a step: `fixed_s + token_s * tokens`."""

    fixed_s: float = 0.0
    token_s: float = 0.0

    def seconds(self, num_tokens: int) -> float:
        """Of a step with so many tokens."""
        return self.fixed_s + self.token_s * num_tokens


class CostFit:
    """A line through the steps seen lately: least squares, where old steps count less and less."""

    def __init__(self) -> None:
        self._weight = self._tokens = self._squares = self._seconds = self._products = 0.0
        self.cost = StepCost(1.0, _USUAL_SHARE)
        """In seconds once a step was seen; before that, only its proportions mean something."""

    def learn(self, num_tokens: int, seconds: float) -> None:
        """A step of `num_tokens` tokens took so long."""
        if self._weight:
            seconds = min(seconds, _MOST_SURPRISE * self.cost.seconds(num_tokens))
        self._weight = self._weight * _MEMORY + 1
        self._tokens = self._tokens * _MEMORY + num_tokens
        self._squares = self._squares * _MEMORY + num_tokens**2
        self._seconds = self._seconds * _MEMORY + seconds
        self._products = self._products * _MEMORY + num_tokens * seconds
        self.cost = self._solve()

    def _solve(self) -> StepCost:
        """Least squares of `seconds`, drawn to the line whose slope is the usual share of its height at 0: that decides
        alone while all steps had the same number of tokens.
        """
        ff = self._weight + _BELIEF * _USUAL_SHARE**2
        ft = self._tokens - _BELIEF * _USUAL_SHARE
        tt = self._squares + _BELIEF
        determinant = ff * tt - ft * ft
        fixed_s = (tt * self._seconds - ft * self._products) / determinant
        token_s = (ff * self._products - ft * self._seconds) / determinant
        if fixed_s <= 0 or token_s <= 0:  # noise: no step is free, and no token
            mean_s = max(self._seconds / self._weight, 1e-9)
            return StepCost(max(fixed_s, 0.01 * mean_s), max(token_s, 0.001 * mean_s))
        return StepCost(fixed_s, token_s)


@dataclass(frozen=True, slots=True)
class Prices:
    """What a guess costs: a token of the `step` that checks it, and a share of the `round` that makes it."""

    step: StepCost
    round: StepCost

    @property
    def guess_s(self) -> float:
        """Of one guess, where others are made anyway."""
        return self.step.token_s + self.round.token_s

    def least_chance(self, num_sequences: int) -> float:
        """What a first guess must have to be worth its time in a batch of sequences that decode."""
        return _MARGIN * self.guess_s * num_sequences / self.step.seconds(num_sequences)


def plan_lengths(chances: Items[float], limits: Items[int], prices: Prices) -> list[int]:
    """How many guesses each sequence should get, so that the batch gets most tokens a second.

    chances: that a sequence's next guess is right, if those before it were; limits: most guesses of each. One guess
    more for a sequence pays as long as its chance is more than what the time it takes is worth.
    """
    lengths = [0] * len(chances)
    reached = [1.0] * len(chances)  # chance that all guesses so far are right
    tokens, seconds = float(len(chances)), prices.step.seconds(len(chances))
    for length in range(1, max(limits, default=0) + 1):
        worth = _MARGIN * prices.guess_s * tokens / seconds
        chosen = [
            i
            for i, chance in enumerate(chances)
            if lengths[i] == length - 1 and limits[i] >= length and reached[i] * chance > worth
        ]
        gained = sum(reached[i] * chances[i] for i in chosen)
        spent_s = prices.round.fixed_s + prices.guess_s * len(chosen)
        if gained * seconds <= _MARGIN * spent_s * tokens:
            break
        for i in chosen:
            lengths[i] = length
            reached[i] *= chances[i]
        tokens, seconds = tokens + gained, seconds + spent_s
    return lengths
