"""A service that hangs ends, to be started again; one that is busy, or was stopped for a while, does not."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from mesh.process import ending_if_stuck

SERVICE = """
import asyncio, sys, threading
from mesh.process import ProcessSettings, until_stopped

async def serve():
    loop = asyncio.get_running_loop()
    if sys.argv[1] == "hangs":
        lock = threading.Lock(); lock.acquire(); loop.call_later(0.1, lock.acquire)
    loop.call_soon(lambda: print("serving", flush=True))
    await until_stopped(ProcessSettings(stuck_exit_s=float(sys.argv[2])))

asyncio.run(serve())
"""


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def start(started: list[subprocess.Popen[str]], how: str, after_s: float) -> subprocess.Popen[str]:
    command = (sys.executable, "-c", SERVICE, how, str(after_s))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    started.append(process)
    assert process.stdout is not None
    assert process.stdout.readline() == "serving\n"
    return process


def test_a_service_that_hangs_ends_and_says_where(started: list[subprocess.Popen[str]]) -> None:
    process = start(started, "hangs", 1.0)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "in _run" in said, "the event loop's stack"


def test_a_service_that_was_stopped_goes_on(started: list[subprocess.Popen[str]]) -> None:
    process = start(started, "serves", 1.0)
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(2.5)  # longer than it takes to be found stuck
    os.kill(process.pid, signal.SIGCONT)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


async def test_a_busy_loop_is_not_stuck() -> None:
    stuck = threading.Event()
    async with ending_if_stuck(1.0, stuck.set):
        for _ in range(20):
            threading.Event().wait(0.1)  # the loop does not run meanwhile
            await asyncio.sleep(0)
    assert not stuck.is_set()
    async with ending_if_stuck(0.2, stuck.set):
        assert stuck.wait(60)
    stuck.clear()
    async with ending_if_stuck(0, stuck.set):
        assert not stuck.wait(0.5)
