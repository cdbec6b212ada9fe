"""KernelThreads: the threads in which the eager decoder runs compiled kernels, which release the GIL."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


class KernelThreads:
    """`count` threads, the caller's among them."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._others = ThreadPoolExecutor(count - 1, "attention") if count > 1 else None

    def run(self, call: Callable[[int], None]) -> None:
        """Run `call(thread)` in every thread, and wait for all."""
        if self._others is None:
            call(0)
            return
        others = [self._others.submit(call, thread) for thread in range(1, self.count)]
        call(0)
        for other in others:
            other.result()
