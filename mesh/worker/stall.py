"""Notices an engine that does not come back from a step: a wedged driver, a deadlock, a machine that swaps.

The engine's thread cannot say so itself, so the event loop looks how long the thread has been at one thing. A long step
is not a stall: a chunk of a prompt takes as many times longer as it has more tokens.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

import structlog

log = structlog.get_logger(__name__)

# A step of this many tokens, decodes of a full batch, gets the plain limit; one with more gets more, in proportion.
_PLAIN_STEP_TOKENS = 64
_MAX_LOOK_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class Busy:
    """What an engine's thread is at: for how long, and how many tokens it computes."""

    for_s: float
    num_tokens: int


class Watched(Protocol):
    """An engine's thread. Plug point: EngineLoop. Both calls return at once."""

    def busy(self) -> Busy | None:
        """The step or command it is at; None between them."""
        ...

    def stack(self) -> str:
        """Where it is in the code, for the log."""
        ...


@dataclass(frozen=True, slots=True)
class StallLimits:
    """Both are for a step of up to 64 tokens, and longer in proportion for larger ones. After `wedged_exit_s` there is
    no hope; 0: there always is."""

    stall_after_s: float
    wedged_exit_s: float


class StallWatch:
    """Watches one engine. `on_change` hears of each stall, and of its end."""

    def __init__(self, engine: Watched, limits: StallLimits, on_change: Callable[[bool], Awaitable[None]]) -> None:
        self._engine = engine
        self._limits = limits
        self._on_change = on_change
        self._is_stalled = False

    async def run(self) -> None:
        """Watch until cancelled. Returns if the engine is beyond hope."""
        while True:
            busy = self._engine.busy()
            if self._is_over(busy, self._limits.stall_after_s) != self._is_stalled:
                self._is_stalled = not self._is_stalled
                self._log(busy)
                await self._on_change(self._is_stalled)
            if self._is_over(busy, self._limits.wedged_exit_s or float("inf")):
                return
            await asyncio.sleep(min(_MAX_LOOK_INTERVAL_S, self._limits.stall_after_s / 10))

    def _is_over(self, busy: Busy | None, limit_s: float) -> bool:
        return busy is not None and busy.for_s >= limit_s * max(1.0, busy.num_tokens / _PLAIN_STEP_TOKENS)

    def _log(self, busy: Busy | None) -> None:
        if self._is_stalled and busy is not None:
            stack = self._engine.stack()
            log.error("engine stalled", for_s=round(busy.for_s, 1), num_tokens=busy.num_tokens, stack=stack)
        else:
            log.warning("engine goes on")
