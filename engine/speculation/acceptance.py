"""How often a sequence's guesses are right."""

from dataclasses import dataclass

_MEMORY = 0.9
_IDLE_MEMORY = 0.98
# Trials that the expectation counts for.
_BELIEF = 2.0


@dataclass(slots=True)
class Acceptance:
    """Share of right guesses, of those whose forerunners were right. Old ones count less, and without new ones the
    share drifts back to what is expected, so that a sequence that has become predictable is found out.
    """

    right: float = 0.0
    tried: float = 0.0

    def chance(self, expected: float) -> float:
        """That the next guess is right, where `expected` is what others' say."""
        return (self.right + _BELIEF * expected) / (self.tried + _BELIEF)

    def learn(self, num_right: int, num_drafts: int) -> None:
        """The first `num_right` guesses were right; what follows a wrong one was not tried."""
        self.right = self.right * _MEMORY + num_right
        self.tried = self.tried * _MEMORY + num_right + (num_right < num_drafts)

    def idle(self) -> None:
        """A step without guesses."""
        self.right *= _IDLE_MEMORY
        self.tried *= _IDLE_MEMORY
