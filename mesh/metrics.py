"""Figures for Prometheus: a registry for each process, served on a port of its own, and only if one is asked for.

Counters and histograms are prometheus_client's and may be used from any thread. What belongs to an event loop is read
there, when somebody scrapes. The port tells counts and names of workers, never prompts; it asks for no credential, so
it stays on loopback unless `metrics_host` says otherwise.
"""

import asyncio
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics, start_http_server
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from mesh.domain.errors import ConfigurationError
from mesh.process import ProcessSettings, announce
from mesh.settings import setting

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
GAP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.04, 0.06, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10, 20)
TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
_READ_TIMEOUT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class MetricsSettings(ProcessSettings):
    """Where a service tells its figures."""

    metrics_port: int | None = setting(None, "port that tells Prometheus figures; 0 takes a free one; default: none")
    metrics_host: str = setting("127.0.0.1", "address of the port for figures; it asks for no credential")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= (self.metrics_port or 0) <= 65535:
            raise ConfigurationError(f"metrics_port must be in [0, 65535], got {self.metrics_port}")


def new_registry() -> CollectorRegistry:
    """One that tells the process's CPU time, memory and open files."""
    disable_created_metrics()  # type: ignore[no-untyped-call]  # twice the series, for nothing that is asked
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return registry


@asynccontextmanager
async def serving_metrics(registry: CollectorRegistry, settings: MetricsSettings) -> AsyncIterator[None]:
    """Answer scrapes while the block runs, on threads of their own. Raises ConfigurationError if the port is taken."""
    if settings.metrics_port is None:
        yield
        return
    try:
        server, thread = start_http_server(settings.metrics_port, settings.metrics_host, registry)
    except OSError as error:
        place = f"{settings.metrics_host}:{settings.metrics_port}"
        raise ConfigurationError(f"cannot tell figures on {place}: {(error.strerror or str(error)).lower()}") from error
    announce("metrics", address=f"{settings.metrics_host}:{server.server_port}")
    try:
        yield
    finally:
        await asyncio.to_thread(server.shutdown)
        server.server_close()
        await asyncio.to_thread(thread.join)


class OnLoop(Collector):
    """Metrics that are made on the event loop which owns what they count; a scrape waits for it."""

    def __init__(self, make: Callable[[], Iterable[Metric]]) -> None:
        self._make = make
        self._loop = asyncio.get_running_loop()

    def collect(self) -> Iterator[Metric]:
        """Called on the thread of a scrape. Raises TimeoutError if the event loop is stuck."""

        async def on_loop() -> list[Metric]:
            return list(self._make())

        yield from asyncio.run_coroutine_threadsafe(on_loop(), self._loop).result(_READ_TIMEOUT_S)


class Gaps(Collector):
    """A histogram for what happens with every token: adding to it takes a fifth of the library's time, which locks.

    One thread adds; any may collect.
    """

    def __init__(self, name: str, about: str) -> None:
        self._name = name
        self._about = about
        self._counts = [0] * (len(GAP_SECONDS) + 1)
        self._sum_s = 0.0

    def add(self, gap_s: float) -> None:
        """Count one gap."""
        self._counts[bisect_left(GAP_SECONDS, gap_s)] += 1
        self._sum_s += gap_s

    def collect(self) -> Iterator[Metric]:
        """The histogram."""
        bounds = (*map(str, GAP_SECONDS), "+Inf")
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        family = HistogramMetricFamily(self._name, self._about)
        family.add_metric([], buckets, self._sum_s)
        yield family
