"""A service's real log, rendered and written as in production, into a pipe that a test reads."""

import fcntl
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import structlog

from mesh.line_writer import LineWriter
from mesh.logs import Logs

ReadLog = Callable[[], str]
InstallLog = Callable[..., ReadLog]


@pytest.fixture
def install_log() -> Iterator[InstallLog]:
    """Makes a log the process's own until the test ends, and returns what reads it."""
    handlers, level, show = list(logging.root.handlers), logging.root.level, warnings.showwarning
    fds: list[int] = []
    writers: list[LineWriter] = []

    def make(**options: Any) -> ReadLog:
        reading, writing = os.pipe()
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 1 << 20)
        fds.extend((reading, writing))
        logs = Logs("test", fd=writing, **options)
        logs.install()
        writers.append(logs.writer)

        def read() -> str:
            assert logs.writer.flush(20)
            os.set_blocking(reading, False)
            try:
                return os.read(reading, 1 << 20).decode()
            except BlockingIOError:
                return ""

        return read

    yield make
    logging.captureWarnings(False)
    warnings.showwarning = show
    logging.basicConfig(handlers=handlers, level=level, force=True)
    structlog.reset_defaults()
    # A writer that goes on would write into whatever gets its descriptor next: a socket, an arena.
    for writer in writers:
        writer.close(20)
    for fd in fds:
        os.close(fd)
