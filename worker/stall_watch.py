"""Detects an engine that is stuck in a step or command.

A wedged driver, a deadlock or a machine that swaps may stop the engine's thread in the middle of a step. The event loop
therefore checks how long the thread has been in its current step or command. The limit grows with the step's number of
tokens, because a large prompt chunk takes long without being stuck.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

import structlog

if TYPE_CHECKING:
    from engine.loop import Busy, EngineLoop

log = structlog.get_logger(__name__)

# Steps of up to this many tokens, as decode steps of a full batch, have the plain limit; larger ones in proportion.
_PLAIN_STEP_TOKENS = 64
_MAX_LOOK_INTERVAL_S = 1.0


async def watch_stalls(
    engine: "EngineLoop", *, stall_after_s: float, wedged_exit_s: float, on_change: Callable[[bool], Awaitable[None]]
) -> None:
    """Call `on_change(True)` at the start of each stall of the engine and `on_change(False)` at its end, until
    cancelled. Returns if the engine is wedged, which it is once it has been stuck for `wedged_exit_s`; 0: never.

    The limits are for a step of up to 64 tokens; larger steps get more in proportion.
    """
    is_stalled = False
    async with aclosing(_looks(engine, min(_MAX_LOOK_INTERVAL_S, stall_after_s / 10))) as looks:
        async for busy in looks:
            if _is_over(busy, stall_after_s) != is_stalled:
                is_stalled = not is_stalled
                if is_stalled and busy is not None:
                    for_s, num_tokens = round(busy.for_s, 1), busy.num_tokens
                    log.error("engine stalled", for_s=for_s, num_tokens=num_tokens, stack=engine.stack())
                else:
                    log.warning("engine goes on")
                await on_change(is_stalled)
            if _is_over(busy, wedged_exit_s or float("inf")):
                return


async def _looks(engine: "EngineLoop", interval_s: float) -> "AsyncGenerator[Busy | None, None]":
    """Look at the engine every `interval_s`. Time by which a look is late counts for no step: in a process that was
    stopped and goes on, or on a machine that swaps, the engine's thread stood still, too.
    """
    clock = asyncio.get_running_loop().time
    looked_s, stood_still_s = clock(), 0.0
    while True:
        busy, since_look_s = engine.busy(), clock() - looked_s
        if busy is None or busy.for_s < since_look_s:  # not the step of the last look
            stood_still_s = 0.0
        if since_look_s - interval_s > _MAX_LOOK_INTERVAL_S:
            stood_still_s += since_look_s - interval_s
        yield busy and replace(busy, for_s=max(0.0, busy.for_s - stood_still_s))
        looked_s = clock()
        await asyncio.sleep(interval_s)


def _is_over(busy: "Busy | None", limit_s: float) -> bool:
    return busy is not None and busy.for_s >= limit_s * max(1.0, busy.num_tokens / _PLAIN_STEP_TOKENS)
