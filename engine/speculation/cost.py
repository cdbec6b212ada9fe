"""The value of drafts: their acceptance rate (Acceptance), and a cost model of steps (CostFit, DraftCosts).

A step has a fixed time, to read the weights, a time per sequence, and one per token. If the time per token is small,
drafts are nearly free; in a large batch, or on a slow device, only drafts with a high acceptance rate pay off.
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
# Weight of no cost per sequence: steps tell more, if they say how many sequences they have.
_LEAST_WEIGHT = 0.1
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
    """Seconds of a step: `fixed_s + token_s * tokens + sequence_s * sequences`."""

    fixed_s: float = 0.0
    token_s: float = 0.0
    sequence_s: float = 0.0

    def seconds(self, num_tokens: int, num_sequences: int) -> float:
        """Expected time of a step with so many tokens of so many sequences."""
        return self.fixed_s + self.token_s * num_tokens + self.sequence_s * num_sequences


class CostFit:
    """Fits a plane through the times of recent steps: least squares with exponential decay.

    A sequence costs more than a token of it: its KV and its recurrent state are read once, with drafts as without. Only
    steps with drafts tell the two apart. Until some were measured, a prior says what a token costs, so that drafts are
    tried where that is little.
    """

    def __init__(self) -> None:
        self._sums = _Sums()
        self.cost = StepCost(1.0, _PRIOR_TOKEN_SHARE)
        """In seconds after the first step; before that, only the ratio of its fields is meaningful."""

    def learn(self, num_tokens: int, num_sequences: int, seconds: float) -> None:
        """Add the measured time of a step. After one that took much less than expected, earlier ones do not count: the
        first steps of a process are slow.
        """
        sums, t, s = self._sums, num_tokens, num_sequences
        if sums.steps:
            expected = self.cost.seconds(t, s)
            sums = _Sums() if seconds * _MAX_OVERRUN < expected else sums
            seconds = min(seconds, _MAX_OVERRUN * expected)
        step = (1, t, s, t * t, t * s, s * s, seconds, t * seconds, s * seconds)
        self._sums = _Sums(*(_DECAY * sum_ + x for sum_, x in zip(sums, step, strict=True)))
        self.cost = self._solve()

    def _solve(self) -> StepCost:
        """Least squares by elimination. Prior: a token costs its usual share of what is fixed, a sequence nothing."""
        sums, share = self._sums, _PRIOR_TOKEN_SHARE
        steps, tokens = sums.steps + _PRIOR_WEIGHT * share**2, sums.tokens - _PRIOR_WEIGHT * share
        of_tokens, of_sequences = tokens / steps, sums.sequences / steps
        tt = sums.tt + _PRIOR_WEIGHT - of_tokens * tokens
        ts = sums.ts - of_tokens * sums.sequences
        ss = sums.ss + _LEAST_WEIGHT - of_sequences * sums.sequences
        t_seconds = sums.t_seconds - of_tokens * sums.seconds
        s_seconds = sums.s_seconds - of_sequences * sums.seconds
        sequence_s = max(0.0, (s_seconds - ts / tt * t_seconds) / (ss - ts / tt * ts))
        token_s = (t_seconds - ts * sequence_s) / tt
        fixed_s = (sums.seconds - tokens * token_s - sums.sequences * sequence_s) / steps
        if fixed_s <= 0 or token_s <= 0:  # noise: neither a step nor a token is free
            mean_s = max(sums.seconds / sums.steps, 1e-9)
            return StepCost(max(fixed_s, 0.01 * mean_s), max(token_s, 0.001 * mean_s), sequence_s)
        return StepCost(fixed_s, token_s, sequence_s)


class _Sums(NamedTuple):
    """Decayed sums over steps: of their tokens (t), sequences (s) and seconds, and of products of these."""

    steps: float = 0.0
    tokens: float = 0.0
    sequences: float = 0.0
    tt: float = 0.0
    ts: float = 0.0
    ss: float = 0.0
    seconds: float = 0.0
    t_seconds: float = 0.0
    s_seconds: float = 0.0


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
        """Seconds more of a draft that is accepted."""
        return self.step.token_s if self.is_repeated else 0.0

    def min_rate(self, num_sequences: int) -> float:
        """The acceptance rate above which a first draft pays off in a batch of `num_sequences` decodes."""
        return self.min_chance(num_sequences / self.step.seconds(num_sequences, num_sequences))

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
    tokens, seconds = float(len(rates)), costs.step.seconds(len(rates), len(rates))
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
