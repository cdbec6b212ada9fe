"""The load of other processes on the cores that a measurement uses."""

import os
import time

import psutil


class OtherLoad:
    """Counts from its construction on what other processes than this one and its descendants use of its cores. Time
    that a host gives to other virtual machines counts, too.
    """

    def __init__(self) -> None:
        self._cores = sorted(os.sched_getaffinity(0))
        self._begun_s, self._busy_s, self._own_s = time.monotonic(), self._all_busy_s(), _own_s()

    def share(self) -> float:
        """The others' part of the time of all cores so far, from 0 to 1."""
        others_s = (self._all_busy_s() - self._busy_s) - (_own_s() - self._own_s)
        whole_s = (time.monotonic() - self._begun_s) * len(self._cores)
        return min(1.0, max(0.0, others_s / whole_s))

    def _all_busy_s(self) -> float:
        by_core = psutil.cpu_times(percpu=True)
        times = [by_core[core] for core in self._cores if core < len(by_core)]
        return sum(each.user + each.nice + each.system + each.irq + each.softirq + each.steal for each in times)


def _own_s() -> float:
    own, total_s = psutil.Process(), 0.0
    for process in (own, *own.children(recursive=True)):
        try:
            used = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total_s += used.user + used.system
    return total_s
