"""LoopThreads: the threads that run the loop of the compiled decoder together."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from engine.cores import threads_born_on
from engine.kernels.cpu.arguments import Int64s
from engine.kernels.cpu.barrier import RowShare, Team
from engine.kernels.cpu.phases import PHASES
from engine.models.rank_group import RankGroup
from mesh.domain.host import Cores


class LoopThreads:
    """`num_own` threads, the caller included, share the worker's cores; each lent core adds one. For one caller.

    Every rank of a group with several has `num_own` threads, and uses no lent cores.
    """

    def __init__(self, num_own: int, ranks: RankGroup) -> None:
        self._num_own = num_own
        self._ranks = ranks
        self._helpers: dict[int, ThreadPoolExecutor] = {}
        self._lent: Cores = ()
        self._counters = np.zeros((0, 1), np.int64)
        self._stored = np.zeros(0, np.int64)
        self.use(())
        self.phase_cycles = np.zeros(len(PHASES) + 1, np.int64)
        """Cycles of each phase in the caller's thread so far; see engine.kernels.cpu.phases."""

    @property
    def borrows(self) -> bool:
        return self._ranks.degrees.num_ranks == 1

    @property
    def count(self) -> int:
        return self._num_own + len(self._lent)

    def use(self, lent: Cores) -> None:
        """Set the lent cores of the next runs."""
        self._lent = lent if self.borrows else ()
        if len(self._stored) < self.count:
            self._counters, self._stored = np.zeros((self.count, 1), np.int64), np.zeros(self.count, np.int64)

    def run(self, call: Callable[[Team], object], needed: Sequence[int] = (0,)) -> None:
        """Run `call(team)` in all threads and return when all have returned. `call` must not raise: the other threads
        would wait for it at the barrier for ever.

        needed: for each row share the first share that it needs; so many teams of equal size run.
        """
        self._counters[:] = 0
        self._stored[:] = 0
        if self.count == 1:
            call(self._team(0, self.phase_cycles, needed))
            return
        cores = [*(-helper for helper in range(1, self._num_own)), *self._lent]
        running = [
            self._helper(core).submit(call, self._team(index, np.zeros_like(self.phase_cycles), needed))
            for index, core in enumerate(cores, 1)
        ]
        call(self._team(0, self.phase_cycles, needed))
        for future in running:
            future.result()

    def _team(self, thread: int, phase_cycles: Int64s, needed: Sequence[int]) -> Team:
        size, ranks = self.count // len(needed), self._ranks
        share, thread = divmod(thread, size)
        counter, rows = self._counters[share], RowShare(share, needed[share], self._stored)
        num_ranks = ranks.degrees.tensor
        if num_ranks == 1:
            return Team(thread, size, counter, thread, size, counter, phase_cycles, rows)
        # The counter of all ranks of a stage is never reset: another rank may be waiting at it.
        number = ranks.rank % num_ranks * size + thread
        return Team(thread, size, counter, number, num_ranks * size, ranks.counter, phase_cycles, rows)

    def _helper(self, core: int) -> ThreadPoolExecutor:
        """The helper of a lent core. A negative number names a helper on the worker's own cores."""
        if core not in self._helpers:
            cores = os.sched_getaffinity(0) if core < 0 else (core,)
            helper = ThreadPoolExecutor(1, "compute")
            with threads_born_on(tuple(cores)):
                helper.submit(int).result()
            self._helpers[core] = helper
        return self._helpers[core]
