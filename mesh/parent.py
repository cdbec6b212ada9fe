"""The end of a process with its parent. Imports nothing that takes time: a child calls it first."""

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


def die_with(parent: int) -> None:
    """Let Linux kill this process as soon as the thread of `parent` that has started it ends. From now on the process
    ignores signals to the process group: they are for the parent, which stops in order and then ends its children.
    """
    end_with(parent, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
