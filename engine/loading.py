"""Loading a worker's model: where it is, how long it may take, and what it took."""

import os
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import structlog
import torch

from engine.host import EngineHost, EngineLimits, Load, build_host
from mesh.process import announce
from mesh.worker.settings import WorkerSettings

log = structlog.get_logger(__name__)


def load_host(settings: WorkerSettings, limits: EngineLimits, load: Load) -> EngineHost:
    """Find the model's folder, downloaded if need be, and build the engine. Raises ConfigurationError.

    Ends the process if loading takes longer than `model_loading_timeout`.
    """
    located = settings.located(lambda fraction: announce("downloading", fraction=fraction))
    begun_s = time.monotonic()
    progress = _Progress()
    with _limited(settings.model_loading_timeout, progress):
        host = build_host(located, limits, progress, load)
    log.info("model loaded", folder=located.model, seconds=round(time.monotonic() - begun_s, 2), **_peak_memory(host))
    return host


class _Progress:
    """Tells the parent process how far weights are, and remembers it."""

    fraction = 0.0

    def __call__(self, fraction: float) -> None:
        self.fraction = fraction
        announce("loading", fraction=fraction)


@contextmanager
def _limited(limit_s: float, progress: _Progress) -> Iterator[None]:
    def give_up() -> None:
        log.error("model not loaded in time", model_loading_timeout=limit_s, weights_loaded=f"{progress.fraction:.0%}")
        # No orderly way out: the thread that loads is in the middle of a read, a copy or a compilation.
        os._exit(1)

    timer = threading.Timer(min(limit_s, threading.TIMEOUT_MAX), give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _peak_memory(host: EngineHost) -> dict[str, int]:
    """The process's peak, with the pages of mapped files, which the system can drop; and the device's."""
    peak = {"peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    device = host.runner.kv_cache.tensor.device
    if device.type == "cuda":
        peak["peak_device_bytes"] = torch.cuda.max_memory_allocated(device)
    return peak
