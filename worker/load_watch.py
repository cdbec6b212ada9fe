"""Watches the loading of a model: its progress, its time limit, and the memory that it took."""

import os
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import psutil
import structlog
import torch

from mesh.logs import flush_outputs
from mesh.process import tell_parent

log = structlog.get_logger(__name__)

STALLED_S = 240.0
"""A load makes progress if in so much time some weights were loaded, or the process and its ranks have read a mebibyte
from disk or computed for _CPU_S: a large tensor on a slow disk, compiling, and hashing a file show no other.
"""
_CPU_S = 1.0
_READ_PAGES = 256
_COMPUTING_S = 3600.0
"""A load that does nothing but compute for so long goes in circles."""
_CHECK_EVERY_S = 5.0


class LoadProgress:
    """Reports the loaded fraction of the weights to the parent process, and keeps it for the log."""

    fraction = 0.0
    num_rank_reports = 0
    """How often ranks on other machines have reported progress."""

    def __call__(self, fraction: float) -> None:
        self.fraction = fraction
        tell_parent("loading", fraction=fraction)

    def note_rank(self) -> None:
        """A rank on another machine has reported progress. Any thread calls it."""
        self.num_rank_reports += 1

    def checked(self, *, makes_progress: bool) -> None:
        """Tell the parent process that nobody has given up the load."""
        tell_parent("loading", fraction=self.fraction)


@contextmanager
def limited(limit_s: float | None, progress: LoadProgress, *, waiting_s: float = 0.0) -> Iterator[None]:
    """End the process after `limit_s`; without a limit, if loading has made no progress for STALLED_S. `waiting_s`:
    besides, for others.
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
    """Wait until loading has stalled, or has ended.

    Checks are counted, not time, in which the process may have been stopped.
    """
    loaded, before, num_idle, num_computing = _loaded(progress), work_done(), 0, 0
    while num_idle * _CHECK_EVERY_S < after_s and num_computing * _CHECK_EVERY_S < _COMPUTING_S:
        if ended.wait(_CHECK_EVERY_S):
            return False
        now, num_idle, num_computing = work_done(), num_idle + 1, num_computing + 1
        before = Work(min(before.cpu_s, now.cpu_s), min(before.pages, now.pages))  # less if a rank has ended
        has_read = _loaded(progress) != loaded or now.pages - before.pages >= _READ_PAGES
        if has_read:
            num_computing = 0
        if has_read or now.cpu_s - before.cpu_s >= _CPU_S:
            loaded, before, num_idle = _loaded(progress), now, 0
        progress.checked(makes_progress=num_idle == 0)
    return True


def _loaded(progress: LoadProgress) -> tuple[float, int]:
    return progress.fraction, progress.num_rank_reports


class Work(NamedTuple):
    """Seconds of CPU time that a process and its ranks have used so far, and pages that they have read from disk."""

    cpu_s: float
    pages: int


def work_done() -> Work:
    """Called by the thread that watches, whose own time does not count."""
    cpu_s, pages = time.process_time() - time.thread_time(), resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    own = psutil.Process()
    for process in (own, *own.children()):
        with suppress(psutil.Error, OSError):  # it has ended
            if process is not own:
                times = process.cpu_times()
                cpu_s += times.user + times.system
            if psutil.LINUX:  # others do not say how much a process has read
                pages += process.io_counters().read_bytes // resource.getpagesize()
    return Work(cpu_s, pages)


def peak_memory(device: torch.device) -> dict[str, int]:
    """The peak memory of the process, including evictable pages of mapped files, and of the device."""
    peak = {"peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    if device.type == "cuda":
        peak["peak_device_bytes"] = torch.cuda.max_memory_allocated(device)
    return peak
