"""The contract of drafters."""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

from engine.sequence import SequenceState
from engine.speculation.cost import StepCost

Drafts = tuple[int, ...]


class Drafter(Protocol):
    """Proposes the next tokens of sequences. Plug point: NgramDrafter, DraftModel. Used by the engine's thread only.

    Drafts may be any tokens: wrong drafts cost time, but never change the output.
    """

    def prepare_thread(self) -> None:
        """Called once by the thread that will call `draft`."""
        ...

    def prepare(self, sequence: SequenceState) -> "Future[None] | None":
        """Same contract as Runner.prepare."""
        ...

    def use_cores(self, lent: tuple[int, ...]) -> None:
        """Same contract as Runner.use_cores."""
        ...

    def limits(self, sequences: Sequence[SequenceState], max_drafts: Sequence[int]) -> list[int]:
        """How many tokens it can draft for each sequence now, at most its entry in `max_drafts`.

        Called before each `draft`, for the same sequences.
        """
        ...

    def draft(self, sequences: Sequence[SequenceState], lengths: Sequence[int]) -> list[Drafts]:
        """Drafts for each sequence, at most its entry in `lengths`. The block tables have blocks for their KV."""
        ...

    def round_cost(self) -> StepCost:
        """The cost of one more draft token for each of a number of sequences."""
        ...

    def forget(self, sequence: SequenceState) -> None:
        """Drop all state of `sequence`; unknown sequences are ignored."""
        ...
