"""Permits: how many choices may be in service at a time, in all and of one tenant. Past that, requests are refused at
once.
"""

from collections import Counter
from typing import Protocol

from mesh.domain.errors import Overloaded
from router.tenants import ANONYMOUS, Tenant

_RETRY_AFTER_S = 1.0


class Admission(Protocol):
    """Who gives permits. Plug point: Permits for a router of its own, LeasedPermits where routers share a cap."""

    @property
    def max_permits(self) -> int:
        """The cap."""
        ...

    @property
    def num_held(self) -> int:
        """Permits this router holds now."""
        ...

    async def admit(self, count: int, tenant: Tenant = ANONYMOUS, most: int | None = None) -> list["Permit"]:
        """All of `count` permits, or Overloaded; with `most`, as if that were the cap. When cancelled, none stays
        taken.
        """
        ...

    def give_back(self, tenant: Tenant) -> None:
        """Called by Permit.release only."""
        ...


class Permits:
    """An exact count, used by one event loop. A request holds one permit for each of its choices."""

    def __init__(self, max_permits: int) -> None:
        self._max_permits = max_permits
        self._num_held = 0
        self._held_by: Counter[str] = Counter()

    @property
    def max_permits(self) -> int:
        """The cap."""
        return self._max_permits

    @property
    def num_held(self) -> int:
        """Permits held now."""
        return self._num_held

    async def admit(self, count: int, tenant: Tenant = ANONYMOUS, most: int | None = None) -> list["Permit"]:
        """`acquire`, as Admission has it."""
        return self.acquire(count, tenant, most)

    def acquire(self, count: int, tenant: Tenant = ANONYMOUS, most: int | None = None) -> list["Permit"]:
        """All of `count` permits, or Overloaded."""
        most = self._max_permits if most is None else most
        cap, held = tenant.max_concurrent_requests, self._held_by[tenant.name]
        if cap is not None and held + count > cap:
            raise Overloaded(
                f"{held} of your {cap} requests are in service; try again later", retry_after_s=_RETRY_AFTER_S
            )
        if self._num_held + count > most:
            raise Overloaded(
                f"{self._num_held} of {most} requests are in service; try again later",
                retry_after_s=_RETRY_AFTER_S,
            )
        self._num_held += count
        self._held_by[tenant.name] += count
        return [Permit(self, tenant) for _ in range(count)]

    def give_back(self, tenant: Tenant) -> None:
        """Called by Permit.release only."""
        self._num_held -= 1
        self._held_by[tenant.name] -= 1


class Permit:
    """The right to be in service. Release it whatever happens; releasing twice does nothing."""

    def __init__(self, permits: Admission, tenant: Tenant) -> None:
        self._permits: Admission | None = permits
        self._tenant = tenant

    def release(self) -> None:
        """Give it back."""
        permits, self._permits = self._permits, None
        if permits is not None:
            permits.give_back(self._tenant)
