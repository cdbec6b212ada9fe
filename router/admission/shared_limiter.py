"""Permits that routers share: one cap per model over all routers, held as leases in Redis.

    acquire ─▶ do this router's permits alone reach the cap? refused here
        └─▶ requested in the next round trip, together with other waiting requests ─▶ leased, or refused
    release ─▶ told in the next round trip; there is one at least every `renew_s`

One task makes all round trips, one at a time. Each renews the lease of the router and tells the numbers that it holds
(permit_leases.py), so it costs the same for any number of permits. A router that dies stops renewing: what it held is
free after `lease_s`.

While Redis is unavailable a router accepts new work up to its share: the cap divided by the last known number of
routers, at least 1. It keeps the permits it holds. So all routers together can exceed the cap only by the permits that
some held beyond their shares when Redis failed, and only until that work ends. When Redis returns, each router writes
its counts anew.

If Redis has lost its data (wiped, failed over), it does not know all counts until every router has renewed. Until then
(about two seconds, or a whole lease if a router is missing) a router holds at most what it held when it last knew the
total, plus its part of what was free then, within its share. A router that has just started holds none.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import structlog
from redis.asyncio import Redis

from mesh.redis_connection import FAILURES, cause_of, open_redis
from mesh.tasks import require_not_cancelled, set_within
from router.admission.limiter import Permit, overloaded
from router.admission.permit_leases import LeaseTimes, PermitReply, PermitRequest, PermitStore
from router.tenants import ANONYMOUS, Tenant

log = structlog.get_logger(__name__)

# A Redis that hangs delays the first requests by this much; from then on it counts as unavailable.
_PATIENCE_S = 0.25
_LEAVE_S = 1.0
_MAX_REQUESTS = 256


@dataclass(eq=False, slots=True)
class _Waiter:
    """A waiting request for permits. The reply is None if Redis is unavailable."""

    request: PermitRequest
    reply: asyncio.Future[PermitReply | None]


class _Holdings:
    """Permits that this router holds, by tenant, and the tenants whose count Redis may not know."""

    def __init__(self) -> None:
        self.held: Counter[str] = Counter()
        self.num_held = 0
        self.untold: set[str] = set()

    def add(self, tenant: str, count: int) -> None:
        """Add permits that this router has taken."""
        self.held[tenant] += count
        self.num_held += count

    def release(self, tenant: str) -> None:
        """Give one of the tenant's permits back."""
        self.untold.add(tenant)
        self.num_held -= 1
        self.held[tenant] -= 1
        if not self.held[tenant]:
            del self.held[tenant]

    def tell(self, tenants: Iterable[str]) -> dict[str, int]:
        """The counts of these tenants and of the untold ones, which count as told from now on."""
        told = self.untold.union(tenants)
        self.untold = set()
        return {tenant: self.held[tenant] for tenant in told}


