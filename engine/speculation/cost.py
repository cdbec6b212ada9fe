"""The worth of drafts: the share of them that are right (Acceptance), and a cost model of steps (CostFit, Prices).

A step has a fixed time, to read the weights, and a time per token. If the time per token is small, drafts are nearly
free; in a large batch, or on a slow device, only drafts with a high chance pay off.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

_TRIAL_DECAY = 0.9
_IDLE_DECAY = 0.98
# Prior: the expected chance counts like this many trials.
_PRIOR_TRIALS = 2.0
# Prior: 12 extra tokens double the step time.
_PRIOR_TOKEN_SHARE = 1 / 12
# Weight of the prior, in steps whose size differs by one token.
_PRIOR_WEIGHT = 4.0
_DECAY = 0.99
# A draft must gain this much more than its cost: some costs, such as the draft model's prefill, are not modelled.
_MARGIN = 1.15
# Times above this multiple of the expected time are clipped: the step was probably interrupted.
_MAX_OVERRUN = 3.0


@dataclass(slots=True)
class Acceptance:
    """Counts of drafts that were tried, and of those that were right. A draft after a wrong one is not tried.

    Old trials decay. Without new trials the chance drifts back to the prior, so a sequence that has become predictable
    gets drafts again.
    """

    right: float = 0.0
    tried: float = 0.0

    def chance(self, expected: float) -> float:
        """Probability that the next draft is right, with `expected` as the prior."""
        return (self.right + _PRIOR_TRIALS * expected) / (self.tried + _PRIOR_TRIALS)

    def learn(self, num_right: int, num_drafts: int) -> None:
        """Count a verified draft of `num_drafts` tokens, of which the first `num_right` were right."""
        self.right = self.right * _TRIAL_DECAY + num_right
        self.tried = self.tried * _TRIAL_DECAY + num_right + (num_right < num_drafts)

    def idle(self) -> None:
        """Decay the counts after a step without drafts."""
        self.right *= _IDLE_DECAY
        self.tried *= _IDLE_DECAY


class StepCost(NamedTuple):
    """Seconds of a step: `fixed_s + token_s * tokens`."""

    fixed_s: float = 0.0
    token_s: float = 0.0

    def seconds(self, num_tokens: int) -> float:
        """Expected time of a step with `num_tokens` tokens."""
        return self.fixed_s + self.token_s * num_tokens


class CostFit:
    """Fits a line through the times of recent steps: least squares with exponential decay."""

    def __init__(self) -> None:
        self._weight = self._tokens = self._squares = self._seconds = self._products = 0.0
        self.cost = StepCost(1.0, _PRIOR_TOKEN_SHARE)
        """In seconds after the first step; before that, only the ratio of its fields is meaningful."""

    def learn(self, num_tokens: int, seconds: float) -> None:
        """Add the measured time of a step of `num_tokens` tokens."""
        if self._weight:
            seconds = min(seconds, _MAX_OVERRUN * self.cost.seconds(num_tokens))
        self._weight = self._weight * _DECAY + 1
        self._tokens = self._tokens * _DECAY + num_tokens
        self._squares = self._squares * _DECAY + num_tokens**2
        self._seconds = self._seconds * _DECAY + seconds
        self._products = self._products * _DECAY + num_tokens * seconds
        self.cost = self._solve()

    def _solve(self) -> StepCost:
        """Least squares with a prior towards lines whose slope is the prior share of their intercept.

        The prior alone determines the slope while all steps have the same number of tokens.
        """
        ff = self._weight + _PRIOR_WEIGHT * _PRIOR_TOKEN_SHARE**2
        ft = self._tokens - _PRIOR_WEIGHT * _PRIOR_TOKEN_SHARE
        tt = self._squares + _PRIOR_WEIGHT
        determinant = ff * tt - ft * ft
        fixed_s = (tt * self._seconds - ft * self._products) / determinant
        token_s = (ff * self._products - ft * self._seconds) / determinant
        if fixed_s <= 0 or token_s <= 0:  # noise: neither a step nor a token is free
            mean_s = max(self._seconds / self._weight, 1e-9)
            return StepCost(max(fixed_s, 0.01 * mean_s), max(token_s, 0.001 * mean_s))
        return StepCost(fixed_s, token_s)


@dataclass(frozen=True, slots=True)
class Prices:
    """The cost of a draft: a token of the `step` that verifies it, and a share of the `round` that produces it."""

    step: StepCost
    round: StepCost

    @property
    def draft_s(self) -> float:
        """Marginal cost of one more draft in a round that runs anyway."""
        return self.step.token_s + self.round.token_s

    def min_chance(self, num_sequences: int) -> float:
        """The acceptance chance above which a first draft pays off in a batch of `num_sequences` decodes."""
        return _MARGIN * self.draft_s * num_sequences / self.step.seconds(num_sequences)


def plan_lengths(chances: Sequence[float], limits: Sequence[int], prices: Prices) -> list[int]:
    """The number of drafts of each sequence that maximises the batch's tokens per second.

    chances: probability, per sequence, that its next draft is right if the drafts before it are. limits: maximum number
    of drafts per sequence. A further draft pays off while its expected tokens exceed the tokens that the batch would
    produce in the time of the draft.
    """
    lengths = [0] * len(chances)
    reached = [1.0] * len(chances)  # chance that all drafts so far are right
    tokens, seconds = float(len(chances)), prices.step.seconds(len(chances))
    for length in range(1, max(limits, default=0) + 1):
        worth = _MARGIN * prices.draft_s * tokens / seconds
        chosen = [
            i
            for i, chance in enumerate(chances)
            if lengths[i] == length - 1 and limits[i] >= length and reached[i] * chance > worth
        ]
        gained = sum(reached[i] * chances[i] for i in chosen)
        spent_s = prices.round.fixed_s + prices.draft_s * len(chosen)
        if gained * seconds <= _MARGIN * spent_s * tokens:
            break
        for i in chosen:
            lengths[i] = length
            reached[i] *= chances[i]
        tokens, seconds = tokens + gained, seconds + spent_s
    return lengths
