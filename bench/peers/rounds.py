"""Measures arms in turn over several rounds, because the speed of a machine changes within minutes."""

import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from bench.peers.arms import Arm
from bench.peers.process import PeerFailed


async def in_turn(
    arms: Sequence[Arm], repeats: int, measure: Callable[[Arm, int], Awaitable[None]]
) -> AsyncIterator[None]:
    """Call `measure(arm, number of the round)` for each arm in turn, and yield after each round, so that a long run may
    be interrupted. A failed arm is reported and skipped in later rounds.
    """
    remaining = list(arms)
    for repeat in range(repeats):
        for arm in list(remaining):
            print(f"round {repeat + 1} of {repeats}: {arm.label}", file=sys.stderr, flush=True)
            try:
                await measure(arm, repeat)
            except* PeerFailed as errors:
                remaining.remove(arm)
                print(f"left out from here: {errors.exceptions[0]}", file=sys.stderr, flush=True)
        yield
