"""Signals that come at bad moments."""

import signal
import subprocess
import sys

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


def test_a_line_of_the_log_is_completed_first() -> None:
    """Otherwise its lock stays taken, and the end of the process waits for it."""
    command = [sys.executable, "-c", _INTERRUPTED_IN_A_LINE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGTERM, "the line is complete\n", "")
