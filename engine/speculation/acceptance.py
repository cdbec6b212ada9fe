"""Acceptance: the share of drafts that are right, per sequence or overall."""

from dataclasses import dataclass

_DECAY = 0.9
_IDLE_DECAY = 0.98
# Prior: the expected chance counts like this many trials.
_PRIOR_TRIALS = 2.0


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
        self.right = self.right * _DECAY + num_right
        self.tried = self.tried * _DECAY + num_right + (num_right < num_drafts)

    def idle(self) -> None:
        """Decay the counts after a step without drafts."""
        self.right *= _IDLE_DECAY
        self.tried *= _IDLE_DECAY
