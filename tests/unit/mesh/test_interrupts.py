"""Signals that come at bad moments."""

import signal
import subprocess
import sys

import pytest

_INTERRUPTED_IN_A_LINE = """
import logging, os, signal, sys, time
from mesh.interrupts import run_program

class Interrupting(logging.Handler):
    def emit(self, record):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.05)
        sys.stdout.write("the line is complete\\n")

def main():
    logging.getLogger().addHandler(Interrupting())
    logging.warning("a line")
    time.sleep(60)

run_program(main)
"""


_INTERRUPTED_IN_ASYNCIO = """
import os, signal, time
from mesh.interrupts import run_program

asyncio_code = '''
def keep_books():
    os.kill(os.getpid(), signal.SIGTERM)
    for _ in range(10**5):
        pass
    print("the books are complete")
'''
names = {"__name__": "asyncio.base_subprocess", "os": os, "signal": signal}
exec(asyncio_code, names)

def main():
    names["keep_books"]()
    time.sleep(60)

run_program(main)
"""


@pytest.mark.parametrize(
    ("program", "told"),
    [(_INTERRUPTED_IN_A_LINE, "the line is complete\n"), (_INTERRUPTED_IN_ASYNCIO, "the books are complete\n")],
    ids=["a line of the log", "bookkeeping of asyncio"],
)
def test_what_runs_is_completed_first(program: str, told: str) -> None:
    """Otherwise a lock stays taken, or the end of a child is missed, and the end of the process waits for it."""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGTERM, told, "")
