"""Threads that wait for each other inside compiled code."""

import os
import threading

import numpy as np
from numpy.typing import NDArray

from engine.kernels.cpu.barrier import wait
from engine.kernels.cpu.compiler import entry


@entry
def rounds(counter: NDArray[np.int64], num_threads: int, seen: NDArray[np.int64], count: int) -> None:
    for i in range(count):
        seen[i] = counter[0]
        wait(counter, num_threads)


def test_threads_that_share_a_core_let_each_other_go_on() -> None:
    """Spinning through its share of the core instead, each of so many meetings would take milliseconds."""
    count, cores = 20_000, os.sched_getaffinity(0)
    counter, seen = np.zeros(1, np.int64), np.zeros((2, count), np.int64)
    rounds(counter, 1, seen[0], 1)  # compiled before threads need it

    def run(thread: int) -> None:
        os.sched_setaffinity(0, {min(cores)})
        rounds(counter, 2, seen[thread], count)

    threads = [threading.Thread(target=run, args=(thread,)) for thread in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counter[0] == 2 * count
    assert (seen // 2 == np.arange(count)).all(), "nobody is a meeting ahead"
