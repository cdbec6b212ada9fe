"""The value of drafts: their acceptance rate (Acceptance), and a cost model of steps (CostFit, DraftCosts).

A step has a fixed time, to read the weights, and a time per token. If the time per token is small, drafts are nearly
free; in a large batch, or on a slow device, only drafts with a high acceptance rate pay off.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

_DRAFT_DECAY = 0.9
_IDLE_DECAY = 0.98
# Prior: the expected rate counts like this many drafts.
_PRIOR_DRAFTS = 2.0
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
    """Counts of drafts that were judged, and of those that were accepted. A draft behind a rejected one is not judged.

    Old counts decay. Without new drafts the rate drifts back to the prior, so a sequence that has become predictable
    gets drafts again.
    """

    accepted: float = 0.0
    judged: float = 0.0

    def rate(self, prior: float) -> float:
        """Probability that the next draft is accepted."""
        return (self.accepted + _PRIOR_DRAFTS * prior) / (self.judged + _PRIOR_DRAFTS)

    def learn(self, num_accepted: int, num_drafts: int) -> None:
        """Count a verified draft of `num_drafts` tokens, of which the first `num_accepted` were accepted."""
        self.accepted = self.accepted * _DRAFT_DECAY + num_accepted
        self.judged = self.judged * _DRAFT_DECAY + num_accepted + (num_accepted < num_drafts)

    def idle(self) -> None:
        """Decay the counts after a step without drafts."""
        self.accepted *= _IDLE_DECAY
        self.judged *= _IDLE_DECAY


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
class DraftCosts:
    """The costs of a draft: a token of the `step` that verifies it, a share of the `round` that produces it, and if it
    `is_repeated` once accepted (see ScheduledSequence), a token of the next step.
    """

    step: StepCost
    round: StepCost
    is_repeated: bool = False

    @property
    def draft_s(self) -> float:
        """Marginal cost of one more draft in a round that runs anyway."""
        return self.step.token_s + self.round.token_s

    @property
    def accepted_s(self) -> float:
        """What it costs besides, once it is accepted."""
        return self.step.token_s if self.is_repeated else 0.0

    def min_rate(self, num_sequences: int) -> float:
        """The acceptance rate above which a first draft pays off in a batch of `num_sequences` decodes."""
        return self.min_chance(num_sequences / self.step.seconds(num_sequences))

    def min_chance(self, tokens_per_s: float) -> float:
        """The probability of being accepted above which a draft pays off in a step that makes so many tokens a second
        without it.
        """
        worth = _MARGIN * tokens_per_s  # tokens that a second must make
        return worth * self.draft_s / max(1e-9, 1 - worth * self.accepted_s)


def plan_lengths(rates: Sequence[float], limits: Sequence[int], costs: DraftCosts) -> list[int]:
    """The number of drafts of each sequence that maximises the batch's tokens per second.

    rates: probability, per sequence, that its next draft is accepted if the drafts before it are. limits: maximum
    number of drafts per sequence. A further draft pays off while its expected tokens exceed the tokens that the batch
    would produce in the time of the draft.
    """
    lengths = [0] * len(rates)
    reached = [1.0] * len(rates)  # probability that all drafts so far are accepted
    tokens, seconds = float(len(rates)), costs.step.seconds(len(rates))
    for length in range(1, max(limits, default=0) + 1):
        least = costs.min_chance(tokens / seconds)
        chosen = [
            i
            for i, rate in enumerate(rates)
            if lengths[i] == length - 1 and limits[i] >= length and reached[i] * rate > least
        ]
        gained = sum(reached[i] * rates[i] for i in chosen)
        spent_s = costs.round.fixed_s + costs.draft_s * len(chosen) + costs.accepted_s * gained
        if gained * seconds <= _MARGIN * spent_s * tokens:
            break
        for i in chosen:
            lengths[i] = length
            reached[i] *= rates[i]
        tokens, seconds = tokens + gained, seconds + spent_s
    return lengths
