"""Structured logs of every service, from structlog and from the standard library's logging.

Writing a log line never blocks or fails (see `line_writer.py`). Warnings and errors of one cause are limited to about
one a second; lower levels are not limited. Tracebacks omit local variables, which may hold prompts and keys.
Credentials in log lines are masked.
"""

import atexit
import io
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO

import structlog

from mesh.line_writer import LineWriter, flush_all, make_private, text_stream

LEVELS = ("debug", "info", "warning", "error")

_LIMITED = frozenset({"warning", "error", "critical", "exception"})
_STDERR = 2
# API keys of `tandem keys`, and bearer tokens of authorization headers.
_KEY = re.compile(r"tandem-[\w-]{40,}")
_BEARER = re.compile(r"earer [^\s'\"\\]+")
_TRACEBACKS = structlog.processors.ExceptionRenderer(
    structlog.tracebacks.ExceptionDictTransformer(show_locals=False, use_rich=False)
)

_MAX_CAUSES = 1000
_OVERDUE_S = 5.0


class Logs:
    """The log of one process: renders events and passes the lines to a LineWriter."""

    def __init__(self, service: str, *, level: str = "info", json: bool = True, fd: int = _STDERR) -> None:
        self.writer = LineWriter(fd, notice=self._notice, on_idle=self._tell_overdue)
        self.limit = LogLimit()
        self._level = getattr(logging, level.upper())
        self._shared: list[structlog.types.Processor] = [
            structlog.contextvars.merge_contextvars,
            lambda _, __, event: {"service": service, **_with_values(event)},
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
        ]
        self._renderer: list[structlog.types.Processor] = (
            [_TRACEBACKS, structlog.processors.JSONRenderer()] if json else _for_people(fd)
        )

    def install(self) -> None:
        """Route structlog, `logging` and `warnings` to this log."""
        structlog.configure(
            processors=[self._limited, *self._shared, *self._renderer],
            wrapper_class=structlog.make_filtering_bound_logger(self._level),
            logger_factory=lambda *_: _Lines(self.write),
            cache_logger_on_first_use=False,
        )
        handler = _Handler(self)
        handler.setFormatter(
            structlog.stdlib.ProcessorFormatter(
                foreign_pre_chain=[structlog.stdlib.add_logger_name, *self._shared],
                processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *self._renderer],
            )
        )
        logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
        logging.captureWarnings(True)
        # It warns of clients' malformed tracestate headers, with their text.
        logging.getLogger("opentelemetry.trace.span").setLevel(logging.ERROR)

    def write(self, line: str) -> None:
        """Write one rendered event, with credentials masked."""
        if "earer " in line:
            line = _BEARER.sub("earer ***", line)
        if "tandem-" in line:
            line = _KEY.sub("tandem-***", line)
        self.writer.put((line + "\n").encode("utf-8", "backslashreplace"))

    def _limited(self, _: object, method: str, event: structlog.types.EventDict) -> structlog.types.EventDict:
        if method not in _LIMITED:
            return event
        names = (event.get("worker"), event.get("kind"), _error_type(event.get("exc_info")))
        num_suppressed = self.limit.admit((event.get("event"), *map(str, filter(None, names))))
        if num_suppressed is None:
            raise structlog.DropEvent
        return {**event, "suppressed": num_suppressed} if num_suppressed else event

    def _render(self, event: str, **fields: Any) -> str:
        entry: Any = {"event": event, **fields}
        for process in (*self._shared, *self._renderer):
            entry = process(None, "warning", entry)
        return str(entry)

    def _notice(self, num_dropped: int, reason: str) -> bytes:
        return (self._render("log lines dropped", num_lines=num_dropped, reason=reason) + "\n").encode()

    def _tell_overdue(self) -> None:
        for cause, num_suppressed in self.limit.overdue():
            self.write(self._render("more lines of one cause", cause=_name(cause), suppressed=num_suppressed))


class _Lines:
    """The logger that structlog wraps. structlog calls a method named after the level."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self.msg = self.debug = self.info = self.warning = self.error = self.critical = write
        self.log = self.warn = self.fatal = self.failure = self.err = self.exception = write


class _Handler(logging.Handler):
    """Handles records of the standard library. Their cause is the logger and the first line of the message."""

    def __init__(self, logs: Logs) -> None:
        super().__init__()
        self._logs = logs

    def emit(self, record: logging.LogRecord) -> None:
        """Never raises: a record that cannot be formatted is replaced by a line that says so."""
        cause = (record.name, str(record.msg).partition("\n")[0], _error_type(record.exc_info))
        num_suppressed = self._logs.limit.admit(cause)
        if num_suppressed is None:
            return
        try:
            line = self.format(record)
        except Exception:
            line = f"{record.levelname} {record.name}: a log record that cannot be formatted"
        self._logs.write(line)
        if num_suppressed:
            self._logs.write(self._logs._render("more lines of one cause", cause=cause[1], suppressed=num_suppressed))


class _Running:
    """Holds the outputs of this process and their format."""

    logs: Logs | None = None
    format: tuple[str, bool] = ("info", True)
    writers: tuple[LineWriter, ...] = ()


def configure_logging(service: str, *, level: str = "info", json: bool = True) -> None:
    """Send logs and printed text through queues to stderr and stdout. Call it once per process."""
    make_private(_STDERR)
    logs = _Running.logs = Logs(service, level=level, json=json)
    _Running.format = (level, json)
    logs.install()
    stdout = LineWriter(sys.stdout.fileno())
    sys.stdout, sys.stderr = text_stream(stdout), text_stream(logs.writer)
    _Running.writers = (stdout, logs.writer)
    atexit.register(flush_outputs)


@contextmanager
def quiet_logs(level: int) -> Iterator[None]:
    """Hide log lines below a level, in a program whose output they are not part of."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(level))
    try:
        yield
    finally:
        structlog.configure(**before)


