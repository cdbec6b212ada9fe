"""What is said of ranks that others wait for."""

import asyncio
import os
import signal
import subprocess
import sys

import psutil
from structlog.testing import capture_logs

from worker.ranks.states import RankState, log_ranks, observe_ranks


def test_a_stopped_rank_is_late_and_a_waiting_one_is_not() -> None:
    sleeping, stopped = (subprocess.Popen(["sleep", "600"]) for _ in range(2))
    try:
        os.kill(stopped.pid, signal.SIGSTOP)
        os.waitpid(stopped.pid, os.WUNTRACED)
        states = asyncio.run(observe_ranks([sleeping.pid, stopped.pid], 0.1))
        assert [(each.rank, each.state, each.is_late) for each in states] == [
            (1, psutil.STATUS_SLEEPING, False),
            (2, psutil.STATUS_STOPPED, True),
        ]
        with capture_logs() as logs:
            asyncio.run(log_ranks([sleeping.pid, stopped.pid]))
        assert [(entry["event"], entry["late"]) for entry in logs] == [("ranks of the stalled engine", [2])]
    finally:
        for process in (sleeping, stopped):
            process.kill()
            process.wait()
    (state,) = asyncio.run(observe_ranks([stopped.pid], 0.01))
    assert (state.state, state.cpu, state.is_late) == ("gone", 0.0, True)


def test_a_rank_that_spins_has_a_core() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as spinning:
        try:
            (state,) = asyncio.run(observe_ranks([spinning.pid], 2.0))
        finally:
            spinning.kill()
    assert state.cpu > 0
    assert state.is_late == (state.cpu < 0.5), state


def test_a_rank_that_could_run_but_does_not_lacks_a_core() -> None:
    assert RankState(1, 7, psutil.STATUS_RUNNING, 0.2).is_late
    assert not RankState(1, 7, psutil.STATUS_RUNNING, 0.9).is_late
    assert not RankState(1, 7, psutil.STATUS_SLEEPING, 0.0).is_late
