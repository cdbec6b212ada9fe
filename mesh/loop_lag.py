"""Measures how long this process's event loop is blocked. A blocked loop moves no stream and fires no timer.

A periodic task measures how late it wakes up (the lag). On a busy machine other processes add to the lag, so a second
metric (the stop) caps the lag at the CPU time that this process used meanwhile, on any thread: a thread that holds the
interpreter lock blocks the event loop too.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import structlog
from prometheus_client import CollectorRegistry

from mesh.metrics import Gaps

log = structlog.get_logger(__name__)

STOP_SECONDS = (0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10)
_PERIOD_S = 0.02
_LOGGED_STOP_S = 1.0


@contextlib.asynccontextmanager
async def watching_loop(registry: CollectorRegistry) -> AsyncIterator[None]:
    """Measure the running loop while the block runs. Stops of a second and more are logged as well."""
    lag = Gaps("tandem_event_loop_lag_seconds", "How late a heartbeat of the event loop came", STOP_SECONDS)
    stop = Gaps(
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
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        registry.unregister(lag)
        registry.unregister(stop)


async def _beat(lag: Gaps, stop: Gaps) -> None:
    clock = asyncio.get_running_loop().time
    while True:
        began_s, used_s = clock(), time.process_time()
        await asyncio.sleep(_PERIOD_S)
        late_s = max(0.0, clock() - began_s - _PERIOD_S)
        stopped_s = min(late_s, time.process_time() - used_s)
        lag.add(late_s)
        stop.add(stopped_s)
        if stopped_s >= _LOGGED_STOP_S:
            log.warning("event loop stopped", seconds=round(stopped_s, 3))
