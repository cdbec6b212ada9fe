"""The end of a process with its parent. Imports nothing that takes time: it is the first thing that a child does."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with(parent: int, number: signal.Signals) -> None:
    """Let Linux send a signal to this process when the thread of `parent` that has started it ends."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:  # it has ended before
        os.kill(os.getpid(), number)