class SharedLimiter:
    """A ConcurrencyLimiter whose permits are leases that routers share: one router's part of the permits of a model.
    Used by one event loop; `run()` is the task that calls Redis.
    """

    def __init__(
        self,
        url: str,
        router_id: str,
        cap: int,
        times: LeaseTimes | None = None,
        *,
        model: str = "",
    ) -> None:
        self._url = url
        self._cap = cap
        self._times = times or LeaseTimes()
        self._store = PermitStore(router_id, self._times, model)
        self._holdings = _Holdings()
        self._waiters: list[_Waiter] = []
        self._wake = asyncio.Event()
        self._num_routers = 1
        self._allowance = 0
        self.connected = asyncio.Event()
        """Set while Redis decides; while clear, this router's share decides."""

    @property
    def num_held(self) -> int:
        return self._holdings.num_held

    @property
    def share(self) -> int:
        """The permits that this router may hold while Redis is unavailable."""
        return max(1, self._cap // self._num_routers)

    @property
    def max_permits(self) -> int:
        return self._cap

    async def acquire(self, count: int, tenant: Tenant = ANONYMOUS, cap: int | None = None) -> list[Permit]:
        request = PermitRequest(tenant.name, tenant.max_concurrent_requests, self._cap if cap is None else cap, count)
        self._require_capacity(request, share_of=1)
        reply: PermitReply | None = None
        if self.connected.is_set():
            waiter = _Waiter(request, asyncio.get_running_loop().create_future())
            self._waiters.append(waiter)
            self._wake.set()
            try:
                reply = await waiter.reply
            except asyncio.CancelledError:
                if not waiter.reply.cancelled() and (answer := waiter.reply.result()) is not None and answer.granted:
                    self._give_back(request)
                raise
        if reply is None:
            self._require_capacity(request, share_of=self._num_routers)
            self._holdings.untold.add(request.tenant)
            self._holdings.add(request.tenant, count)
        elif not reply.granted:
            cap_reached = request.tenant_cap if reply.by_tenant and request.tenant_cap is not None else request.cap
            raise overloaded(reply.num_held, cap_reached, of_tenant=reply.by_tenant)
        return [Permit(partial(self.release, request.tenant)) for _ in range(count)]

    def release(self, tenant: str = "") -> None:
        """Release one of the tenant's permits."""
        self._holdings.release(tenant)
        self._wake.set()

    async def run(self) -> None:
        """Exchange permits with Redis until cancelled."""
        async with open_redis(self._url, timeout_s=_PATIENCE_S) as redis:
            try:
                renew_at_s = 0.0
                while True:
                    require_not_cancelled()
                    is_due = time.monotonic() >= renew_at_s
                    if is_due:
                        renew_at_s = time.monotonic() + self._times.renew_s
                    if is_due or self.connected.is_set():
                        await self._round_trip(redis, renew=is_due)
                    await self._wait(renew_at_s)
            finally:
                self._note_disconnected([])

    async def leave(self) -> None:
        """Release all permits at once, if Redis is available. Call it after `run` has ended."""
        try:
            async with asyncio.timeout(_LEAVE_S), open_redis(self._url, timeout_s=_PATIENCE_S) as redis:
                await self._store.leave(redis)
        except FAILURES as error:
            log.warning("permits stay leased until they expire", error=cause_of(error))

    async def _wait(self, renew_at_s: float) -> None:
        if not self._waiters:
            await set_within(self._wake, max(0.0, renew_at_s - time.monotonic()))
        self._wake.clear()

    async def _round_trip(self, redis: Redis, *, renew: bool) -> None:
        waiters, self._waiters = self._waiters[:_MAX_REQUESTS], self._waiters[_MAX_REQUESTS:]
        waiters = [waiter for waiter in waiters if not waiter.reply.done()]
        if not (renew or waiters or self._holdings.untold):
            return
        # Redis must know of these tenants all that counts for their caps.
        by_tenant = self._holdings.tell(waiter.request.tenant for waiter in waiters)
        requests, num_held = [waiter.request for waiter in waiters], self._holdings.num_held
        try:
            totals, replies = await self._store.exchange(
                redis, self._num_routers, num_held, by_tenant, requests, allowance=self._allowance
            )
        except FAILURES as error:
            # Redis may have written these, and granted what was asked for, without our receiving the answer.
            self._holdings.untold.update(by_tenant)
            self._note_disconnected(waiters, error)
            # The address may lead elsewhere by now: a server that has become a replica keeps its connections.
            with contextlib.suppress(*FAILURES):
                await redis.connection_pool.disconnect()
            return
        except BaseException:
            self._note_disconnected(waiters)
            raise
        if totals.was_missing:
            self._holdings.untold.update(self._holdings.held)
        # While counts are being written anew, routers missing from the count may only be late.
        self._num_routers = max(1, totals.num_routers, self._num_routers if totals.settling else 0)
        if not totals.settling:
            self._note_total(totals.num_leased)
        self._note_connected()
        if self._holdings.untold:
            self._wake.set()  # a permit was released meanwhile, or Redis has lost the counts of tenants
        for waiter, reply in zip(waiters, replies, strict=True):
            self._answer(waiter, reply)
            if reply.is_total:
                self._note_total(reply.num_held)

    def _answer(self, waiter: _Waiter, reply: PermitReply) -> None:
        if reply.granted:
            self._holdings.add(waiter.request.tenant, waiter.request.count)
        if not waiter.reply.done():
            waiter.reply.set_result(reply)
        elif reply.granted:  # the caller was cancelled
            self._give_back(waiter.request)

    def _give_back(self, request: PermitRequest) -> None:
        for _ in range(request.count):
            self.release(request.tenant)

    def _note_total(self, num_leased: int) -> None:
        """Update the allowance: all routers together hold this many permits."""
        free = max(0, self._cap - num_leased) // self._num_routers
        # Limited to the share: other routers may take free permits before this router knows.
        self._allowance = min(self.num_held + free, max(self.num_held, self.share))

    def _note_connected(self) -> None:
        if not self.connected.is_set():
            self.connected.set()
            log.info("permits are shared", routers=self._num_routers, cap=self._cap)

    def _note_disconnected(self, waiters: list[_Waiter], error: BaseException | None = None) -> None:
        """Redis is unavailable: answer waiting requests by this router's share."""
        waiters, self._waiters = [*waiters, *self._waiters], []
        if self.connected.is_set() and error is not None:
            log.warning("redis is away", what="permits", share=self.share, error=cause_of(error))
        self.connected.clear()
        for waiter in waiters:
            if not waiter.reply.done():
                waiter.reply.set_result(None)

    def _require_capacity(self, request: PermitRequest, *, share_of: int) -> None:
        """Raise Overloaded if this router alone reaches a cap divided by `share_of`."""
        count, tenant_cap = request.count, request.tenant_cap
        held_by_tenant = self._holdings.held[request.tenant]
        if tenant_cap is not None and held_by_tenant + count > max(1, tenant_cap // share_of):
            raise overloaded(held_by_tenant, tenant_cap, of_tenant=True)
        if self.num_held + count > max(1, request.cap // share_of):
            raise overloaded(self.num_held, request.cap)
