"""Detects an engine that is stuck in a step: a wedged driver, a deadlock, a machine that swaps.

The engine's thread cannot detect this itself, so the event loop checks how long the thread has been in its current step
or command. The limit grows with the step's number of tokens, because a large prompt chunk takes long without being
stuck.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

import structlog

from engine.loop import Busy

log = structlog.get_logger(__name__)

# Steps of up to this many tokens, as decode steps of a full batch, have the plain limit; larger ones in proportion.
_PLAIN_STEP_TOKENS = 64
_MAX_LOOK_INTERVAL_S = 1.0


class Watched(Protocol):
    """An engine's thread. Plug point: EngineLoop. Both methods return at once."""

    def busy(self) -> Busy | None:
        """Return the current step or command; None between steps."""
        ...

    def stack(self) -> str:
        """Return the thread's stack, for the log."""
        ...


@dataclass(frozen=True, slots=True)
class StallLimits:
    """Limits for a step of up to 64 tokens; larger steps get more in proportion. An engine that is stuck for
    `wedged_exit_s` counts as wedged; 0 disables this limit."""

    stall_after_s: float
    wedged_exit_s: float


class StallWatch:
    """Watches one engine. Calls `on_change(True)` at the start of each stall and `on_change(False)` at its end."""

    def __init__(self, engine: Watched, limits: StallLimits, on_change: Callable[[bool], Awaitable[None]]) -> None:
        self._engine = engine
        self._limits = limits
        self._on_change = on_change
        self._is_stalled = False

    async def run(self) -> None:
        """Watch until cancelled. Returns if the engine is wedged."""
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
