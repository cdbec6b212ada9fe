"""Cores that two workers of one machine lend each other: while one has nothing to compute, the other may use them.

`tandem up` makes a small file, the core table, and pairs each prefill worker with a decode worker. Each worker writes
the line of its first core: since when it is at work, or 0, and which process says so.

    step begins      own line: busy since now      partner's line: busy? no cores beyond one's own : the partner's
    nothing to do    own line: 0, the cores are free to use

"At work" is not the step but the work: a decode worker with running sequences is busy also between its steps, so a
prompt never slows down streams that run. There is no lock: who begins at the very moment in which the other one looks
shares its cores for that one step. A worker that died in its step holds nothing for longer than a second.
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


class ComputeCores(Protocol):
    """What the engine's thread asks for cores. Plug point: OwnCores and SharedCores. Called by one thread."""

    def begin_step(self) -> Cores:
        """A step begins. Returns the cores that it may use beside the worker's own."""
        ...

    def rest(self) -> None:
        """There is nothing to compute until further notice."""
        ...


class OwnCores:
    """A worker that shares with nobody."""

    def begin_step(self) -> Cores:
        """See ComputeCores."""
        return ()

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
        self._words[self._busy_since] = 0
        self._words[self._busy_since + 1] = os.getpid()

    def begin_step(self) -> Cores:
        """See ComputeCores. Less than a microsecond."""
        words = self._words
        now_ns = time.monotonic_ns()
        words[self._busy_since] = now_ns
        partner_since_ns = words[self._partner_since]
        if partner_since_ns == 0:
            return self._lent
        if now_ns - partner_since_ns < _BELIEVED_FOR_NS or _is_alive(words[self._partner_since + 1]):
            return ()
        return self._lent

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
