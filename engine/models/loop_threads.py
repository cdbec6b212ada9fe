"""LoopThreads: the threads that run the loop of the compiled decoder together."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import structlog

from engine.cores import threads_born_on
from engine.kernels.cpu.barrier import RowShare, Team
from engine.kernels.cpu.phases import PHASES
from engine.models.rank_group import RankGroup
from mesh.domain.host import Cores

log = structlog.get_logger(__name__)


class LoopThreads:
    """`num_own` threads, the caller included, share the worker's cores; each lent core adds one. For one caller.

    Every rank of a group with several has `num_own` threads, and uses no lent cores.
    """

    def __init__(self, num_own: int, ranks: RankGroup) -> None:
        self._num_own = num_own
        self._ranks = ranks
        self._helpers: dict[int, ThreadPoolExecutor] = {}
        self._lent: Cores = ()
        self._unusable: set[int] = set()
        self.phase_cycles = np.zeros(len(PHASES) + 1, np.int64)
        """Cycles of each phase in the caller's thread so far; see engine.kernels.cpu.phases."""

    @property
    def borrows(self) -> bool:
        return self._ranks.degrees.num_ranks == 1

    @property
    def count(self) -> int:
        return self._num_own + len(self._lent)

    def use(self, lent: Cores) -> None:
        """Set the lent cores of the next runs, but for those on which no thread can be started."""
        self._lent = tuple(filter(self._can_use, lent)) if self.borrows else ()

    def run(self, call: Callable[[Team], object], needed: Sequence[int] = (0,)) -> None:
        """Run `call(team)` in all threads and return when all have returned. `call` must not raise: the other threads
        would wait for it at the barrier for ever.

        needed: for each row share the first share that it needs; so many teams of equal size run.
        """
        first, *others = self._teams(needed)
        # All helpers are there before one begins, because it would wait for the others for ever.
        helpers = [self._helper(core) for core in (*(-number for number in range(1, self._num_own)), *self._lent)]
        running = [helper.submit(call, team) for helper, team in zip(helpers, others, strict=True)]
        call(first)
        for future in running:
            future.result()

    def _teams(self, needed: Sequence[int]) -> Iterator[Team]:
        """Each thread's team. The first one is the caller's."""
        counters, stored = np.zeros((len(needed), 1), np.int64), np.zeros(len(needed), np.int64)
        size, ranks = self.count // len(needed), self._ranks
        for index in range(self.count):
            share, thread = divmod(index, size)
            rows, counter = RowShare(share, needed[share], stored), counters[share]
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

    def _helper(self, core: int) -> ThreadPoolExecutor:
        """The helper of a lent core. A negative number names a helper on the worker's own cores."""
        if core not in self._helpers:
            cores = os.sched_getaffinity(0) if core < 0 else (core,)
            helper = ThreadPoolExecutor(1, "compute")
            with threads_born_on(tuple(cores)):
                helper.submit(int).result()
            self._helpers[core] = helper
        return self._helpers[core]
