"""Permits that routers share: one cap for all of a model's, held as leases in Redis.

    acquire ─▶ own permits alone reach the cap? refused here
        └─▶ asked, with whatever else waits, in the next round trip ─▶ leased, or refused
    release ─▶ given back in the next round trip; every `renew_s` the held ones are renewed

One task makes all round trips, one at a time, so a release can never be overtaken by a renewal. A router that dies
stops renewing: its leases run out after `lease_s`.

While Redis is away a router takes new work up to its share: the cap divided by the number of routers it knew last, at
least 1. What it already holds, it keeps. So routers together can be above the cap only by what some held beyond their
shares when Redis went, and only until that work ends; when Redis returns, each writes its leases anew.

A Redis that is there but has lost its data (wiped, failed over) does not know all leases until every router has
renewed. Until then, some two seconds, or a whole lease if one is missing, a router takes no more than it held when it
last knew the sum, and its part of what was free then, within its share: one that has just started, nothing.
"""

import asyncio
import contextlib
import time
from collections import defaultdict
from dataclasses import dataclass, field

import structlog
from redis.asyncio import Redis

from mesh.domain.errors import Overloaded
from mesh.domain.request import mint_id
from mesh.registry.redis_connection import FAILURES, open_redis, require_not_cancelled
from mesh.registry.redis_permits import Exchange, Keep, LeaseTimes, PermitStore, Take, Taken

log = structlog.get_logger(__name__)

_RETRY_AFTER_S = 1.0
# A Redis that hangs delays those who ask first by this much; from then on it counts as away.
_PATIENCE_S = 0.25
_LEAVE_S = 1.0
_MAX_TAKES = 256


@dataclass(eq=False, slots=True)
class _Ask:
    """Someone waiting for permits. The reply is None if Redis cannot say."""

    tenant: str
    tenant_cap: int | None
    cap: int
    ids: list[str]
    reply: asyncio.Future[Taken | None]


@dataclass(slots=True)
class _Holdings:
    """What this router holds and has still to give back, by tenant. Permits of one tenant are all alike."""

    held: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    released: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    num_held: int = 0

    def add(self, tenant: str, ids: list[str]) -> None:
        """They are held now."""
        self.held[tenant].extend(ids)
        self.num_held += len(ids)

    def release_one(self, tenant: str) -> None:
        """One of the tenant's."""
        self.released[tenant].append(self.held[tenant].pop())
        self.num_held -= 1
        if not self.held[tenant]:
            del self.held[tenant]

    def keeps(self, *, renew: bool) -> list[Keep]:
        """All that Redis has to hear. With `renew` never empty, so that the router is seen."""
        names = {*self.released, *(self.held if renew else ())} | ({""} if renew else set())
        held = self.held if renew else {}
        return [Keep(name, tuple(self.released.get(name, ())), tuple(held.get(name, ()))) for name in sorted(names)]

    def heard(self, keeps: list[Keep]) -> None:
        """Redis has been told of these releases."""
        for keep in keeps:
            left = self.released.pop(keep.tenant, [])[len(keep.released) :]
            if left:
                self.released[keep.tenant] = left


