"""Runs a program as its process does, inside the test's own."""

import signal
from collections.abc import Callable

import pytest

from mesh.interrupts import run_program


def exit_status_of(main: Callable[[], int | None]) -> object:
    """The status that the process would end with. The handlers of signals are those of before."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with pytest.raises(SystemExit) as ended:
            run_program(main)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return ended.value.code
