"""Signals that come while an event loop runs."""

import signal
import subprocess
import sys

import pytest

_INTERRUPTED_IN_A_LOOP = """
import asyncio, os, signal
from mesh.interrupts import run_async, run_program

async def main():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(60)
    finally:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0.05)
        print("closed")

run_program(lambda: run_async(main()))
"""


_INTERRUPTED_IN_A_BLOCKED_LOOP = """
import asyncio, os, signal, time
from mesh.interrupts import run_async, run_program

async def main():
    os.kill(os.getpid(), signal.SIGTERM)
    try:
        time.sleep(60)
    finally:
        await asyncio.sleep(0.05)
        print("closed")

run_program(lambda: run_async(main()))
"""


_INTERRUPTED_IN_A_LONG_LINE = """
import asyncio, logging, os, signal, time
from mesh.interrupts import run_async, run_program

class Slow(logging.Handler):
    def emit(self, record):
        time.sleep(1.2)

async def main():
    logging.getLogger().addHandler(Slow())
    os.kill(os.getpid(), signal.SIGTERM)
    try:
        logging.warning("a line")
        await asyncio.sleep(60)
    finally:
        await asyncio.sleep(0.05)
        print("closed")

run_program(lambda: run_async(main()))
"""


_INTERRUPTED_LONG_BEFORE_ITS_END = """
import asyncio, atexit, os, signal, time
from mesh.interrupts import run_async, run_program

async def main():
    os.kill(os.getpid(), signal.SIGTERM)
    try:
        await asyncio.sleep(60)
    finally:
        print("closed", flush=True)

def tidy():
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # as Python does after these calls
    time.sleep(1.5)  # longer than a loop may be blocked

atexit.register(tidy)
run_program(lambda: run_async(main()))
"""


_INTERRUPTED_WHILE_A_TASK_STAYS = """
import asyncio, os, signal
from threading import Timer
from mesh.interrupts import run_async, run_program

async def stay():
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass

async def main():
    staying = asyncio.create_task(stay())
    await asyncio.sleep(0.05)
    Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
    print("closed", flush=True)

run_program(lambda: run_async(main()))
"""


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(_INTERRUPTED_IN_A_LOOP, id="waiting"),
        pytest.param(_INTERRUPTED_LONG_BEFORE_ITS_END, id="long before the process ends"),
        pytest.param(_INTERRUPTED_IN_A_BLOCKED_LOOP, id="blocked"),
        pytest.param(_INTERRUPTED_IN_A_LONG_LINE, id="blocked where nothing may raise"),
        pytest.param(_INTERRUPTED_WHILE_A_TASK_STAYS, id="closing"),
    ],
)
def test_a_loop_ends_after_its_cleanup(program: str) -> None:
    """The signal counts that came first."""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, "closed\n")
    assert "Traceback" not in done.stderr
