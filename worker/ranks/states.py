"""State and CPU time of a worker's ranks, as Linux tells them.

If one rank is stopped, or waits for a core, all others wait in the middle of a step. From within, no rank can tell
which one is late.
"""

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import psutil
import structlog
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

log = structlog.get_logger(__name__)

_GONE = "gone"
_CANNOT_RUN = frozenset(
    {_GONE, psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_DISK_SLEEP, psutil.STATUS_ZOMBIE}
)
_OBSERVED_S = 1.0
_LACKS_CORE = 0.5
"""A rank that could run all the time, but got less than this share of it, waits for a core."""


@dataclass(frozen=True, slots=True)
class RankState:
    """A rank's process. `cpu`: CPU seconds per second, of all its threads."""

    rank: int
    pid: int
    state: str
    cpu: float

    @property
    def is_late(self) -> bool:
        """Whether others wait for it. A rank that sleeps waits for others itself."""
        return self.state in _CANNOT_RUN or (self.state == psutil.STATUS_RUNNING and self.cpu < _LACKS_CORE)


async def observe_ranks(pids: Sequence[int], observed_s: float = _OBSERVED_S) -> list[RankState]:
    """The state of ranks 1 and up, with these process ids, over `observed_s` seconds."""
    before_s = [_cpu_s(pid) for pid in pids]
    await asyncio.sleep(observed_s)
    return [
        RankState(rank, pid, _state(pid), round(max(0.0, _cpu_s(pid) - begun_s) / observed_s, 2))
        for rank, (pid, begun_s) in enumerate(zip(pids, before_s, strict=True), 1)
    ]


async def log_ranks(pids: Sequence[int]) -> None:
    """Log the state of the ranks of an engine that is stuck in a step, and name those that are late."""
    ranks = await observe_ranks(pids)
    late = [rank.rank for rank in ranks if rank.is_late]
    log.error("ranks of the stalled engine", late=late, ranks=[asdict(rank) for rank in ranks])


class RankTimes(Collector):
    """The CPU time of each rank, as a metric. The leader is rank 0, with all its services."""

    def __init__(self, role: str, pids: Sequence[int]) -> None:
        self._role = role
        self._pids: Mapping[int, int] = dict(enumerate((os.getpid(), *pids)))

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily("tandem_engine_rank_cpu_seconds", "CPU time of a rank", labels=["role", "rank"])
        for rank, pid in self._pids.items():
            family.add_metric([self._role, str(rank)], _cpu_s(pid))
        yield family


def _state(pid: int) -> str:
    try:
        return str(psutil.Process(pid).status())
    except psutil.NoSuchProcess:
        return _GONE


def _cpu_s(pid: int) -> float:
    """CPU seconds of a process so far; 0 if it is gone."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)
