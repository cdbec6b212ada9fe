"""An event loop whose clock jumps: when nothing is ready, time advances to the next timer at once.

Coroutines, timeouts and timers run unchanged, in the order in which they would run on an idle machine. The clock stands
still while they run, so computing takes no time at all. There is no I/O, and there are no threads.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from mesh.interrupts import run_async

T = TypeVar("T")


class _SkippingSelector(selectors.SelectSelector):
    """Waits by advancing the clock. Ignores its files: an event loop has only one, for wake-ups."""

    def __init__(self, skip: Callable[[float], None]) -> None:
        super().__init__()
        self._skip = skip

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("nothing can happen any more: all tasks wait, and no timer is left")
        self._skip(timeout)
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """The event loop; its `time()` is in seconds since its creation."""

    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__(_SkippingSelector(self._skip))

    def time(self) -> float:
        return self._now_s

    def _skip(self, seconds: float) -> None:
        self._now_s += max(0.0, seconds)


def run_in_virtual_time(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in virtual time, as `run_async` does in real time. Raises RuntimeError if all tasks
    wait for each other.
    """
    return run_async(main, VirtualTimeLoop)
