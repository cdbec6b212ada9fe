"""Prometheus metrics: one registry per process, served on a separate port if `metrics_port` is set.

Counters and histograms are those of prometheus_client and may be used from any thread. Values that belong to an event
loop are read on that loop during a scrape. The port exposes counts and worker names, never prompts. It needs no
credential, so it listens on loopback unless `metrics_host` is set.
"""

import asyncio
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics, start_http_server
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from mesh.domain.errors import ConfigurationError
from mesh.process import ProcessSettings, announce
from mesh.settings import setting
from mesh.telemetry import num_lines_lost

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
GAP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.04, 0.06, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10, 20)
TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
_READ_TIMEOUT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class MetricsSettings(ProcessSettings):
    """Address of a service's metrics."""

    metrics_port: int | None = setting(None, "port for Prometheus metrics; 0 takes a free port; default: none")
    metrics_host: str = setting("127.0.0.1", "address of the metrics port, which needs no credential")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= (self.metrics_port or 0) <= 65535:
            raise ConfigurationError(f"metrics_port must be in [0, 65535], got {self.metrics_port}")


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
    try:
        server, thread = start_http_server(settings.metrics_port, settings.metrics_host, registry)
    except OSError as error:
        address = f"{settings.metrics_host}:{settings.metrics_port}"
        reason = (error.strerror or str(error)).lower()
        raise ConfigurationError(f"cannot serve metrics on {address}: {reason}") from error
    announce("metrics", address=f"{settings.metrics_host}:{server.server_port}")
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


class Gaps(Collector):
    """A histogram for values that arise with every token. It takes no lock, so `add` costs a fifth of the library's
    `observe`. Only one thread may add; any thread may collect.
    """

    def __init__(self, name: str, about: str, bounds_s: Sequence[float] = GAP_SECONDS) -> None:
        self._name = name
        self._about = about
        self._bounds_s = bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_s = 0.0

    def add(self, gap_s: float) -> None:
        self._counts[bisect_left(self._bounds_s, gap_s)] += 1
        self._sum_s += gap_s

    def collect(self) -> Iterator[Metric]:
        bounds = (*map(str, self._bounds_s), "+Inf")
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        family = HistogramMetricFamily(self._name, self._about)
        family.add_metric([], buckets, self._sum_s)
        yield family
