"""Observations from outside while a cluster runs: requests in service, and logs."""

import asyncio
import contextlib
import json
import re
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

import tandem
from mesh.retry import require_not_cancelled
from tests.chaos.cluster import Cluster
from tests.chaos.history import Disturbance, History
from tests.fakes.redis_server import num_leased

_CAP_INTERVAL_S = 0.03
_LATE_STATUS = re.compile(
    r"^ERROR grpc\._cython\.cygrpc ExecuteBatchError.*?"
    r"^grpc\._cython\.cygrpc\.ExecuteBatchError: [^\n]*SendStatus[^\n]*",
    re.MULTILINE | re.DOTALL,
)
_PLAIN_COMPLAINTS = ("Traceback", "Task exception", "Task was destroyed", "Exception in callback")


@dataclass(frozen=True, slots=True)
class InService:
    """Choices in service at all routers (None: not to be said), and permits leased in Redis (None while it is away)."""

    at_s: float
    held: int | None
    leased: int | None


@dataclass
class CapWatch:
    """Looks at the cap that routers share."""

    cluster: Cluster
    samples: list[InService] = field(default_factory=list)

    async def run(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(self.cluster.client(name, direct=True)) for name in self.cluster.routers
            ]
            redis = await stack.enter_async_context(self.cluster.redis.client(timeout_s=0.5))
            while True:
                require_not_cancelled()
                with contextlib.suppress(tandem.TandemError):
                    held = await _held(clients)
                    self.samples.append(InService(time.monotonic(), held, await leased(redis)))
                await asyncio.sleep(_CAP_INTERVAL_S)

    def breaches(self, excused: Iterable[Disturbance] = ()) -> list[InService]:
        """Samples over the cap. In times of `excused` only leases count: there routers go by their shares. What they
        have admitted then may still run afterwards, so the count must have been within the cap once before it counts.
        """
        excused, cap, breaches, has_settled = list(excused), self.cluster.shape.cap, [], True
        for sample in self.samples:
            if any(disturbance.began_s <= sample.at_s <= disturbance.ended_s for disturbance in excused):
                has_settled = False
            elif sample.held is not None and sample.held <= cap:
                has_settled = True
            if (sample.leased or 0) > cap or (has_settled and (sample.held or 0) > cap):
                breaches.append(sample)
        return breaches

    @property
    def most_held(self) -> int:
        """Most choices in service at a time, by routers' counts or by leases."""
        return max((max(sample.held or 0, sample.leased or 0) for sample in self.samples), default=0)


async def _held(clients: list[tandem.AsyncClient]) -> int | None:
    """By all routers together. They are asked twice by turns; None if a count has changed meanwhile, because then the
    counts belong to different moments, and a permit on its way from one router to another may be in both."""
    first = [(await client.mesh(timeout=2)).active_requests for client in clients]
    second = [(await client.mesh(timeout=2)).active_requests for client in clients]
    return sum(first) if first == second else None


async def leased(redis: Redis) -> int | None:
    """Permits leased in Redis now; None while it is away."""
    try:
        return await num_leased(redis, "tiny")
    except (RedisError, OSError):
        return None


@asynccontextmanager
async def in_background(*watches: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run these while this is open. Raises what they raise."""
    tasks = [asyncio.create_task(watch) for watch in watches]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended


def log_entries(cluster: Cluster, name: str, event: str) -> list[dict[str, Any]]:
    """JSON log lines of one event of a node, over all its runs."""
    found = []
    for line in cluster.log(name).splitlines():
        with contextlib.suppress(ValueError):
            entry = json.loads(line)
            if isinstance(entry, dict) and entry.get("event") == event:
                found.append(entry)
    return found


def warnings_by_cause(cluster: Cluster) -> Counter[tuple[str, ...]]:
    """How many warnings and errors each node has logged about each cause."""
    found = Counter[tuple[str, ...]]()
    for name in cluster.nodes:
        for line in cluster.log(name).splitlines():
            if '"level": "warning"' in line or '"level": "error"' in line:
                entry = json.loads(line)
                found[name, entry["event"], str(entry.get("what", "")), str(entry.get("worker", ""))] += 1
    return found


def complaints(cluster: Cluster) -> list[str]:
    """Log lines that no fault justifies: errors and tracebacks."""
    return [
        f"{name}: {line[:600]}"
        for name in cluster.nodes
        for line in _LATE_STATUS.sub("", cluster.log(name)).splitlines()
        if '"level": "error"' in line or line.startswith(_PLAIN_COMPLAINTS)
    ]


def late_statuses(cluster: Cluster) -> int:
    """Tracebacks that grpc prints where a call ends by its deadline just when its handler wants to end it."""
    return sum(len(_LATE_STATUS.findall(cluster.log(name))) for name in cluster.nodes)


def replayed(cluster: Cluster) -> dict[str, list[str]]:
    """Causes of the replays of each request, by its id."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for router in cluster.routers:
        for entry in log_entries(cluster, router, "replay"):
            found[entry["request_id"].partition("-")[0]].append(entry["cause"])
    return found


def resume_gaps(histories: Iterable[History], replays: dict[str, list[str]]) -> list[float]:
    """Largest gap of each stream that was replayed after some tokens, seconds."""
    return [
        history.largest_gap_s
        for history in histories
        if history.request_id in replays and len(history.token_times_s) > 1
    ]
