"""Hours of load over gRPC and HTTP with a fault now and then; what every process holds is written to a file meanwhile.

Kills meet the last node of each role only, so the others live as long as the run. Nodes may share their cores with
anything: where one has waited long for a core, errors of that time are put down to the machine, and counted.
"""

import asyncio
import contextlib
import itertools
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TextIO

import httpx2
import psutil
from redis.exceptions import RedisError

from mesh.tasks import require_not_cancelled
from tests.chaos.cluster import Cluster
from tests.chaos.faults import Fault, Kill, KillRouter, disturb, mix
from tests.chaos.history import Disturbance, History, is_about_ending, judge
from tests.chaos.load import Load
from tests.chaos.samples import Held, Sample, to_line
from tests.chaos.sse import SseAnswer, body_of, read_completion, sse_faults

TIMEOUT_S = 300.0
_SAMPLE_EVERY_S = 5.0
_BUSY_WAIT_S = 1.0
_BUSY = "busy machine"
_BUSY_ERRORS = frozenset({"NoWorkers", "Overloaded", "DeadlineExceeded", "SlowReader", "ConnectionFailed"})
_SHOWN = 5


@dataclass
class Soak:
    """One run: its load, its file, and what all streams have come to so far."""

    load: Load
    file: TextIO
    fault_every_s: float
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    unrecovered: list[str] = field(default_factory=list)
    _failed: list[History] = field(default_factory=list)
    _unexcused: list[str] = field(default_factory=list)
    _is_striking: bool = False
    _waited_s: dict[tuple[str, int], float] = field(default_factory=dict)

    async def run(self, for_s: float, clients_per_router: int, http_clients: int) -> None:
        """Load, faults and samples for so long; the last sample is of the end, when all streams have ended."""
        began_s = time.monotonic()
        async with (
            asyncio.TaskGroup() as tasks,
            self.load.clients(clients_per_router),
            self._http_clients(http_clients),
        ):
            sampling = tasks.create_task(self._sample_on(began_s))
            faults = tasks.create_task(self._strike_on(began_s + for_s))
            await asyncio.sleep(for_s)
            await faults
            sampling.cancel()
        await self._write_sample(began_s)

    @asynccontextmanager
    async def _http_clients(self, count: int) -> AsyncIterator[None]:
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            for number in range(count):
                tasks.create_task(self._run_http_client(number, stop))
            try:
                yield
            finally:
                stop.set()

    async def _run_http_client(self, seed: int, stop: asyncio.Event) -> None:
        rng, catalogue = random.Random(seed), self.load.catalogue
        names = sorted(name for name, ask in catalogue.asks.items() if "n" not in ask)
        async with self.load.cluster.http("gateway-0", TIMEOUT_S) as http:
            while not stop.is_set():
                await self._ask_http(http, rng.choice(names))
                await asyncio.sleep(rng.uniform(0, 2 * self.load.think_s))

    async def _ask_http(self, http: httpx2.AsyncClient, name: str) -> None:
        answer, began_s = SseAnswer(), time.monotonic()
        await read_completion(http, body_of(self.load.catalogue.asks[name]), answer)
        history = History(name, self.load.cluster.routers[0], began_s, began_s + TIMEOUT_S)
        history.token_times_s.extend(answer.times_s)
        history.ending, history.error, history.ended_s = answer.ending, answer.error, time.monotonic()
        faults = sse_faults(answer, self.load.catalogue.answers[name].choices[0])
        history.faults = [f"{name} over HTTP: {fault}" for fault in faults]
        self.load.histories.append(history)
        self.counts["requests over HTTP"] += 1

    async def _strike_on(self, until_s: float) -> None:
        """One fault of the mix after the other, with pauses; none is begun near the end."""
        for fault in _gentle(self.load.cluster):
            pause_s = self.fault_every_s
            if time.monotonic() + 2 * pause_s > until_s:
                return
            await asyncio.sleep(pause_s)
            self._is_striking = True
            try:
                await disturb(self.load, fault, TIMEOUT_S)
            except (AssertionError, RedisError, OSError) as error:  # hours of samples are not thrown away for it
                self.unrecovered.append(f"{fault.name}: {type(error).__name__}: {error}")
            self._is_striking = False
            self.counts["faults struck"] += 1

    async def _sample_on(self, began_s: float) -> None:
        while True:
            require_not_cancelled()
            await self._write_sample(began_s)
            await asyncio.sleep(_SAMPLE_EVERY_S)

    async def _write_sample(self, began_s: float) -> None:
        cluster, num_keys = self.load.cluster, None
        with contextlib.suppress(RedisError, OSError):
            async with cluster.redis.client(timeout_s=0.5) as redis:
                num_keys = int(await redis.dbsize())
        pids = cluster.pids | ({"redis": cluster.redis.pid} if cluster.redis.pid else {})
        held = dict(self._held(pids))
        self._excuse_if_busy(held)
        self._count()
        sample = Sample(time.monotonic() - began_s, held, num_keys, dict(self.counts), self._notes())
        self.file.write(to_line(sample))
        self.file.flush()

    def _held(self, pids: dict[str, int]) -> Iterator[tuple[str, Held]]:
        for name, pid in pids.items():
            with contextlib.suppress(psutil.Error, OSError):
                process = psutil.Process(pid)
                memory, mib = process.memory_full_info(), 1 << 20
                yield (
                    name,
                    Held(
                        pid,
                        round(memory.rss / mib, 3),
                        round(memory.uss / mib, 3),
                        round(memory.pss / mib, 3),
                        process.num_fds(),
                        process.num_threads(),
                        round(self._waited_since(name, pid), 3),
                    ),
                )

    def _waited_since(self, name: str, pid: int) -> float:
        """Seconds that the main thread, which has the event loop, has waited for a core since the last sample."""
        total_s = int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
        before_s = self._waited_s.get((name, pid), total_s)
        self._waited_s[name, pid] = total_s
        return total_s - before_s

    def _excuse_if_busy(self, held: dict[str, Held]) -> None:
        if max((process.waited_s for process in held.values()), default=0.0) < _BUSY_WAIT_S:
            return
        now_s = time.monotonic()
        self.counts["samples of a busy machine"] += 1
        busy = Disturbance(_BUSY, now_s - 2 * _SAMPLE_EVERY_S, now_s + _SAMPLE_EVERY_S, _BUSY_ERRORS, None)
        self.load.disturbances.append(busy)

    def _count(self) -> None:
        """Take the histories there are into the counts; errors are judged when it is known which faults they met."""
        for history in self.load.histories:
            self.counts["requests"] += 1
            self.counts["tokens"] += len(history.token_times_s)
            self.counts[_kind(history)] += 1
            self.counts["streams not token-exact"] += bool(history.faults)
            self.counts["streams without exactly one ending"] += any(map(is_about_ending, history.faults))
            self.wrong += history.faults
            if history.has_failed:
                self._failed.append(history)
        self.load.histories.clear()
        if not self._is_striking:
            verdict = judge(self._failed, self.load.disturbances)
            self._unexcused = verdict.unexcused
            busy = sum(count for (name, _), count in verdict.excused.items() if name == _BUSY)
            self.counts["errors that faults excuse"] = verdict.excused.total() - busy
            self.counts["errors put down to the busy machine"] = busy
        self.counts["errors no fault excuses"] = len(self._unexcused)
        self.counts["faults that were not recovered from"] = len(self.unrecovered)
        self.counts["processes that died by themselves"] = len(self.load.cluster.exits(wanted=False))

    def _notes(self) -> list[str]:
        return [*self.wrong[:_SHOWN], *self._unexcused[:_SHOWN], *self.unrecovered[:_SHOWN]]


def _kind(history: History) -> str:
    if history.is_out_of_time:
        return "out of their own time"
    return "ended with an error" if history.has_failed else history.ending


def _gentle(cluster: Cluster) -> Iterator[Fault]:
    """The mix, over and over; only the last node of each role is killed."""
    for turn in itertools.count():
        for fault in mix(cluster, turn):
            if isinstance(fault, Kill):
                yield replace(fault, victim=cluster.of_role(fault.victim.partition("-")[0])[-1])
            elif isinstance(fault, KillRouter):
                yield replace(fault, router=cluster.routers[-1])
            else:
                yield fault
