"""Bounds on the memory and the parsing time of request bodies.

Every open request may hold a small body. Bytes beyond that come out of one budget shared by all requests. Large bodies
are parsed on one thread, so the event loop is blocked no longer than the parser holds the GIL in a single step.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import tandem
from gateway.schema import SMALL_BODY_BYTES

T = TypeVar("T")


class BodyBudget:
    """Counts the bytes that the bodies of all open requests hold beyond `SMALL_BODY_BYTES` each."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def share(self) -> "BodyShare":
        """Return a new request's share, which is empty."""
        return BodyShare(self)

    def resize(self, num_bytes: int) -> None:
        """Take `num_bytes`, or return them if negative. Raises Overloaded, and takes none, if too few are left."""
        if num_bytes > 0 and self._num_bytes + num_bytes > self._max_bytes:
            raise tandem.Overloaded("too many large bodies are being read; try again later", retry_after_s=1.0)
        self._num_bytes += num_bytes


class BodyShare:
    """One request's share of the budget, returned at the end of its `with` block."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._num_bytes = 0

    def grow(self, num_bytes: int) -> None:
        """Record that the body has `num_bytes` so far. Raises Overloaded."""
        num_large_bytes = max(0, num_bytes - SMALL_BODY_BYTES)
        self._budget.resize(num_large_bytes - self._num_bytes)
        self._num_bytes = num_large_bytes

    def __enter__(self) -> "BodyShare":
        return self

    def __exit__(self, *_: object) -> None:
        self._budget.resize(-self._num_bytes)
        self._num_bytes = 0


class BodyReader:
    """Runs parsers: inline for small bodies, on a single thread for large ones."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "bodies")

    async def run(self, num_bytes: int, function: Callable[[], T]) -> T:
        """Return `function()`. Its cost is that of parsing `num_bytes`."""
        if num_bytes <= SMALL_BODY_BYTES:
            return function()
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)
