"""Threads that run one compiled loop side by side: the caller, and helpers on its own or lent cores."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from engine.cpu.laps import PHASES
from engine.cpu.step import Team
from mesh.cores import Cores, threads_born_on


class Threads:
    """`own` threads share the worker's cores, the caller among them; each lent core adds one. Used by one thread."""

    def __init__(self, own: int) -> None:
        self._own = own
        self._helpers: dict[int, ThreadPoolExecutor] = {}
        self._lent: Cores = ()
        self._counter = np.zeros(1, np.int64)
        self.laps = np.zeros(len(PHASES) + 1, np.int64)
        """Cycles of each phase in the caller's thread so far; see engine.cpu.laps."""

    @property
    def count(self) -> int:
        """Threads of the next run."""
        return self._own + len(self._lent)

    def use(self, lent: Cores) -> None:
        """Compute on these cores, too, until further notice."""
        self._lent = lent

    def run(self, work: Callable[[Team], Any]) -> None:
        """`work(team)` in all threads, which return only when all have. It must not raise between two meetings."""
        if self.count == 1:
            work(Team(0, 1, self._counter, self.laps))
            return
        self._counter[0] = 0
        cores = [*(-helper for helper in range(1, self._own)), *self._lent]
        running = [
            self._helper(core).submit(work, Team(index, self.count, self._counter, np.zeros_like(self.laps)))
            for index, core in enumerate(cores, 1)
        ]
        work(Team(0, self.count, self._counter, self.laps))
        for future in running:
            future.result()

    def _helper(self, core: int) -> ThreadPoolExecutor:
        """The helper of a lent core, or, for a negative number, one that stays where the worker is."""
        if core not in self._helpers:
            own = os.sched_getaffinity(0) if core < 0 else (core,)
            helper = ThreadPoolExecutor(1, "compute")
            with threads_born_on(tuple(own)):
                helper.submit(int).result()
            self._helpers[core] = helper
        return self._helpers[core]
