"""Garbage collection of a router: young objects as always, all of them at once rarely.

CPython looks at all objects whenever those that have lived for a while have grown by a quarter. With 10,000 open
streams that takes more than a second, in which the event loop stands still, and comes again and again while streams
come and go. The reference cycles that it finds come from cancelled streams, about 100 objects each, and may wait.
"""

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from mesh.tasks import cancel

_MIN_REST_S = 10.0
_REST = 200
"""After a collection of all objects, the next one waits for this many times as long as it took."""
_NEVER = 1 << 30


@asynccontextmanager
async def collecting_rarely() -> AsyncIterator[None]:
    """Meanwhile, collections of all objects take at most half a percent of the time."""
    thresholds = gc.get_threshold()
    gc.set_threshold(*thresholds[:2], _NEVER)
    collecting = asyncio.create_task(_collect())
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        await cancel(collecting)


async def _collect() -> None:
    rest_s = _MIN_REST_S
    while True:
        await asyncio.sleep(rest_s)
        begun_s = time.thread_time()
        gc.collect()
        rest_s = max(_MIN_REST_S, _REST * (time.thread_time() - begun_s))
