"""Prometheus metrics: one registry per process, served on a separate port if `metrics_port` is set.

Counters and histograms are those of prometheus_client and may be used from any thread. Values that belong to an event
loop are read on that loop during a scrape. The port exposes counts and worker names, never prompts. It needs no
credential, so it listens on loopback unless `metrics_host` is set.
"""

import asyncio
import math
import time
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import accumulate

import structlog
from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics, start_http_server
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from mesh.domain.errors import ConfigurationError
from mesh.domain.host import join_host
from mesh.logs import num_lines_lost
from mesh.process import MetricsSettings, tell_parent
from mesh.tasks import cancel

log = structlog.get_logger(__name__)

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
GAP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.04, 0.06, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10, 20)
TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
STOP_SECONDS = (0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10)
_READ_TIMEOUT_S = 5.0
_BEAT_PERIOD_S = 0.02
_UNREAD_PERIOD_S, _UNREAD_AFTER_S = 0.25, 600.0
"""Beats that nobody reads only tell long stops, and 50 of them a second would keep an idle machine awake."""
_LOGGED_STOP_S = 1.0


def new_registry() -> CollectorRegistry:
    """Return a registry with the process's CPU time, memory, open files and number of lost log lines."""
    disable_created_metrics()  # type: ignore[no-untyped-call]  # they would double the number of series
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(_LostLines())
    return registry


@asynccontextmanager
async def serving_metrics(registry: CollectorRegistry, settings: MetricsSettings) -> AsyncIterator[None]:
    """Serve scrapes, on separate threads, while the block runs. Raises ConfigurationError if the port is taken."""
    if settings.metrics_port is None:
        yield
        return
    host = settings.metrics_host.strip("[]")
    try:
        server, thread = start_http_server(settings.metrics_port, host, registry)
    except OSError as error:
        address = join_host(host, settings.metrics_port)
        reason = (error.strerror or str(error)).lower()
        raise ConfigurationError(f"cannot serve metrics on {address}: {reason}") from error
    tell_parent("metrics", address=join_host(host, server.server_port))
    try:
        yield
    finally:
        await asyncio.to_thread(server.shutdown)
        server.server_close()
        await asyncio.to_thread(thread.join)


class _LostLines(Collector):
    def collect(self) -> Iterator[Metric]:
        dropped, suppressed = num_lines_lost()
        yield CounterMetricFamily("process_log_lines_dropped", "Log lines that could not be written", dropped)
        yield CounterMetricFamily("process_log_lines_suppressed", "Warnings above one a second of a cause", suppressed)


class OnLoop(Collector):
    """Metrics that a function collects on the event loop that owns their values. A scrape waits for the loop."""

    def __init__(self, make: Callable[[], Iterable[Metric]]) -> None:
        self._make = make
        self._loop = asyncio.get_running_loop()

    def collect(self) -> Iterator[Metric]:
        """Collect, called on the scrape's thread. Raises TimeoutError if the event loop is stuck."""

        async def on_loop() -> list[Metric]:
            return list(self._make())

        yield from asyncio.run_coroutine_threadsafe(on_loop(), self._loop).result(_READ_TIMEOUT_S)


class FastHistogram(Collector):
    """A histogram for values that arise with every token. It takes no lock, so `add` costs a fifth of the library's
    `observe`. Only one thread may add; any thread may collect.
    """

    def __init__(self, name: str, about: str, bounds_s: Sequence[float] = GAP_SECONDS) -> None:
        self._name = name
        self._about = about
        self._bounds_s = bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_s = 0.0
        self.read_s = -math.inf
        """When somebody has collected the values last, by the monotonic clock."""

    def add(self, gap_s: float) -> None:
        self._counts[bisect_left(self._bounds_s, gap_s)] += 1
        self._sum_s += gap_s

    @property
    def counts(self) -> tuple[int, ...]:
        """Values so far, by upper bound; the last are those beyond all bounds."""
        return tuple(self._counts)

    def collect(self) -> Iterator[Metric]:
        self.read_s = time.monotonic()
        bounds = (*map(str, self._bounds_s), "+Inf")
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        family = HistogramMetricFamily(self._name, self._about)
        family.add_metric([], buckets, self._sum_s)
        yield family


@asynccontextmanager
async def watching_loop(registry: CollectorRegistry) -> AsyncIterator[None]:
    """Measure how long the running event loop is blocked while the block runs: then it moves no stream and fires no
    timer. Stops of a second and more are logged as well.

    A periodic task measures how late it wakes up (the lag), every 20 ms if somebody has read it lately. On a busy
    machine other processes add to the lag, so a second metric (the stop) caps the lag at the CPU time that this process
    used meanwhile, on any thread: a thread that holds the interpreter lock blocks the event loop too.
    """
    lag = FastHistogram("tandem_event_loop_lag_seconds", "How late a heartbeat of the event loop came", STOP_SECONDS)
    stop = FastHistogram(
        "tandem_event_loop_stop_seconds",
        "The same, capped at the CPU time that this process used meanwhile",
        STOP_SECONDS,
    )
    registry.register(lag)
    registry.register(stop)
    task = asyncio.create_task(_beat(lag, stop))
    try:
        yield
    finally:
        registry.unregister(lag)
        registry.unregister(stop)
        await cancel(task)


async def _beat(lag: FastHistogram, stop: FastHistogram) -> None:
    clock = time.monotonic
    while True:
        began_s, used_s = clock(), time.process_time()
        is_read = began_s - max(lag.read_s, stop.read_s) < _UNREAD_AFTER_S
        period_s = _BEAT_PERIOD_S if is_read else _UNREAD_PERIOD_S
        await asyncio.sleep(period_s)
        late_s = max(0.0, clock() - began_s - period_s)
        stopped_s = min(late_s, time.process_time() - used_s)
        lag.add(late_s)
        stop.add(stopped_s)
        if stopped_s >= _LOGGED_STOP_S:
            log.warning("event loop stopped", seconds=round(stopped_s, 3))
