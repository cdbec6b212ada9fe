"""Exceptions of signals that something drops, or catches on purpose."""

import subprocess
import sys

import pytest

_INTERRUPTED_IN_A_COROUTINE_THAT_GOES_ON = """
import asyncio, os, signal, time
from mesh.interrupts import run_async, run_program

async def main():
    os.kill(os.getpid(), signal.SIGTERM)
    try:
        time.sleep(60)
    except BaseException:
        print("it is dropped", flush=True)
    time.sleep(60)

run_program(lambda: run_async(main()))
"""


_CTRL_C_IS_DROPPED = """
import os, signal, time
from mesh.interrupts import run_program

def main():
    try:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(10**5):
            pass
    except:
        print("it is dropped", flush=True)
    time.sleep(60)

run_program(main)
"""


@pytest.mark.parametrize(
    ("program", "status"),
    [
        pytest.param(_INTERRUPTED_IN_A_COROUTINE_THAT_GOES_ON, 143, id="SIGTERM in a blocked loop"),
        pytest.param(_CTRL_C_IS_DROPPED, 130, id="Ctrl-C"),
    ],
)
def test_an_exception_that_is_dropped_comes_again(program: str, status: int) -> None:
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (status, "it is dropped\n", "")


_CAUGHT = """
import os, signal, time
from mesh.interrupts import accept_signal, run_program

def main():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(10**5):
            pass
    except SystemExit:
        accept_signal()
    end_s = time.monotonic() + 0.2  # twenty times what a signal waits for that comes again
    while time.monotonic() < end_s:
        pass
    print("closed")
    return 7

run_program(main)
"""


def test_an_exception_that_is_accepted_does_not_come_again() -> None:
    done = subprocess.run([sys.executable, "-c", _CAUGHT], capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (7, "closed\n", "")
