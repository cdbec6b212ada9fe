"""Turns the output of a custom handler's process into log lines of the gateway, cut to a length and limited in rate."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable

import structlog

from mesh.logs import LogLimit

log = structlog.get_logger(__name__)

_MAX_LINE_BYTES = 16 << 10
_MAX_SHOWN_CHARS = 2000
_BURST, _LINES_PER_S = 200, 20.0

OnReady = Callable[[list[str] | None], None]


class StdioLogger:
    """Logs one process's stdout and stderr until both end.

    `on_ready` is called with the functions that the process announces when it is ready, or with None if it ends first.
    """

    def __init__(self, process: asyncio.subprocess.Process, on_ready: OnReady) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        self._on_ready = on_ready
        self._limit = LogLimit(burst=_BURST, lines_per_s=_LINES_PER_S)
        self._readers = [
            asyncio.create_task(self._follow(process.stdout, self._on_stdout)),
            asyncio.create_task(self._follow(process.stderr, self._on_stderr)),
        ]

    async def end(self, limit_s: float) -> None:
        """Wait up to `limit_s` for the end of the output: a child of the handler may keep the pipes open."""
        await asyncio.wait(self._readers, timeout=limit_s)
        for reader in self._readers:
            reader.cancel()
        for _, num_lines in self._limit.all_suppressed():
            log.info("custom handler printed too much", num_lines_left_out=num_lines)

    async def _follow(self, stream: asyncio.StreamReader, on_line: Callable[[str], None]) -> None:
        try:
            async for line in _lines(stream):
                on_line(line.decode(errors="replace"))
        finally:
            if on_line == self._on_stdout:
                self._on_ready(None)

    def _on_stdout(self, line: str) -> None:
        parts = _ready_parts(line)
        if parts is None:
            self._log("stdout", line)
        else:
            self._on_ready(parts)

    def _on_stderr(self, line: str) -> None:
        """Forward lines that the process has logged itself; log any other line."""
        if not _is_log_line(line):
            self._log("stderr", line)
        elif self._limit.admit("log") is not None:
            sys.stderr.write(line + "\n")

    def _log(self, stream: str, line: str) -> None:
        num_suppressed = self._limit.admit(stream)
        if num_suppressed is not None:
            extra = {"suppressed": num_suppressed} if num_suppressed else {}
            log.info("custom handler printed", stream=stream, line=line[:_MAX_SHOWN_CHARS], **extra)


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield the lines without their newline, each cut to `_MAX_LINE_BYTES`."""
    start = b""
    while chunk := await stream.read(1 << 16):
        *lines, remaining = chunk.split(b"\n")
        for line in lines:
            yield (start + line)[:_MAX_LINE_BYTES]
            start = b""
        start = (start + remaining)[:_MAX_LINE_BYTES]
    if start:
        yield start


def _ready_parts(line: str) -> list[str] | None:
    try:
        announced = json.loads(line)
        return list(announced["parts"]) if announced["event"] == "ready" else None
    except (ValueError, KeyError, TypeError):
        return None


def _is_log_line(line: str) -> bool:
    if not line.startswith("{") or not line.isprintable():
        return False
    try:
        entry = json.loads(line)
    except ValueError:
        return False
    return "event" in entry and "level" in entry
