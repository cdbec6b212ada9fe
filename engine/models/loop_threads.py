"""LoopThreads: the threads that run the loop of the compiled decoder together."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import structlog

from engine.cores import threads_born_on
from engine.kernels.cpu.arguments import Address, Int64s, Range
from engine.kernels.cpu.compilation.stored import Kernel, Stored, job, stored
from engine.kernels.cpu.threads.barrier import RowShare, Team
from engine.kernels.cpu.threads.mailbox import follow, lead, mailboxes, post
from engine.kernels.cpu.threads.phases import PHASES
from engine.models.rank_group import RankGroup
from mesh.domain.host import Cores

_NO_LAYERS = Range(0, 0)
_MAX_KEPT_TEAMS = 16

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Teams:
    """The teams of row shares: each thread's, and what the shares have written."""

    of_threads: list[Stored]
    written: Int64s  # see RowShare.stored


class _Helper:
    """A thread that computes with the caller, and has mailbox `number`."""

    def __init__(self, cores: Cores, boxes: Int64s, number: int) -> None:
        self.number = number
        self._box = boxes[number]
        self._thread = ThreadPoolExecutor(1, "compute")
        with threads_born_on(cores):
            self._thread.submit(follow, self._box).result()

    def post(self, job: Int64s) -> None:
        if not post(job, self._box):
            self._thread.submit(follow, self._box)


class LoopThreads:
    """`num_own` threads, the caller included, share the worker's cores; each lent core adds one. For one caller.

    Every rank of a group with several has `num_own` threads, and uses no lent cores.
    """

    def __init__(self, num_own: int, ranks: RankGroup) -> None:
        self._num_own = num_own
        self._ranks = ranks
        self._helpers: dict[int, _Helper] = {}
        self._boxes = mailboxes(num_own + (os.cpu_count() or 1))
        self._teams: dict[tuple[int, tuple[int, ...]], _Teams] = {}
        self._lent: Cores = ()
        self._unusable: set[int] = set()
        self.phase_cycles = np.zeros(len(PHASES) + 1, np.int64)
        """Cycles of each phase in the caller's thread so far; see engine.kernels.cpu.threads.phases."""

    @property
    def borrows(self) -> bool:
        return self._ranks.degrees.num_ranks == 1

    @property
    def count(self) -> int:
        return self._num_own + len(self._lent)

    def use(self, lent: Cores) -> None:
        """Set the lent cores of the next runs, without those on which no thread can be started."""
        self._lent = tuple(filter(self._can_use, lent)) if self.borrows else ()

    def address_for(self, kernel: Kernel, arguments: Sequence[Stored]) -> Address:
        """The address of the code of a kernel that another one calls with these arguments and a team."""
        alone = next(self._each_team((0,), np.zeros(1, np.int64)))
        return kernel.address_for(*arguments, stored(alone))

    def run(
        self,
        kernel: Kernel,
        arguments: Sequence[Sequence[Stored]],
        layers: Range = _NO_LAYERS,
        needed: tuple[int, ...] = (0,),
    ) -> None:
        """Run a kernel in all threads, each with its own arguments and, after them, its team. Return when all have
        returned.

        needed: for each row share, the first share that it needs; each share has a team, all of equal size.
        """
        # All helpers are there before one begins, because it would wait for the others for ever.
        helpers = [self._helper(core) for core in (*(-number for number in range(1, self._num_own)), *self._lent)]
        teams = self._teams_for(needed)
        teams.written[:] = 0
        first, *others = (
            job(kernel, (*own, team), layers) for own, team in zip(arguments, teams.of_threads, strict=True)
        )
        for helper, own_job in zip(helpers, others, strict=True):
            helper.post(own_job)
        lead(first, self._boxes, np.array([helper.number for helper in helpers], np.int64))

    def _teams_for(self, needed: tuple[int, ...]) -> _Teams:
        """Teams that have run are kept: a step runs the layers with one kind of them, and the output with another."""
        if (teams := self._teams.get((self.count, needed))) is None:
            if len(self._teams) == _MAX_KEPT_TEAMS:
                self._teams.clear()
            written = np.zeros(len(needed), np.int64)
            teams = _Teams(list(map(stored, self._each_team(needed, written))), written)
            self._teams[self.count, needed] = teams
        return teams

    def _each_team(self, needed: tuple[int, ...], written: Int64s) -> Iterator[Team]:
        """Each thread's team. The first one is the caller's."""
        counters, size, ranks = np.zeros((len(needed), 1), np.int64), self.count // len(needed), self._ranks
        for index in range(self.count):
            share, thread = divmod(index, size)
            rows, counter = RowShare(share, needed[share], written), counters[share]
            # The counter of all ranks of a stage is never reset: another rank may be waiting at it.
            num_ranks, all_counter = ranks.degrees.tensor, counter if ranks.degrees.tensor == 1 else ranks.counter
            cycles = np.zeros_like(self.phase_cycles) if index else self.phase_cycles
            number = ranks.rank % num_ranks * size + thread
            yield Team(thread, size, counter, number, num_ranks * size, all_counter, cycles, rows)

    def _can_use(self, core: int) -> bool:
        """Start the core's helper, if it is not there. A container may have lost the core or its threads."""
        if core not in self._unusable:
            try:
                self._helper(core)
            except (OSError, RuntimeError) as error:
                self._unusable.add(core)
                log.warning("a lent core is not used: no thread can be started on it", core=core, error=str(error))
        return core not in self._unusable

    def _helper(self, core: int) -> _Helper:
        """The helper of a lent core. A negative number names a helper on the worker's own cores."""
        if core not in self._helpers:
            cores = tuple(os.sched_getaffinity(0)) if core < 0 else (core,)
            self._helpers[core] = _Helper(cores, self._boxes, len(self._helpers))
        return self._helpers[core]
