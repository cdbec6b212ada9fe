"""Choices of one prompt begin together: it is computed and sent once, and they share its KV.

    first choice   waits for the others ─▶ is placed, with room for all ─▶ takes them along ─▶ its prompt is computed
    the others     board ────────────────────────▶ an attempt on the same decode worker ──▶ fork from it there

Only first tokens are begun together. Who has to replay later goes its own way; so does who comes to board when the
first choice has begun: the prompt is in prefix caches then.
"""

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mesh.domain.request import Request
from router.timeline import Timeline

if TYPE_CHECKING:
    from router.attempt import Attempt
    from router.choice import Choice


@dataclass(eq=False, slots=True)
class Rider:
    """A choice that waits to be taken along. `boarded` is done with its attempt, or None if it has to go by itself."""

    choice: "Choice"
    request: Request
    timeline: Timeline
    boarded: "asyncio.Future[Attempt | None]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Siblings:
    """Of one request with `num_choices` choices. Used by one event loop."""

    def __init__(self, num_choices: int) -> None:
        self._num_missing = num_choices - 1
        self._complete = asyncio.Event()
        self._riders: list[Rider] = []
        self._has_begun = False

    @property
    def num_seqs(self) -> int:
        """Sequences that the first choice asks room for."""
        return 1 + len(self._riders)

    async def board(self, rider: Rider) -> "Attempt | None":
        """Wait to be taken along. The caller owns the attempt; None: it has to go by itself."""
        if self._has_begun or rider.request.num_generated:
            return None
        self._riders.append(rider)
        self._num_missing -= 1
        if self._num_missing <= 0:
            self._complete.set()
        try:
            return await rider.boarded
        except asyncio.CancelledError:
            if rider.boarded.done() and not rider.boarded.cancelled():
                attempt = rider.boarded.result()
                if attempt is not None:
                    attempt.close()
            raise

    async def gathered(self) -> None:
        """Return once every choice has come to board a first time."""
        await self._complete.wait()

    def take(self) -> list[Rider]:
        """Those that wait; each must be given an attempt."""
        riders, self._riders = self._riders, []
        return [rider for rider in riders if not rider.boarded.done()]

    def begun(self) -> None:
        """The first choice has its first token, so there is nothing to wait for."""
        self._has_begun = True
        for rider in self.take():
            rider.boarded.set_result(None)
