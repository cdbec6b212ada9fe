"""Core lending: two workers on one machine are partners; while one is idle, the other may use its cores.

`tandem up` creates a small file, the core table, and gives each worker a partner, if there is one. Each worker
owns the line of its first core. The line has three words: the time since the worker is busy, or 0; its process id; the
time since one of its steps runs on the partner's cores, or 0.

    step begins      own line: busy since now
                     partner's line: does a step run on our cores? wait for its end, up to a limit
                     partner's line: busy? use own cores only : use the partner's too; own line: borrowing since now
    between layers   partner's line: busy? own line: borrowing 0; continue on own cores
    step ends        own line: borrowing 0
    idle             own line: busy 0, the partner may use the cores

A worker is busy as long as it has work, not only during a step: a decode worker with running sequences is busy between
its steps, too, so a prompt never slows down running streams. There is no lock: if both workers begin at the same
moment, they share cores for that one step. A worker that died in a step keeps cores for at most a second.

The wait pays off: the threads of a step synchronise hundreds of times, so one thread on a shared core slows down all
of them. Without the wait such a step took two to four times as long.

For the same reason a worker leaves lent cores alone for some decode steps after one in which it waited for a third of
the time: other processes use its own cores or the lent ones, and alone it waits for its own ones only. Steps with
prompts are divided by rows, whose threads do not meet, so they always take what is lent.
"""

import contextlib
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path

import structlog

from mesh.domain.host import Cores

log = structlog.get_logger(__name__)

_LINE_WORDS = 8  # 64 bytes, a cache line: no false sharing between workers
# An entry older than this may be from a worker that died, so its process is checked.
_TRUSTED_FOR_NS = 1_000_000_000
_MAX_WAIT_NS = 40_000_000  # a decode step on a busy machine; the step then shares cores with the rest of a long prompt
_POLL_INTERVAL_S = 0.0002
_MAX_STRETCH = 1.5  # wall time of a decode step on lent cores over CPU time of its first thread
_FIRST_PAUSE, _MAX_PAUSE = 2, 64  # decode steps


class ComputeCores:
    """The cores that steps use: those of a worker without a partner. Called by the engine's thread only."""

    def begin_step(self, *, borrow: bool = True, has_prompt: bool = False) -> Cores:
        """Record that a step begins. Returns the cores that it may use in addition to the worker's own: none if it
        does not `borrow` any.
        """
        return ()

    def must_yield(self) -> bool:
        """True if the partner needs the lent cores that the current step uses."""
        return False

    def end_step(self) -> None:
        """Record that the step no longer uses lent cores."""

    def set_idle(self) -> None:
        """Record that there is nothing to compute, until the next `begin_step`."""


class SharedCores(ComputeCores):
    """A worker of a pair: `own` cores, and cores `lent` by its partner while that is idle, each in ascending order.

    Raises OSError if the table cannot be opened, ValueError if it has no lines for these cores.
    """

    def __init__(self, table: Path, owned: Cores, lent: Cores) -> None:
        with table.open("r+b") as file:
            self._words = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
        if max(owned[0], lent[0]) >= len(self._words) // _LINE_WORDS:
            raise ValueError(f"the table has {len(self._words) // _LINE_WORDS} lines")
        self._busy_since = owned[0] * _LINE_WORDS
        self._partner_since = lent[0] * _LINE_WORDS
        self._lent = lent
        self._waited_for_ns = 0  # start of the partner's step that was last waited for: never wait for one twice
        self._borrows_since = self._busy_since + 2
        self._partner_borrows_since = self._partner_since + 2
        self._num_alone = 0  # next decode steps that leave lent cores alone
        self._pause = _FIRST_PAUSE
        self._lent_at_ns: tuple[int, int] | None = None  # wall and CPU time at which a decode step took lent cores
        self._words[self._busy_since] = self._words[self._borrows_since] = 0
        self._words[self._busy_since + 1] = os.getpid()

    def begin_step(self, *, borrow: bool = True, has_prompt: bool = False) -> Cores:
        """Takes about a microsecond, except for the wait."""
        words = self._words
        now_ns = time.monotonic_ns()
        words[self._busy_since] = now_ns
        if words[self._partner_borrows_since] not in (0, self._waited_for_ns):
            self._wait_for_own(now_ns)
        if not borrow:
            return ()
        partner_since_ns = words[self._partner_since]
        is_free = partner_since_ns == 0 or (
            now_ns - partner_since_ns >= _TRUSTED_FOR_NS and not _is_alive(words[self._partner_since + 1])
        )
        if not is_free:
            return ()
        if self._num_alone and not has_prompt:
            self._num_alone -= 1
            return ()
        words[self._borrows_since] = now_ns
        self._lent_at_ns = None if has_prompt else (time.monotonic_ns(), time.thread_time_ns())
        return self._lent

    def must_yield(self) -> bool:
        return self._words[self._borrows_since] != 0 and self._words[self._partner_since] != 0

    def end_step(self) -> None:
        self._words[self._borrows_since] = 0
        if self._lent_at_ns is not None:
            began_ns, cpu_ns = self._lent_at_ns
            self._lent_at_ns = None
            self._judge(time.monotonic_ns() - began_ns, time.thread_time_ns() - cpu_ns)

    def _judge(self, wall_ns: int, cpu_ns: int) -> None:
        """Leave lent cores alone for a while if a decode step on them waited too long, each time for longer."""
        if wall_ns > _MAX_STRETCH * cpu_ns:
            self._num_alone, self._pause = self._pause, min(2 * self._pause, _MAX_PAUSE)
        else:
            self._pause = _FIRST_PAUSE

    def _wait_for_own(self, begun_ns: int) -> None:
        """Wait until no step of the partner runs on this worker's cores, or the limit is reached."""
        while borrows_since_ns := self._words[self._partner_borrows_since]:
            self._waited_for_ns = borrows_since_ns
            now_ns = time.monotonic_ns()
            if now_ns - begun_ns > _MAX_WAIT_NS or now_ns - borrows_since_ns > _TRUSTED_FOR_NS:
                return
            time.sleep(_POLL_INTERVAL_S)

    def set_idle(self) -> None:
        self._words[self._busy_since] = 0


def make_core_table(path: Path, num_cores: int) -> None:
    """Create a table for cores 0 to `num_cores` - 1, in which every worker is idle."""
    path.write_bytes(bytes(8 * _LINE_WORDS * num_cores))


@contextlib.contextmanager
def threads_born_on(cores: Cores) -> Iterator[None]:
    """Threads started in the block stay on `cores`; the calling thread gets its previous cores back.

    On Linux a thread inherits its CPU affinity from the thread that starts it. All threads of a worker stay on the
    worker's own cores, except those that a runner starts in this block to compute on lent cores.
    """
    previous = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, previous)


def num_numa_nodes() -> int:
    """Number of NUMA nodes of this machine: parts of its memory that are near to some cores. 1 if it is not known."""
    return len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
