"""Threads that wait for each other inside compiled code."""

import os
import signal
import subprocess
import sys
import threading

import numpy as np
from numpy.typing import NDArray

from engine.kernels.cpu.barrier import wait
from engine.kernels.cpu.compiler import entry
from engine.models.loop_threads import LoopThreads
from engine.models.rank_group import Alone


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


_INTERRUPTED_IN_A_STEP = """
import os, signal, threading
from engine.models.loop_threads import LoopThreads
from engine.models.rank_group import Alone
from mesh.interrupts import run_program

meeting = threading.Barrier(2)

def step(team):
    if team.thread == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(10**5):
            pass
    meeting.wait()

def main():
    LoopThreads(2, Alone()).run(step)
    print("the step is complete", flush=True)
    threading.Event().wait(60)

run_program(main)
"""


def test_a_signal_waits_for_the_end_of_a_step() -> None:
    """The other threads would wait for the one that has raised, and the process for them."""
    command = [sys.executable, "-c", _INTERRUPTED_IN_A_STEP]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stderr) == (128 + signal.SIGTERM, "")


def test_a_lent_core_that_takes_no_thread_is_left_out() -> None:
    """The worker's other threads would wait for it for ever, and the process for them at its end."""
    threads, ran = LoopThreads(2, Alone()), []
    threads.use((1023,))
    threads.run(lambda team: ran.append((team.thread, team.num_threads)))
    assert sorted(ran) == [(0, 2), (1, 2)]
