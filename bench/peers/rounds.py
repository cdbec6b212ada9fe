"""Arms in turn, again and again: machines change their speed within minutes."""

import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from bench.peers.arms import Arm
from bench.peers.process import PeerFailed


async def in_turn(
    arms: Sequence[Arm], repeats: int, measure: Callable[[Arm, int], Awaitable[None]]
) -> AsyncIterator[None]:
    """`measure(arm, number of the round)` for each arm in turn. Yields after each round, so that a long run may be cut
    short. An arm that fails is named and left out of later rounds.
    """
    left = list(arms)
    for repeat in range(repeats):
        for arm in list(left):
            print(f"round {repeat + 1} of {repeats}: {arm.label}", file=sys.stderr, flush=True)
            try:
                await measure(arm, repeat)
            except* PeerFailed as errors:
                left.remove(arm)
                print(f"left out from here: {errors.exceptions[0]}", file=sys.stderr, flush=True)
        yield
