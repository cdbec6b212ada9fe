"""Threads that wait for each other inside compiled code."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.kernels.cpu.arguments import Range
from engine.kernels.cpu.compilation.compiler import entry
from engine.kernels.cpu.compilation.stored import Addresses, Kernel, Kinds, load, stored
from engine.kernels.cpu.threads.barrier import wait
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


@Kernel
def meet(kinds: Kinds, addresses: Addresses, _: Range) -> None:
    """Count the meetings of each thread."""
    num_meetings, _, _, team = load(kinds, addresses)
    wait(team.counter, team.num_threads)
    num_meetings[team.thread] += 1


_INTERRUPTED_IN_A_STEP = """
import os, signal, threading
import numpy as np
from engine.kernels.cpu.threads.barrier import wait, wait_until
from engine.kernels.cpu.compilation.stored import Kernel, load, stored
from engine.models.loop_threads import LoopThreads
from engine.models.rank_group import Alone
from mesh.interrupts import run_program

begun, may_end = np.zeros(2, np.int64), np.zeros(1, np.int64)

@Kernel
def step(kinds, addresses, _):
    begun, may_end, _, team = load(kinds, addresses)
    begun[team.thread] = 1
    wait_until(may_end, 1)
    wait(team.counter, team.num_threads)

def interrupt():
    while not begun.all():
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    may_end[0] = 1

def main():
    arguments = [stored(begun), stored(may_end), stored(begun)]
    threading.Thread(target=interrupt).start()
    LoopThreads(2, Alone()).run(step, [arguments] * 2)
    print("the step is complete", flush=True)
    threading.Event().wait(60)

run_program(main)
"""


def test_a_signal_waits_for_the_end_of_a_step(tmp_path: Path) -> None:
    """The other threads would wait for the one that has raised, and the process for them."""
    program = tmp_path / "program.py"  # numba reads the file of a function
    program.write_text(_INTERRUPTED_IN_A_STEP)
    command = [sys.executable, str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stderr) == (128 + signal.SIGTERM, "")


def test_a_lent_core_that_takes_no_thread_is_left_out() -> None:
    """The worker's other threads would wait for it for ever, and the process for them at its end."""
    threads, num_meetings = LoopThreads(2, Alone()), np.zeros(3, np.int64)
    threads.use((1023,))
    threads.run(meet, [[stored(num_meetings)] * 3] * 2)
    assert num_meetings.tolist() == [1, 1, 0]


def test_helpers_come_again_after_they_have_left() -> None:
    threads, num_meetings = LoopThreads(2, Alone()), np.zeros(2, np.int64)
    arguments = [[stored(num_meetings)] * 3] * 2
    for pause_s in (0.0, 0.1, 0.0, 0.003, 0.003):  # they leave after about 3 ms
        time.sleep(pause_s)
        threads.run(meet, arguments)
    assert num_meetings.tolist() == [5, 5]


def test_only_numbers_of_known_types_are_stored() -> None:
    """Compiled code reads a word as the type that it knows, whatever was written there."""
    numbers: list[Any] = [2, True, np.float32(2)]
    assert len({stored(Range(0, number)).kind for number in numbers}) == len(numbers)
    with pytest.raises(TypeError):
        stored(Range(0, 0.5))  # type: ignore[arg-type]
