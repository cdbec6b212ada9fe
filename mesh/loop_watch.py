"""Ends a process whose event loop is stuck, so that its supervisor restarts it.

Docker, service managers and `tandem up` restart a process when it ends, not when its health check fails. So a service
must detect by itself that it hangs: a thread counts how often it wakes up without the loop having run in between. It
counts wake-ups rather than time, so a process that was paused and resumed does not look stuck. Code that never releases
the interpreter lock also blocks this thread and is not detected.
"""

import asyncio
import faulthandler
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NoReturn

_TURNS = 20
# Writing the stacks may hang too.
_REPORT_S = 2.0


def _end_process() -> NoReturn:
    report = threading.Thread(target=faulthandler.dump_traceback, daemon=True)
    report.start()
    report.join(_REPORT_S)
    os._exit(1)


@asynccontextmanager
async def ending_if_stuck(after_s: float, end_process: Callable[[], object] = _end_process) -> AsyncIterator[None]:
    """Call `end_process` if the loop does not run for `after_s` seconds while the block runs; 0 disables the watch. By
    default, write the stacks of all threads to stderr and end the process with status 1.
    """
    if not after_s:
        yield
        return
    loop = asyncio.get_running_loop()
    has_run, is_over = threading.Event(), threading.Event()

    def watch() -> None:
        num_missed = 0
        while not is_over.wait(after_s / _TURNS):
            if has_run.is_set():
                has_run.clear()
                num_missed = 0
                loop.call_soon_threadsafe(has_run.set)
            else:
                num_missed += 1
            if num_missed >= _TURNS:
                end_process()
                return

    has_run.set()
    thread = threading.Thread(target=watch, name="loop-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
