"""The threads that run one compiled loop together: the caller, helpers on the worker's cores, helpers on lent cores."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from engine.cores import threads_born_on
from engine.kernels.cpu.arguments import Int64s
from engine.kernels.cpu.phase_cycles import PHASES
from engine.kernels.cpu.step import Team
from engine.ranks.group import RankGroup
from mesh.domain.cores import Cores


class LoopThreads:
    """`num_own` threads, the caller included, share the worker's cores; each lent core adds one. For one caller.

    Every rank of a group with several has `num_own` threads, and uses no lent cores.
    """

    def __init__(self, num_own: int, group: RankGroup) -> None:
        self._num_own = num_own
        self._group = group
        self._helpers: dict[int, ThreadPoolExecutor] = {}
        self._lent: Cores = ()
        self._counter = np.zeros(1, np.int64)
        self.phase_cycles = np.zeros(len(PHASES) + 1, np.int64)
        """Cycles of each phase in the caller's thread so far; see engine.kernels.cpu.phase_cycles."""

    @property
    def count(self) -> int:
        return self._num_own + len(self._lent)

    def use(self, lent: Cores) -> None:
        """Set the lent cores of the next runs."""
        self._lent = lent if self._group.size == 1 else ()

    def run(self, work: Callable[[Team], object]) -> None:
        """Call `work(team)` in all threads and return when all have returned. `work` must not raise: the other threads
        would wait for it at the barrier for ever.
        """
        self._counter[0] = 0
        if self.count == 1:
            work(self._team(0, self.phase_cycles))
            return
        cores = [*(-helper for helper in range(1, self._num_own)), *self._lent]
        running = [
            self._helper(core).submit(work, self._team(index, np.zeros_like(self.phase_cycles)))
            for index, core in enumerate(cores, 1)
        ]
        work(self._team(0, self.phase_cycles))
        for future in running:
            future.result()

    def _team(self, thread: int, phase_cycles: Int64s) -> Team:
        count, counter, group = self.count, self._counter, self._group
        if group.size == 1:
            return Team(thread, count, counter, thread, count, counter, phase_cycles)
        # The counter of all ranks is never reset: another rank may be waiting at it.
        number = group.rank * count + thread
        return Team(thread, count, counter, number, group.size * count, group.counter, phase_cycles)

    def _helper(self, core: int) -> ThreadPoolExecutor:
        """The helper of a lent core. A negative number names a helper on the worker's own cores."""
        if core not in self._helpers:
            cores = os.sched_getaffinity(0) if core < 0 else (core,)
            helper = ThreadPoolExecutor(1, "compute")
            with threads_born_on(tuple(cores)):
                helper.submit(int).result()
            self._helpers[core] = helper
        return self._helpers[core]
