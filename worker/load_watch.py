"""Watches the loading of a model: its progress, its time limit, and the memory that it took."""

import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import structlog
import torch

from mesh.logs import flush_outputs
from mesh.process import announce

log = structlog.get_logger(__name__)


class LoadProgress:
    """Reports the loaded fraction of the weights to the parent process, and keeps it for the log."""

    fraction = 0.0

    def __call__(self, fraction: float) -> None:
        self.fraction = fraction
        announce("loading", fraction=fraction)


@contextmanager
def limited(limit_s: float, progress: LoadProgress) -> Iterator[None]:
    def give_up() -> None:
        log.error("model not loaded in time", limit_s=limit_s, weights_loaded=f"{progress.fraction:.0%}")
        # An orderly exit is impossible: the loading thread is in the middle of a read, a copy or a compilation.
        flush_outputs()
        os._exit(1)

    timer = threading.Timer(min(limit_s, threading.TIMEOUT_MAX), give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def peak_memory(device: torch.device) -> dict[str, int]:
    """The peak memory of the process, including evictable pages of mapped files, and of the device."""
    peak = {"peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    if device.type == "cuda":
        peak["peak_device_bytes"] = torch.cuda.max_memory_allocated(device)
    return peak
