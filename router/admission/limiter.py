"""Concurrency limits: how many choices may be in service at a time, in all and per tenant. A request over a limit is
refused at once.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Protocol

from mesh.domain.errors import Overloaded
from router.tenants import ANONYMOUS, Tenant


class ConcurrencyLimiter(Protocol):
    """Grants permits. Plug point: LocalLimiter for a single router, SharedLimiter where routers share a cap."""

    @property
    def max_permits(self) -> int:
        """The cap over all tenants."""
        ...

    @property
    def num_held(self) -> int:
        """Permits that this router holds now."""
        ...

    async def acquire(self, count: int, tenant: Tenant = ANONYMOUS, cap: int | None = None) -> list["Permit"]:
        """Return `count` permits, or raise Overloaded; `cap` lowers the cap for this call.

        Cancellation leaves no permit taken.
        """
        ...


class LocalLimiter:
    """A ConcurrencyLimiter that counts exactly, on one event loop. A request holds one permit per choice."""

    def __init__(self, max_permits: int) -> None:
        self._max_permits = max_permits
        self._num_held = 0
        self._held_by: Counter[str] = Counter()

    @property
    def max_permits(self) -> int:
        return self._max_permits

    @property
    def num_held(self) -> int:
        return self._num_held

    async def acquire(self, count: int, tenant: Tenant = ANONYMOUS, cap: int | None = None) -> list["Permit"]:
        cap = self._max_permits if cap is None else cap
        tenant_cap, tenant_held = tenant.max_concurrent_requests, self._held_by[tenant.name]
        if tenant_cap is not None and tenant_held + count > tenant_cap:
            raise overloaded(tenant_held, tenant_cap, of_tenant=True)
        if self._num_held + count > cap:
            raise overloaded(self._num_held, cap)
        self._num_held += count
        self._held_by[tenant.name] += count
        return [Permit(partial(self._give_back, tenant)) for _ in range(count)]

    def _give_back(self, tenant: Tenant) -> None:
        self._num_held -= 1
        self._held_by[tenant.name] -= 1
        if not self._held_by[tenant.name]:
            del self._held_by[tenant.name]


class Permit:
    """The right to run one choice. The holder must release it; a second release does nothing."""

    def __init__(self, give_back: Callable[[], None]) -> None:
        self._give_back: Callable[[], None] | None = give_back

    def release(self) -> None:
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()


def overloaded(num_held: int, cap: int, *, of_tenant: bool = False) -> Overloaded:
    """The refusal at a cap: the tenant's own, or that of all tenants."""
    whose = "your " if of_tenant else ""
    return Overloaded(f"{num_held} of {whose}{cap} requests are in service; try again later")
