"""The end of a rank with the worker that has started it."""

import signal

from mesh.parent import end_with


def die_with(parent: int) -> None:
    """Let Linux kill this process as soon as the thread of the parent that started it ends. Signals to the process
    group are for the worker, which drains first, so from now on this process ignores them.
    """
    end_with(parent, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
