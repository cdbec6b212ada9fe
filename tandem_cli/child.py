"""One child process: its announcements, its log, its exit.

Each child runs in its own session, so that Ctrl-C in the terminal reaches only the supervisor. Each child also watches
its standard input, and stops when the supervisor disappears for any reason. A child has exited when the processes that
it started, such as ranks, are gone too. Its log lines go to a file, and warnings among them also to the terminal. A
full disk loses log lines, but never stops the child.
"""

import asyncio
import contextlib
import json
import os
import signal
import stat
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mesh.fork_server.client import ForkedProcess, ForkServer
from mesh.logs import escape_controls
from mesh.process import handing_over
from tandem_cli.deployment import Service
from tandem_cli.launcher import ChildEvent, OnEvent, OnWarning
from tandem_cli.up_settings import split_secrets

_MAX_LINE_BYTES = 1 << 20
_TAIL_LINES = 8
# A grandchild may keep the pipes open after the child has exited.
_DRAIN_S = 1.0
_REAP_INTERVAL_S = 0.01
_REPORT_INTERVAL_S = 60.0
# Neither follow a symbolic link of another user, nor block on a pipe without a reader.
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WARNING_LEVELS = ("warning", "error", "critical")
_HIDDEN = ("level", "event", "timestamp", "service", "exception")


Programs = Mapping[str, Sequence[str]]
"""The command of each role, and of switchable workers, without flags."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Launch options that all children share.

    `environ` may contain secrets. A child receives only the secrets of its role, through a file descriptor and not in
    its environment.
    """

    programs: Programs
    environ: Mapping[str, str]
    log_dir: Path
    fork_server: ForkServer | None = None

    async def start(self, service: Service, *, on_event: OnEvent, on_warning: OnWarning) -> "Child":
        """Start `service` as a child process. Raises OSError if the program cannot be executed."""
        return await Child.start(service, self, on_event=on_event, on_warning=on_warning)

    def end_starts(self) -> None:
        """End the fork server, for which the start of a service may be waiting."""
        if self.fork_server is not None:
            self.fork_server.end()


class Child:
    """A running process. The task `exited` is done when the process has exited and all of its output has been read.

    `on_event` and `on_warning` are called in the event loop.
    """

    def __init__(
        self,
        service: Service,
        process: asyncio.subprocess.Process | ForkedProcess,
        log_path: Path,
        *,
        on_event: OnEvent,
        on_warning: OnWarning,
    ) -> None:
        self.service = service
        self.log_path = log_path
        self.pid = process.pid
        self.address = ""
        self.metrics_address = ""
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._on_event = on_event
        self._on_warning = on_warning
        self._process = process
        self._log = LogFile(self.log_path, lambda text: on_warning(service.name, text))
        self.exited = asyncio.create_task(self._follow())

    @classmethod
    async def start(cls, service: Service, launch: Launch, *, on_event: OnEvent, on_warning: OnWarning) -> "Child":
        """Start the process of `service`. Raises OSError if the program cannot be executed."""
        environ, secrets = split_secrets(service.role, launch.environ)
        command = (*launch.programs[service.program or service.role], *service.flags)
        process = await _start(command, environ, secrets, launch)
        log_path = launch.log_dir / f"{service.name}.log"
        return cls(service, process, log_path, on_event=on_event, on_warning=on_warning)

    async def stop(self, limit_s: float) -> None:
        """Send SIGTERM, wait for the exit, and kill the process group after `limit_s`."""
        if not self.exited.done():
            self._signal(signal.SIGTERM)
            await asyncio.wait([self.exited], timeout=limit_s)
        self.kill()
        await self.exited

    def kill(self) -> None:
        """Kill the child and all processes that it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def _follow(self) -> None:
        """Read stdout and stderr until the process exits, then report the exit."""
        process = self._process
        assert process.stdout is not None
        assert process.stderr is not None
        drains = [
            asyncio.create_task(_read_lines(process.stdout, self._on_output)),
            asyncio.create_task(_read_lines(process.stderr, self._on_log)),
        ]
        status = await process.wait()
        self.kill()
        await self._reap()
        _, unfinished = await asyncio.wait(drains, timeout=_DRAIN_S)
        for drain in unfinished:
            drain.cancel()
        await asyncio.gather(*drains, return_exceptions=True)
        self._log.close()
        self._on_event(ChildEvent(self, "exited", {"status": status}))

    async def _reap(self) -> None:
        """Wait for killed processes of the child's group, which are children of this process now; see adopt_orphans."""
        deadline_s = time.monotonic() + _DRAIN_S
        with contextlib.suppress(ChildProcessError):  # there are none
            while time.monotonic() < deadline_s:
                pid, _ = os.waitpid(-self.pid, os.WNOHANG)  # noqa: ASYNC222 - it returns at once
                if pid == 0:
                    await asyncio.sleep(_REAP_INTERVAL_S)

    def _on_output(self, line: bytes) -> None:
        """Report an announcement (a JSON object with an "event"); write any other line to the log."""
        try:
            announced = json.loads(line)
            kind = announced.pop("event")
        except (ValueError, KeyError, AttributeError, TypeError):
            self._on_log(line)
            return
        if kind == "listening":
            self.address = announced.get("address", "")
        if kind == "metrics":
            self.metrics_address = announced.get("address", "")
        self._on_event(ChildEvent(self, kind, announced))

    def _on_log(self, line: bytes) -> None:
        self._log.write(line)
        entry = read_log_line(line)
        if entry.text:
            self.tail.append(entry.text)
        if entry.is_warning:
            self._on_warning(self.service.name, entry.text)


async def _start(
    command: Sequence[str], environ: Mapping[str, str], secrets: Mapping[str, str], launch: Launch
) -> asyncio.subprocess.Process | ForkedProcess:
    """Fork the process, or execute its program if the fork server cannot, or if there is none. Raises OSError."""
    with handing_over(secrets) as (secrets_environ, secrets_fd):
        if launch.fork_server is not None:
            fds = dict.fromkeys(secrets_environ, secrets_fd)
            forked = await launch.fork_server.start(command, environ, fds, limit=_MAX_LINE_BYTES)
            if forked is not None:
                return forked
        return await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**environ, **secrets_environ},
            pass_fds=(secrets_fd,),
            start_new_session=True,
            limit=_MAX_LINE_BYTES,
        )


async def _read_lines(stream: asyncio.StreamReader, on_line: Callable[[bytes], None]) -> None:
    while True:
        try:
            line = await stream.readline()
        except ValueError:  # the line is longer than the limit: drop it
            continue
        if not line:
            return
        on_line(line)


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
    """A log line without timestamp, service and control characters."""

    text: str
    is_warning: bool


def read_log_line(line: bytes) -> LogEntry:
    """Read one line: JSON as services write it, or text as libraries do ("WARNING name message")."""
    text = line.decode(errors="replace").rstrip()
    try:
        entry = json.loads(text)
    except ValueError:
        entry = None
    if not isinstance(entry, dict) or "event" not in entry:
        return LogEntry(escape_controls(text), text.lower().startswith(_WARNING_LEVELS))
    level = str(entry.get("level", "info"))
    return LogEntry(escape_controls(f"{level}: {_describe(entry)}"), level in _WARNING_LEVELS)


def _describe(entry: Mapping[str, object]) -> str:
    fields = [f"{key}={value}" for key, value in entry.items() if key not in _HIDDEN]
    raised = entry.get("exception")
    if isinstance(raised, list) and raised and isinstance(raised[0], dict):
        fields.append(f"({raised[0].get('exc_type')}: {raised[0].get('exc_value')})")
    return " ".join([str(entry["event"]), *fields])
