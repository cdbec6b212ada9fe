"""The lock of a file that processes of several machines may share. Its holder gives signs of life.

The system frees the lock of a process that has died, but not that of one that is stopped, or whose machine swaps. So
the holder touches the file every SIGN_S, and others wait only while it does.
"""

import fcntl
import os
import platform
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

import structlog

log = structlog.get_logger(__name__)

SIGN_S = 1.0
PATIENCE_S = 20.0
"""Others stop to wait when there has been no sign for so long."""
_MAX_SIGNS = 900  # a compilation that hangs while its process runs
_TOLD_AFTER_S = 2.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05


@contextmanager
def locked(path: str, subject: str) -> Iterator[None]:
    """Hold the lock of the file at `path` in the block. `subject` is what the log says it is for. Raises OSError if the
    file cannot be written, and TimeoutError, which is one, if the holder of the lock gives no sign.
    """
    with open(path, "a+") as file:
        _wait(file, subject)
        is_over = threading.Event()
        signs = threading.Thread(target=_give_signs, args=(file.fileno(), is_over), name="code-lock", daemon=True)
        try:
            with suppress(OSError):  # a full disk
                os.ftruncate(file.fileno(), 0)
                os.write(file.fileno(), f"process {os.getpid()} on {platform.node()}".encode())
            with suppress(RuntimeError):  # the system has no thread for it
                signs.start()
            yield
        finally:
            is_over.set()
            if signs.ident is not None:
                signs.join()
            fcntl.flock(file, fcntl.LOCK_UN)  # a forked process has the file, too


def _give_signs(fd: int, is_over: threading.Event) -> None:
    for _ in range(_MAX_SIGNS):
        if is_over.wait(SIGN_S):
            return
        with suppress(OSError):
            os.utime(fd)


def _wait(file: TextIO, subject: str) -> None:
    begun_s = seen_s = time.monotonic()
    sign, pause_s, is_told = None, _FIRST_PAUSE_S, False
    while not _take(file):
        now_s, last_sign = time.monotonic(), os.fstat(file.fileno()).st_mtime_ns
        if last_sign != sign:
            sign, seen_s = last_sign, now_s
        if now_s - seen_s >= PATIENCE_S:
            log.warning("a lock is passed over", subject=subject, holder=_holder(file), silent_s=round(now_s - seen_s))
            raise TimeoutError(f"{_holder(file)} holds the lock {file.name} and gives no sign of life")
        if now_s - begun_s >= _TOLD_AFTER_S and not is_told:
            is_told = True
            log.info("waiting for another process", subject=subject, holder=_holder(file), lock=file.name)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _take(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(file: TextIO) -> str:
    file.seek(0)
    return file.read(200) or "an unknown process"
