"""The contract of what guesses tokens."""

from collections.abc import Sequence as Items
from concurrent.futures import Future
from typing import Protocol

from engine.sequence import Sequence
from engine.speculation.cost import StepCost

Drafts = tuple[int, ...]


class Drafter(Protocol):
    """Guesses how sequences go on. Plug point: NgramDrafter, DraftModel. Used by the engine's thread only.

    Guesses may be anything: they cost time if they are wrong, never exactness.
    """

    def prepare_thread(self) -> None:
        """Called once by the thread that will draft."""
        ...

    def prepare(self, sequence: Sequence) -> "Future[None] | None":
        """See Runner.prepare."""
        ...

    def use_cores(self, lent: tuple[int, ...]) -> None:
        """See Runner.use_cores."""
        ...

    def limits(self, sequences: Items[Sequence], most: Items[int]) -> list[int]:
        """How many tokens it could guess for each sequence now, at most `most`. Called before each `draft`, for the
        same sequences."""
        ...

    def draft(self, sequences: Items[Sequence], lengths: Items[int]) -> list[Drafts]:
        """Guesses for each sequence: as many as `lengths`, or fewer. Blocks for their KV are in the block tables."""
        ...

    def round_cost(self) -> StepCost:
        """What one more guess for a number of sequences costs, in seconds."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept for `sequence`; unknown ones are ignored."""
        ...
