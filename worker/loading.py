"""Loads a worker's model: downloads it if needed, limits the loading time, reports progress and memory."""

import os
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import structlog
import torch

from engine.load import RunnerSettings
from engine.model_runner import ModelRunner
from engine.ranks.launch import load_ranked_runner
from engine.weights import Progress
from mesh.process import announce
from mesh.telemetry import flush_outputs
from worker.engine_host import EngineHost, EngineLimits, Load, build_host
from worker.settings import WorkerSettings

log = structlog.get_logger(__name__)


def load_host(settings: WorkerSettings, limits: EngineLimits, load: Load) -> EngineHost:
    """Find or download the model's folder and build the engine. Raises ConfigurationError.

    Ends the process if loading takes longer than `model_loading_timeout`; the download does not count.
    """
    located = settings.located(lambda fraction: announce("downloading", fraction=fraction))
    begun_s = time.monotonic()
    progress = _Progress()
    with _limited(settings.model_loading_timeout, progress):
        host = build_host(located, limits, progress, load)
    reservation = host.runner.kv_cache.reservation
    if reservation is not None:
        log.info("KV memory", summary=reservation.summary)
        announce("kv_memory", summary=reservation.summary)
    log.info("model loaded", folder=located.model, seconds=round(time.monotonic() - begun_s, 2), **_peak_memory(host))
    return host


def load_runner(settings: RunnerSettings, on_progress: Progress | None = None) -> ModelRunner:
    """Load a model into this process and its other ranks. From then on the process ends when one of them ends."""
    return load_ranked_runner(settings, on_progress, on_lost=_end)


def _end(reason: str) -> None:
    log.critical("a rank is lost, exiting", reason=reason)
    flush_outputs()
    os._exit(1)


class _Progress:
    """Reports the loaded fraction of the weights to the parent process, and keeps it for the log."""

    fraction = 0.0

    def __call__(self, fraction: float) -> None:
        self.fraction = fraction
        announce("loading", fraction=fraction)


@contextmanager
def _limited(limit_s: float, progress: _Progress) -> Iterator[None]:
    def give_up() -> None:
        log.error("model not loaded in time", model_loading_timeout=limit_s, weights_loaded=f"{progress.fraction:.0%}")
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


def _peak_memory(host: EngineHost) -> dict[str, int]:
    """Return the peak memory of the process, including evictable pages of mapped files, and of the device."""
    peak = {"peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    device = host.runner.kv_cache.tensor.device
    if device.type == "cuda":
        peak["peak_device_bytes"] = torch.cuda.max_memory_allocated(device)
    return peak
