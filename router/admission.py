"""Permits: how many choices may be in service at a time. Past that, requests are refused at once."""

from mesh.domain.errors import Overloaded

_RETRY_AFTER_S = 1.0


class Permits:
    """An exact count, used by one event loop. A request holds one permit for each of its choices."""

    def __init__(self, max_permits: int) -> None:
        self._max_permits = max_permits
        self._num_held = 0

    @property
    def max_permits(self) -> int:
        """The cap."""
        return self._max_permits

    @property
    def num_held(self) -> int:
        """Permits held now."""
        return self._num_held

    def acquire(self, count: int) -> list["Permit"]:
        """All of `count` permits, or Overloaded."""
        if self._num_held + count > self._max_permits:
            raise Overloaded(
                f"{self._num_held} of {self._max_permits} requests are in service; try again later",
                retry_after_s=_RETRY_AFTER_S,
            )
        self._num_held += count
        return [Permit(self) for _ in range(count)]

    def give_back(self) -> None:
        """Called by Permit.release only."""
        self._num_held -= 1


class Permit:
    """The right to be in service. Release it whatever happens; releasing twice does nothing."""

    def __init__(self, permits: Permits) -> None:
        self._permits: Permits | None = permits

    def release(self) -> None:
        """Give it back."""
        permits, self._permits = self._permits, None
        if permits is not None:
            permits.give_back()
