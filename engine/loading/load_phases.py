"""Seconds of each phase of loading a model.

read     tensors of the checkpoint are read, converted to the model's dtype and checked
convert  matrices are converted to their encoding (int8)
pack     matrices are copied to the layout of the compiled loops
map      the file of a partition is verified and mapped
ranks    rank 0 waits until the other ranks have started and loaded their shares
kv       memory for KV is counted and allocated
build    the decoder is built on its cache: layouts of the eager decoder, compiled loops

Phases do not overlap. The functions that load a model are spread over a dozen modules, so the clock is a
context variable rather than an argument of all of them.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

PHASES = ("read", "convert", "pack", "map", "ranks", "kv", "build")

_seconds: ContextVar[dict[str, float] | None] = ContextVar("load_seconds", default=None)


@contextmanager
def measured_load() -> Iterator[dict[str, float]]:
    """Yield the seconds of each phase, which grow while models are loaded on this thread within the block."""
    seconds = dict.fromkeys(PHASES, 0.0)
    token = _seconds.set(seconds)
    try:
        yield seconds
    finally:
        _seconds.reset(token)


def rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    """The phases that took any time, rounded for the log."""
    return {name: round(value, 3) for name, value in seconds.items() if value}


@contextmanager
def load_phase(name: str) -> Iterator[None]:
    """Count the time of the block as this phase. Without effect outside `measured_load`."""
    begun_s = time.perf_counter()
    try:
        yield
    finally:
        if (seconds := _seconds.get()) is not None:
            seconds[name] += time.perf_counter() - begun_s
