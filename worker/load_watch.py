"""Watches the loading of a model: its progress, its time limit, and the memory that it took."""

import os
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import structlog
import torch

from mesh.logs import flush_outputs
from mesh.process import announce

log = structlog.get_logger(__name__)

STALLED_S = 240.0
"""A load gets on if in so much time the process has read some weights, or has computed for _CPU_S: compiling, and
hashing a file, have no other progress.
"""
_CPU_S = 1.0
_LOOK_EVERY_S = 5.0


class LoadProgress:
    """Reports the loaded fraction of the weights to the parent process, and keeps it for the log."""

    fraction = 0.0

    def __call__(self, fraction: float) -> None:
        self.fraction = fraction
        announce("loading", fraction=fraction)


@contextmanager
def limited(limit_s: float | None, progress: LoadProgress, *, waiting_s: float = 0.0) -> Iterator[None]:
    """End the process after `limit_s`; without a limit, if loading has not got on for STALLED_S. `waiting_s`: besides,
    for others.
    """
    ended = threading.Event()

    def watch() -> None:
        if limit_s is None:
            about = {"no_progress_for_s": STALLED_S + waiting_s}
            is_late = _stalls(progress, ended, STALLED_S + waiting_s)
        else:
            about = {"limit_s": limit_s + waiting_s}
            is_late = not ended.wait(min(limit_s + waiting_s, threading.TIMEOUT_MAX))
        if is_late:
            log.error("model not loaded in time", **about, weights_loaded=f"{progress.fraction:.0%}")
            # An orderly exit is impossible: the loading thread is in the middle of a read, a copy or a compilation.
            flush_outputs()
            os._exit(1)

    threading.Thread(target=watch, name="load watch", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _stalls(progress: LoadProgress, ended: threading.Event, after_s: float) -> bool:
    """Wait until loading has stalled, or has ended; tell the parent process of progress that weights do not show.

    Looks are counted, not time, in which the process may have been stopped.
    """
    seen, num_idle = (progress.fraction, time.process_time()), 0
    while num_idle * _LOOK_EVERY_S < after_s:
        if ended.wait(_LOOK_EVERY_S):
            return False
        fraction, cpu_s = progress.fraction, time.process_time()
        if fraction == seen[0] and cpu_s - seen[1] < _CPU_S:
            num_idle += 1
            continue
        if fraction == seen[0]:
            announce("loading", fraction=fraction)
        seen, num_idle = (fraction, cpu_s), 0
    return True


def peak_memory(device: torch.device) -> dict[str, int]:
    """The peak memory of the process, including evictable pages of mapped files, and of the device."""
    peak = {"peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    if device.type == "cuda":
        peak["peak_device_bytes"] = torch.cuda.max_memory_allocated(device)
    return peak
