"""Faults, one class each: what is done to a cluster, for how long, and which errors its clients may see for it.

`disturb(load, fault)` waits until the cluster can stand it (a spare of each kind is up), strikes, waits until all is
well again, and enters the time into `load.disturbances`. Faults name their victims themselves, by turns.
"""

import asyncio
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import ClassVar

from tests.chaos.cluster import START_S, Cluster
from tests.chaos.history import Disturbance
from tests.chaos.load import Load
from tests.chaos.proxy import Conditions

# A worker that is silent for so long counts as lost; see SILENT_S in router/workers/coordination.py.
LOST_AFTER_S = 5.0
_SETTLE_S = 1.0

NOTHING: frozenset[str] = frozenset()
NO_ROOM = frozenset({"NoWorkers", "Overloaded"})
UNREACHABLE = frozenset({"ConnectionFailed"})


class Fault(ABC):
    """`allowed` errors are excused up to `budget` times (None: any number); at `router` only, unless that is ""."""

    allowed: ClassVar[frozenset[str]] = NOTHING
    budget: ClassVar[int | None] = 0
    router: str = ""

    @property
    def name(self) -> str:
        return type(self).__name__

    @abstractmethod
    async def strike(self, cluster: Cluster) -> None:
        """Do it. Returns when it is over; the cluster may still have to recover."""


@dataclass
class Kill(Fault):
    """SIGKILL a worker. Streams go on elsewhere; of new requests, one at each router may be unlucky."""

    victim: str
    allowed = NO_ROOM
    budget = 2

    @property
    def name(self) -> str:
        return f"kill {self.victim.partition('-')[0]}"

    async def strike(self, cluster: Cluster) -> None:
        cluster.kill(self.victim)


@dataclass
class KillRouter(Fault):
    """SIGKILL a router. Its clients can only be told that it is gone."""

    router: str
    allowed = UNREACHABLE
    budget = None

    @property
    def name(self) -> str:
        return "kill router"

    async def strike(self, cluster: Cluster) -> None:
        cluster.kill(self.router)


@dataclass
class Freeze(Fault):
    """SIGSTOP, and SIGCONT later. For longer than LOST_AFTER_S a worker is taken for dead, and comes back as nobody."""

    victim: str
    for_s: float
    allowed = NO_ROOM
    budget = 2

    @property
    def name(self) -> str:
        return f"freeze {self.victim.partition('-')[0]} {self.for_s:g} s"

    async def strike(self, cluster: Cluster) -> None:
        cluster.signal(self.victim, signal.SIGSTOP)
        try:
            await asyncio.sleep(self.for_s)
        finally:
            cluster.signal(self.victim, signal.SIGCONT)


@dataclass
class CutTransfers(Fault):
    """Break the connections of one prefill worker to all decode workers."""

    victim: str
    name = "cut transfers"

    async def strike(self, cluster: Cluster) -> None:
        for decode in cluster.of_role("decode"):
            cluster.proxies[decode].cut(cluster.connections_of(self.victim))


@dataclass
class CutWorker(Fault):
    """Break all connections to a worker and refuse new ones for a while. It lives on and beats."""

    victim: str
    for_s: float
    allowed = NO_ROOM
    budget = 2
    name = "cut links to a worker"

    async def strike(self, cluster: Cluster) -> None:
        proxy = cluster.proxies[self.victim]
        proxy.conditions = Conditions(refuse=True)
        proxy.cut()
        try:
            await asyncio.sleep(self.for_s)
        finally:
            proxy.heal()


@dataclass
class CutClients(Fault):
    """Break all connections of a router's clients."""

    router: str
    allowed = UNREACHABLE
    budget = None
    name = "cut clients"

    async def strike(self, cluster: Cluster) -> None:
        cluster.proxies[self.router].cut()


@dataclass
class BadLink(Fault):
    """A link under bad conditions for a while: delayed, throttled, or stalled."""

    victim: str
    conditions: Conditions
    for_s: float

    @property
    def name(self) -> str:
        how = "stall" if self.conditions.stall else "throttle" if self.conditions.bytes_per_s else "delay"
        return f"{how} links of a {self.victim.partition('-')[0]}"

    async def strike(self, cluster: Cluster) -> None:
        cluster.proxies[self.victim].conditions = self.conditions
        try:
            await asyncio.sleep(self.for_s)
        finally:
            cluster.proxies[self.victim].heal()


