"""Sibling choices of one prompt start together: the prompt is computed and sent once, and the choices share its KV.

    first choice    waits for its siblings ─▶ is placed, with capacity for all ─▶ starts them as forks ─▶ computed
    other choices   wait for a fork ─────────────▶ an attempt on the same decode worker ──▶ fork from the prompt there

Only the first attempts of choices are started together. A choice that replays later is placed alone. So is a choice
that asks for a fork after the first choice has its first token: the prompt is in prefix caches by then.
"""

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mesh.domain.request import Request
from router.observe.timeline import Timeline

if TYPE_CHECKING:
    from router.generation.attempt import Attempt
    from router.generation.choice import Choice


@dataclass(eq=False, slots=True)
class WaitingFork:
    """A choice that waits to be forked. `attempt` resolves to its attempt, or to None if it must be placed alone."""

    choice: "Choice"
    request: Request
    timeline: Timeline
    attempt: "asyncio.Future[Attempt | None]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Siblings:
    """The `num_choices` choices of one request. Used by one event loop."""

    def __init__(self, num_choices: int) -> None:
        self._num_missing = num_choices - 1
        self._all_waiting = asyncio.Event()
        self._forks: list[WaitingFork] = []
        self._has_started = False

    @property
    def num_seqs(self) -> int:
        """Sequences that the first choice must be placed with: itself and the waiting forks."""
        return 1 + len(self._forks)

    async def wait_for_fork(self, fork: WaitingFork) -> "Attempt | None":
        """Return the forked attempt, which the caller owns, or None if the choice must be placed alone."""
        if self._has_started or fork.request.num_generated:
            return None
        self._forks.append(fork)
        self._num_missing -= 1
        if self._num_missing <= 0:
            self._all_waiting.set()
        try:
            return await fork.attempt
        except asyncio.CancelledError:
            if fork.attempt.done() and not fork.attempt.cancelled():
                attempt = fork.attempt.result()
                if attempt is not None:
                    attempt.close()
            raise

    async def wait_for_all(self) -> None:
        """Return once every sibling has asked for a fork for the first time."""
        await self._all_waiting.wait()

    def take_forks(self) -> list[WaitingFork]:
        """Return the waiting forks; the caller must resolve the attempt of each."""
        forks, self._forks = self._forks, []
        return [fork for fork in forks if not fork.attempt.done()]

    def first_token(self) -> None:
        """The first choice has its first token: forks that still wait are placed alone."""
        self._has_started = True
        for fork in self.take_forks():
            fork.attempt.set_result(None)