def log_format() -> tuple[str, bool]:
    """Level of this process's log and whether its lines are JSON, for processes that it starts."""
    return _Running.format


def flush_outputs() -> None:
    """Flush printed text and the log; call it before os._exit. Takes at most FLUSH_LIMIT_S."""
    flush_all(_Running.writers)


def num_lines_lost() -> tuple[int, int]:
    """Return the number of log lines that could not be written and the number that the rate limit suppressed."""
    logs = _Running.logs
    return (0, 0) if logs is None else (logs.writer.num_dropped, logs.limit.num_suppressed)


def _with_values(event: structlog.types.EventDict) -> structlog.types.EventDict:
    """Leave out fields that say nothing."""
    return {name: value for name, value in event.items() if value is not None and value != ""}


def _for_people(fd: int) -> list[structlog.types.Processor]:
    """Processors for human-readable lines, coloured on a terminal. They escape control characters, as JSON does."""

    def escaped(_: object, __: str, event: structlog.types.EventDict) -> structlog.types.EventDict:
        return {name: escape_controls(value) if isinstance(value, str) else value for name, value in event.items()}

    def traceback(out: TextIO, exc_info: structlog.types.ExcInfo) -> None:
        plain = io.StringIO()
        structlog.dev.plain_traceback(plain, exc_info)
        out.write(escape_controls(plain.getvalue()))

    return [escaped, structlog.dev.ConsoleRenderer(colors=os.isatty(fd), exception_formatter=traceback)]


def escape_controls(text: str) -> str:
    """Return `text` with control characters, except newlines and tabs, escaped as in \\x1b."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in "\n\t" else char.encode("unicode_escape").decode() for char in text
    )


def _error_type(exc_info: object) -> str:
    """Return the class name of the error in `exc_info`: an exception, True for the current one, a tuple, or None."""
    error = sys.exc_info()[1] if exc_info is True else exc_info[1] if isinstance(exc_info, tuple) else exc_info
    return type(error).__name__ if isinstance(error, BaseException) else ""


def _name(cause: Hashable) -> str:
    return " ".join(filter(None, map(str, cause))) if isinstance(cause, tuple) else str(cause)


@dataclass(slots=True)
class _Bucket:
    allowance: float
    updated_s: float
    num_suppressed: int = 0


class LogLimit:
    """Rate limit for log lines of one cause: a burst of a few lines, then one a second. The next line that is logged
    reports how many were suppressed. There is a token bucket for each of the last _MAX_CAUSES causes.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, *, burst: float = 5, lines_per_s: float = 1.0
    ) -> None:
        self._clock = clock
        self._burst = burst
        self._lines_per_s = lines_per_s
        self._buckets: dict[Hashable, _Bucket] = {}
        self.num_suppressed = 0

    def admit(self, cause: Hashable) -> int | None:
        """Return None if the line must be suppressed, else the number of lines suppressed since the last one."""
        now_s = self._clock()
        bucket = self._buckets.get(cause)
        if bucket is None:
            if len(self._buckets) >= _MAX_CAUSES:
                self._buckets.pop(next(iter(self._buckets)), None)
            bucket = self._buckets[cause] = _Bucket(self._burst, now_s)
        bucket.allowance = min(self._burst, bucket.allowance + self._lines_per_s * (now_s - bucket.updated_s))
        bucket.updated_s = now_s
        if bucket.allowance < 1:
            bucket.num_suppressed += 1
            self.num_suppressed += 1
            return None
        bucket.allowance -= 1
        num_suppressed, bucket.num_suppressed = bucket.num_suppressed, 0
        return num_suppressed

    def overdue(self) -> list[tuple[Hashable, int]]:
        """Take the unreported counts of causes that have been silent for _OVERDUE_S."""
        return self._take(self._clock() - _OVERDUE_S)

    def all_suppressed(self) -> list[tuple[Hashable, int]]:
        """Take the unreported counts of all causes, before the process ends."""
        return self._take(self._clock())

    def _take(self, until_s: float) -> list[tuple[Hashable, int]]:
        unreported = [
            (cause, bucket.num_suppressed)
            for cause, bucket in list(self._buckets.items())
            if bucket.num_suppressed and bucket.updated_s <= until_s
        ]
        for cause, _ in unreported:
            self._buckets.pop(cause, None)
        return unreported
