"""The log of a service: a file, its last lines, warnings for the terminal. A full disk loses lines and nothing else."""

import json
import os
import re
import stat
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mesh.logs import escape_controls

_TAIL_LINES = 8
_REPORT_INTERVAL_S = 60.0
# Neither follow a symbolic link of another user, nor block on a pipe without a reader.
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WARNING_LEVELS = ("warning", "error", "critical")
_PLAIN_LINE = re.compile(r"(\d{4}-\d\d-\d\dT[\d:.]+Z?) \[(\w+) *\] (.*)")
_HIDDEN = ("level", "event", "timestamp", "service", "exception", "stack")


class ServiceLog:
    """Writes the lines of a service to a file. `on_warning` gets warnings among them, and why the file cannot be
    written.
    """

    def __init__(self, path: Path, on_warning: Callable[[str], None]) -> None:
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        """The last lines, without timestamps."""
        self._on_warning = on_warning
        self._file = LogFile(path, on_warning)

    def write(self, line: bytes) -> None:
        """Never raises."""
        self._file.write(line)
        entry = read_log_line(line)
        if entry.text:
            self.tail.append(entry.text)
        if entry.is_warning:
            self._on_warning(entry.text)

    def close(self) -> None:
        self._file.close()


class LogFile:
    """Opens the file with the first line, and retries with every line while that fails.

    `on_change` gets a message when lines start to be dropped, and when they are written again.
    """

    def __init__(
        self, path: Path, on_change: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.num_dropped = 0
        self._path = path
        self._on_change = on_change
        self._clock = clock
        self._fd: int | None = None
        self._num_reported = 0
        self._ends_mid_line = False
        self._has_reported = False
        self._failed_s: float | None = None

    def write(self, line: bytes) -> None:
        """Append `line`, or count it as dropped. Never raises."""
        num_missing = self.num_dropped - self._num_reported
        data = (_gap(num_missing) if num_missing else b"") + line
        try:
            self._append(data)
        except OSError as error:
            self.num_dropped += 1
            self._fail(error)
            return
        self._num_reported = self.num_dropped
        if num_missing and self._has_reported:
            self._has_reported = False
            self._on_change(f"{self._path} is written again; {num_missing} lines are missing")

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _append(self, data: bytes) -> None:
        if self._fd is None:
            self._fd = _open(self._path)
        unwritten = memoryview(b"\n" + data if self._ends_mid_line else data)
        while unwritten:
            written = os.write(self._fd, unwritten)
            self._ends_mid_line = not bytes(unwritten[:written]).endswith(b"\n")
            unwritten = unwritten[written:]

    def _fail(self, error: OSError) -> None:
        """Report the failure, at most once per _REPORT_INTERVAL_S while writes fail now and then."""
        now_s = self._clock()
        if self._failed_s is None or now_s - self._failed_s > _REPORT_INTERVAL_S:
            self._has_reported = True
            self._on_change(
                f"cannot write {self._path} ({error.strerror or error}); lines are dropped until this works again"
            )
        self._failed_s = now_s


def make_log_folder(folder: Path) -> None:
    """Create the folder, accessible to this user only, unless it exists. Raises OSError, also for a symbolic link of
    another user.
    """
    if folder.is_symlink() and folder.lstat().st_uid not in (0, os.geteuid()):
        raise PermissionError(0, "it is a symbolic link of another user")
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)


def _open(path: Path) -> int:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # old temporary folders may have been removed
    fd = os.open(path, _FLAGS, 0o666)
    about = os.fstat(fd)
    if not stat.S_ISREG(about.st_mode) or about.st_uid not in (0, os.geteuid()):
        os.close(fd)
        raise PermissionError(0, "it is not a file of this user")
    return fd


def _gap(num_lines: int) -> bytes:
    return json.dumps({"event": "log lines dropped", "level": "warning", "num_lines": num_lines}).encode() + b"\n"


@dataclass(frozen=True, slots=True)
class LogEntry:
    """A log line without service and control characters. `time` is empty if the line has none."""

    text: str
    is_warning: bool
    time: str = ""


def read_log_line(line: bytes) -> LogEntry:
    """Read one line: JSON as services write it, with `log_json=false` "TIME [warning  ] event  key=value", or text as
    libraries do ("WARNING name message").
    """
    text = line.decode(errors="replace").rstrip()
    if plain := _PLAIN_LINE.fullmatch(text):
        time_text, level, event = plain.groups()
        event = re.sub(" {2,}", " ", event, count=1)  # the renderer's padding
        return LogEntry(escape_controls(f"{level}: {event}"), level in _WARNING_LEVELS, time_text)
    try:
        entry = json.loads(text)
    except ValueError:
        entry = None
    if not isinstance(entry, dict) or "event" not in entry:
        return LogEntry(escape_controls(text), text.lower().startswith(_WARNING_LEVELS))
    level = str(entry.get("level", "info"))
    text = escape_controls(f"{level}: {_describe(entry)}")
    return LogEntry(text, level in _WARNING_LEVELS, str(entry.get("timestamp", "")))


def _describe(entry: Mapping[str, object]) -> str:
    fields = [f"{key}={value}" for key, value in entry.items() if key not in _HIDDEN]
    if "stack" in entry:
        fields.append("(the log file has the stack)")
    raised = entry.get("exception")
    if isinstance(raised, list) and raised and isinstance(raised[0], dict):
        fields.append(f"({raised[0].get('exc_type')}: {raised[0].get('exc_value')})")
    return " ".join([str(entry["event"]), *fields])
