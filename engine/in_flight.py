"""BatchesInFlight: batches that are scheduled and not yet updated. Pure, like the scheduler.

Several batches may be in flight, for example one per pipeline stage. A sequence is in at most one of them. Meanwhile it
is neither preempted nor freed: its blocks stay allocated.
"""

from collections.abc import Iterable

from engine.sequence import SequenceKey, SequenceState


class BatchesInFlight:
    """The batches in flight of one scheduler, by number."""

    def __init__(self) -> None:
        self._last_number = 0
        self._keys: dict[int, tuple[SequenceKey, ...]] = {}
        self._computing: set[SequenceKey] = set()
        self._aborted: dict[SequenceKey, SequenceState] = {}

    @property
    def aborted(self) -> Iterable[SequenceState]:
        """Aborted sequences whose blocks will be freed when their batch ends."""
        return self._aborted.values()

    def has(self, sequence: SequenceState) -> bool:
        """True if a batch in flight contains this sequence."""
        return sequence.key in self._computing

    def begin(self, sequences: Iterable[SequenceState]) -> int:
        """Register a batch of these sequences; returns its number."""
        self._last_number += 1
        self._keys[self._last_number] = keys = tuple(sequence.key for sequence in sequences)
        self._computing.update(keys)
        return self._last_number

    def abort(self, sequence: SequenceState) -> None:
        """Mark a sequence of a batch in flight as aborted."""
        self._aborted[sequence.key] = sequence

    def end(self, number: int) -> list[SequenceState]:
        """Remove a computed batch; returns its sequences that were aborted meanwhile.

        Raises ValueError if no such batch is in flight.
        """
        keys = self._keys.pop(number, None)
        if keys is None:
            raise ValueError(f"batch {number} is not in flight")
        self._computing.difference_update(keys)
        return [self._aborted.pop(key) for key in keys if key in self._aborted]
