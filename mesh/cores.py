"""Cores that two workers of one machine lend each other: while one has nothing to compute, the other may use them.

`tandem up` makes a small file, the core table, and pairs each prefill worker with a decode worker. Each worker writes
the line of its first core: since when it is at work, or 0; which process says so; since when a step of it has been
computing on the partner's cores, or 0.

    step begins      own line: busy since now
                     partner's line: is a step on our cores? wait for its end, but not for long
                     partner's line: busy? no cores beyond one's own : the partner's, and own line: borrowing since now
    between layers   partner's line: busy? own line: borrowing 0, and on with one's own cores
    step ends        own line: borrowing 0
    nothing to do    own line: busy 0, the cores are free to use

"At work" is not the step but the work: a decode worker with running sequences is busy also between its steps, so a
prompt never slows down streams that run. There is no lock: who begins at the very moment in which the other one looks
shares its cores for that one step. A worker that died in its step holds nothing for longer than a second.

The wait is worth it: threads of a step meet hundreds of times, so one that shares its core slows all of them down.
Without it, such a step took twice to four times as long.
"""

import contextlib
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

Cores = tuple[int, ...]

_LINE_WORDS = 8  # 64 bytes, a cache line: neighbours write without slowing each other down
# A step that began longer ago is either a long one or its worker's last: then the process is looked for.
_BELIEVED_FOR_NS = 1_000_000_000
_MOST_WAITED_NS = 40_000_000  # a decode step on a busy machine; what is left of a long prompt's layers is shared with
_LOOK_EVERY_S = 0.0002


class ComputeCores(Protocol):
    """What the engine's thread asks for cores. Plug point: OwnCores and SharedCores. Called by one thread."""

    def begin_step(self) -> Cores:
        """A step begins. Returns the cores that it may use beside the worker's own."""
        ...

    def are_wanted_back(self) -> bool:
        """Whether the partner waits for the lent cores that the step uses."""
        ...

    def end_step(self) -> None:
        """The step uses no lent cores any more."""
        ...

    def rest(self) -> None:
        """There is nothing to compute until further notice."""
        ...


class OwnCores:
    """A worker that shares with nobody."""

    def begin_step(self) -> Cores:
        """See ComputeCores."""
        return ()

    def are_wanted_back(self) -> bool:
        """See ComputeCores."""
        return False

    def end_step(self) -> None:
        """See ComputeCores."""

    def rest(self) -> None:
        """See ComputeCores."""


class SharedCores:
    """One of a pair: a worker with cores of its `own`, and those `lent` by its partner, each in ascending order.

    Raises OSError if the table cannot be opened, ValueError if it has no lines for these cores.
    """

    def __init__(self, table: Path, own: Cores, lent: Cores) -> None:
        with table.open("r+b") as file:
            self._words = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
        if max(own[0], lent[0]) >= len(self._words) // _LINE_WORDS:
            raise ValueError(f"the table has {len(self._words) // _LINE_WORDS} lines")
        self._busy_since = own[0] * _LINE_WORDS
        self._partner_since = lent[0] * _LINE_WORDS
        self._lent = lent
        self._waited_for_ns = 0  # the partner's step that was waited for; once is enough
        self._borrows_since = self._busy_since + 2
        self._partner_borrows_since = self._partner_since + 2
        self._words[self._busy_since] = self._words[self._borrows_since] = 0
        self._words[self._busy_since + 1] = os.getpid()

    def begin_step(self) -> Cores:
        """See ComputeCores. Less than a microsecond, but for the wait."""
        words = self._words
        now_ns = time.monotonic_ns()
        words[self._busy_since] = now_ns
        if words[self._partner_borrows_since] not in (0, self._waited_for_ns):
            self._wait_for_own(now_ns)
        partner_since_ns = words[self._partner_since]
        is_free = partner_since_ns == 0 or (
            now_ns - partner_since_ns >= _BELIEVED_FOR_NS and not _is_alive(words[self._partner_since + 1])
        )
        if not is_free:
            return ()
        words[self._borrows_since] = now_ns
        return self._lent

    def are_wanted_back(self) -> bool:
        """See ComputeCores."""
        return self._words[self._borrows_since] != 0 and self._words[self._partner_since] != 0

    def end_step(self) -> None:
        """See ComputeCores."""
        self._words[self._borrows_since] = 0

    def _wait_for_own(self, begun_ns: int) -> None:
        """Until no step of the partner computes on one's own cores."""
        while borrows_since_ns := self._words[self._partner_borrows_since]:
            self._waited_for_ns = borrows_since_ns
            now_ns = time.monotonic_ns()
            if now_ns - begun_ns > _MOST_WAITED_NS or now_ns - borrows_since_ns > _BELIEVED_FOR_NS:
                return
            time.sleep(_LOOK_EVERY_S)

    def rest(self) -> None:
        """See ComputeCores."""
        self._words[self._busy_since] = 0


def make_core_table(path: Path, num_cores: int) -> None:
    """An empty table for cores 0 to `num_cores` - 1: nobody is at work."""
    path.write_bytes(bytes(8 * _LINE_WORDS * num_cores))


def parse_cores(text: str) -> Cores:
    """Core numbers of a list such as 0,2-3. Raises ValueError."""
    cores: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(cores))


@contextlib.contextmanager
def threads_born_on(cores: Cores) -> Iterator[None]:
    """Threads started in the block stay on `cores`; who starts them is back on its own cores afterwards.

    On Linux each thread has its own set of cores, and begins with that of the thread that starts it. All threads of a
    worker stay on the worker's own cores except those that a runner starts in here, to compute on lent ones.
    """
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
