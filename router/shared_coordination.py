"""A router's ties to others through Redis: workers are found there, and the cap on permits holds for all together."""

import asyncio

from mesh.registry.membership import Membership
from mesh.registry.permits import SharedPermits
from mesh.registry.redis_registry import RedisRegistry
from router.admission import Admission, Permit
from router.channels import Caller
from router.settings import RouterSettings
from router.tenants import ANONYMOUS, Tenant


class LeasedPermits:
    """An Admission: permits are leases that routers share."""

    def __init__(self, shared: SharedPermits, max_permits: int) -> None:
        self._shared = shared
        self.max_permits = max_permits

    @property
    def num_held(self) -> int:
        """Permits this router holds now."""
        return self._shared.num_held

    async def admit(self, count: int, tenant: Tenant = ANONYMOUS, most: int | None = None) -> list[Permit]:
        """See Admission.admit."""
        await self._shared.acquire(count, tenant.name, tenant.max_concurrent_requests, most)
        return [Permit(self, tenant) for _ in range(count)]

    def give_back(self, tenant: Tenant) -> None:
        """Called by Permit.release only."""
        self._shared.release(tenant.name)


class SharedRegistry:
    """A Coordination. Raises ConfigurationError."""

    address = ""

    def __init__(self, settings: RouterSettings, membership: Membership, caller: Caller) -> None:
        self._registry = RedisRegistry(settings.registry_url, membership, caller.credentials)
        self._settings = settings
        self._router_id = caller.router_id
        self._shared: list[SharedPermits] = []
        self._tasks: list[asyncio.Task[None]] = []

    def permits_of(self, model: str) -> Admission:
        """Shared with other routers of the model."""
        cap = self._settings.max_concurrent_requests
        shared = SharedPermits(self._settings.registry_url, self._router_id, cap, model=model)
        self._shared.append(shared)
        return LeasedPermits(shared, cap)

    async def start(self) -> None:
        """Follow the workers and keep the permits."""
        runs = (self._registry.run(), *(shared.run() for shared in self._shared))
        self._tasks = [asyncio.create_task(run) for run in runs]

    async def stop(self) -> None:
        """Other routers need not wait for leases to expire."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(shared.leave() for shared in self._shared))