class SharedPermits:
    """One router's permits. Used by one event loop; `run()` is the task that talks to Redis."""

    def __init__(self, url: str, router_id: str, cap: int, times: LeaseTimes | None = None, *, model: str = "") -> None:
        self._url = url
        self._cap = cap
        self._times = times or LeaseTimes()
        self._store = PermitStore(router_id, self._times, model)
        self._holdings = _Holdings()
        self._asks: list[_Ask] = []
        self._wake = asyncio.Event()
        self._num_routers = 1
        self._allowance = 0
        self._has_been_here = False
        self.connected = asyncio.Event()
        """Set while Redis decides; otherwise this router's share does."""

    @property
    def num_held(self) -> int:
        """Permits this router holds."""
        return self._holdings.num_held

    @property
    def share(self) -> int:
        """What this router may hold when it cannot ask."""
        return max(1, self._cap // self._num_routers)

    async def acquire(
        self, count: int, tenant: str = "", tenant_cap: int | None = None, cap: int | None = None
    ) -> None:
        """Take `count` permits, or raise Overloaded; `cap`: as if the cap were lower. When cancelled, nothing stays
        taken.
        """
        ask = _Ask(tenant, tenant_cap, self._cap if cap is None else cap, [mint_id() for _ in range(count)], _reply())
        self._require_room(ask, share_of=1)
        if self.connected.is_set():
            self._asks.append(ask)
            self._wake.set()
            try:
                taken = await ask.reply
            except asyncio.CancelledError:
                if not ask.reply.cancelled() and (answer := ask.reply.result()) is not None and answer.granted:
                    self._give_back(ask)
                raise
            if taken is not None:
                if not taken.granted:
                    raise _overloaded(taken.num_held, tenant_cap if taken.by_tenant else ask.cap, taken.by_tenant)
                return
            # Redis may have granted these, unheard.
            self._holdings.released[tenant].extend(ask.ids)
        self._require_room(ask, share_of=self._num_routers)
        self._holdings.add(tenant, [mint_id() for _ in range(count)])

    def release(self, tenant: str = "") -> None:
        """Give one of the tenant's permits back."""
        self._holdings.release_one(tenant)
        self._wake.set()

    async def run(self) -> None:
        """Talk to Redis until cancelled."""
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
                self._lost_touch([])

    async def leave(self) -> None:
        """After `run` has ended: give everything back at once, if Redis is there."""
        keeps = [Keep(name, tuple(ids)) for name, ids in self._holdings.held.items()]
        try:
            async with asyncio.timeout(_LEAVE_S), open_redis(self._url, timeout_s=_PATIENCE_S) as redis:
                await self._store.leave(redis, [*self._holdings.keeps(renew=False), *keeps])
        except FAILURES as error:
            log.warning("permits stay leased until they expire", error=str(error))

    async def _wait(self, renew_at_s: float) -> None:
        if not self._asks:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, renew_at_s - time.monotonic())):
                    await self._wake.wait()
        self._wake.clear()

    async def _round_trip(self, redis: Redis, *, renew: bool) -> None:
        asks, self._asks = self._asks[:_MAX_TAKES], self._asks[_MAX_TAKES:]
        asks = [ask for ask in asks if not ask.reply.done()]
        keeps = self._holdings.keeps(renew=renew)
        if not keeps and not asks:
            return
        exchange = Exchange(renew, self._num_routers, renew and self._has_been_here, keeps, self._takes(asks))
        try:
            known, answers = await self._store.exchange(redis, exchange)
        except FAILURES as error:
            self._lost_touch(asks, error)
            return
        except BaseException:
            self._lost_touch(asks)
            raise
        self._holdings.heard(keeps)
        if renew and known is not None:
            # While leases are still being written anew, routers missing from the count may be just late.
            self._num_routers = max(1, known.num_routers, self._num_routers if known.settling else 0)
            if not known.settling:
                self._note_total(known.num_leased)
            self._found_touch()
        for ask, taken in zip(asks, answers, strict=True):
            self._answer(ask, taken)
            if taken.is_total:
                self._note_total(taken.num_held)

    def _takes(self, asks: list[_Ask]) -> list[Take]:
        takes, held = list[Take](), self.num_held
        for ask in asks:
            takes.append(Take(ask.tenant, ask.tenant_cap, ask.cap, ask.ids, self._allowance, held))
            held += len(ask.ids)
        return takes

    def _answer(self, ask: _Ask, taken: Taken) -> None:
        if taken.granted:
            self._holdings.add(ask.tenant, ask.ids)
        if not ask.reply.done():
            ask.reply.set_result(taken)
        elif taken.granted:  # whoever asked has left
            self._give_back(ask)

    def _give_back(self, ask: _Ask) -> None:
        for _ in ask.ids:
            self.release(ask.tenant)

    def _note_total(self, num_leased: int) -> None:
        """All routers hold this many."""
        free = max(0, self._cap - num_leased) // self._num_routers
        # Not beyond the share: others may take what was free before this router hears of it.
        self._allowance = min(self.num_held + free, max(self.num_held, self.share))

    def _found_touch(self) -> None:
        self._has_been_here = True
        if not self.connected.is_set():
            self.connected.set()
            log.info("permits are shared", routers=self._num_routers, cap=self._cap)

    def _lost_touch(self, asks: list[_Ask], error: BaseException | None = None) -> None:
        """Everybody who waits decides by this router's share."""
        waiting, self._asks = [*asks, *self._asks], []
        if self.connected.is_set() and error is not None:
            log.warning("redis is away", what="permits", share=self.share, error=str(error))
        self.connected.clear()
        for ask in waiting:
            if ask.reply.done():
                self._holdings.released[ask.tenant].extend(ask.ids)
            else:
                ask.reply.set_result(None)

    def _require_room(self, ask: _Ask, *, share_of: int) -> None:
        """Raise Overloaded if this router alone is at a cap, of which it may use one part in `share_of`."""
        count, tenant_cap = len(ask.ids), ask.tenant_cap
        held_by_tenant = len(self._holdings.held.get(ask.tenant, ()))
        if tenant_cap is not None and held_by_tenant + count > max(1, tenant_cap // share_of):
            raise _overloaded(held_by_tenant, tenant_cap, True)
        if self.num_held + count > max(1, ask.cap // share_of):
            raise _overloaded(self.num_held, ask.cap, False)


def _reply() -> "asyncio.Future[Taken | None]":
    return asyncio.get_running_loop().create_future()


def _overloaded(num_held: int, cap: int | None, by_tenant: bool) -> Overloaded:
    whose = "your " if by_tenant else ""
    return Overloaded(
        f"{num_held} of {whose}{cap} requests are in service; try again later", retry_after_s=_RETRY_AFTER_S
    )