@dataclass
class FlipBytes(Fault):
    """Flip a byte of KV on its way to each decode worker, `rounds` times."""

    rounds: int
    name = "flip bytes"

    async def strike(self, cluster: Cluster) -> None:
        for _ in range(self.rounds):
            for decode in cluster.of_role("decode"):
                cluster.proxies[decode].conditions.flips = 1
            await asyncio.sleep(0.2)
        for decode in cluster.of_role("decode"):
            cluster.proxies[decode].heal()


@dataclass
class StopRedis(Fault):
    """Redis is gone, and comes back empty. Routers serve with the workers they know and their share of the cap."""

    for_s: float
    allowed = frozenset({"Overloaded"})
    budget = 2

    @property
    def name(self) -> str:
        return f"stop redis {self.for_s:g} s"

    async def strike(self, cluster: Cluster) -> None:
        cluster.redis.stop()
        await asyncio.sleep(self.for_s)
        await cluster.redis.start()


@dataclass
class FreezeRedis(Fault):
    """Redis keeps its connections and answers nothing."""

    for_s: float
    allowed = frozenset({"Overloaded"})
    budget = 2
    name = "freeze redis"

    async def strike(self, cluster: Cluster) -> None:
        cluster.redis.pause()
        await asyncio.sleep(self.for_s)
        cluster.redis.resume()


class WipeRedis(Fault):
    """FLUSHALL: Redis answers, and has lost everything."""

    allowed = frozenset({"Overloaded"})
    budget = 2
    name = "wipe redis"

    async def strike(self, cluster: Cluster) -> None:
        async with cluster.redis.client() as redis:
            await redis.flushall()


class FailOverRedis(Fault):
    """Another Redis takes over at the same address, and has lost all writes."""

    allowed = frozenset({"Overloaded"})
    budget = 2
    name = "fail over redis"

    async def strike(self, cluster: Cluster) -> None:
        cluster.redis.stop()
        await cluster.redis.start()


async def disturb(load: Load, fault: Fault, within_s: float = START_S) -> Disturbance:
    """Strike once the cluster is whole; returns when it is whole again. AssertionError if that takes too long."""
    cluster = load.cluster
    await cluster.wait_whole(within_s)
    async with entered(load, fault):
        await fault.strike(cluster)
        await asyncio.sleep(_SETTLE_S)
        await cluster.wait_whole(within_s)
    return load.disturbances[-1]


@asynccontextmanager
async def entered(load: Load, fault: Fault) -> AsyncIterator[None]:
    """The time within is the fault's."""
    began_s = time.monotonic()
    try:
        yield
    finally:
        load.disturbances.append(
            Disturbance(fault.name, began_s, time.monotonic(), fault.allowed, fault.budget, fault.router)
        )


def mix(cluster: Cluster, turn: int) -> list[Fault]:
    """Each fault once, one after the other; `turn` chooses the victims."""

    def victim(role: str) -> str:
        names = cluster.of_role(role)
        return names[turn % len(names)]

    return [
        Kill(victim("decode")),
        Kill(victim("prefill")),
        KillRouter(victim("router")),
        Freeze(victim("decode"), 2.0),
        Freeze(victim("decode"), LOST_AFTER_S + 2.0),
        Freeze(victim("prefill"), LOST_AFTER_S + 2.0),
        Freeze(victim("router"), 2.0),
        CutTransfers(victim("prefill")),
        CutWorker(victim("decode"), 2.0),
        CutClients(victim("router")),
        BadLink(victim("decode"), Conditions(stall=True), 3.0),
        BadLink(victim("decode"), Conditions(delay_s=0.05), 2.0),
        BadLink(victim("decode"), Conditions(bytes_per_s=200_000.0), 2.0),
        FlipBytes(8),
        FreezeRedis(2.0),
        StopRedis(3.0),
        WipeRedis(),
        FailOverRedis(),
    ]


def quick_mix() -> list[list[Fault]]:
    """Each fault once, several at a time, so that a spare is left of everything. Workers are killed in drills.py."""
    return [
        [FlipBytes(8), WipeRedis()],
        [KillRouter("router-0"), BadLink("decode-1", Conditions(delay_s=0.05), 2.0)],
        [Freeze("decode-1", LOST_AFTER_S + 1.5), Freeze("prefill-1", LOST_AFTER_S + 1.5)],
        [Freeze("decode-2", 2.0), CutTransfers("prefill-0"), Freeze("router-1", 1.0)],
        [CutWorker("decode-0", 2.0), CutClients("router-1")],
        [BadLink("decode-2", Conditions(stall=True), 3.0), StopRedis(3.0)],
        [BadLink("decode-1", Conditions(bytes_per_s=200_000.0), 2.0), FreezeRedis(2.0)],
        [FailOverRedis()],
    ]
