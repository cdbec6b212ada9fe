"""One child process: its announcements, its log file, its exit.

Each child runs in its own session, so that Ctrl-C in the terminal reaches only the supervisor. Each child also watches
its standard input, and stops when the supervisor disappears for any reason.
"""

import asyncio
import contextlib
import json
import os
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mesh.process import handing_over
from tandem_cli.log_file import LogFile
from tandem_cli.log_lines import read_log_line
from tandem_cli.services import Service, split_secrets

_MAX_LINE_BYTES = 1 << 20
_TAIL_LINES = 8
# A grandchild may keep the pipes open after the child has exited.
_DRAIN_S = 1.0

Programs = Mapping[str, Sequence[str]]
"""The command of each role, without flags."""


@dataclass(frozen=True, slots=True)
class ChildEvent:
    """An event of a child: an announcement that it printed (`kind` is its name), or "exited" with `status`."""

    child: "Child"
    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Launch:
    """Launch options that all children share.

    `environ` may contain secrets. A child receives only the secrets of its role, through a file descriptor and not in
    its environment.
    """

    programs: Programs
    environ: Mapping[str, str]
    log_dir: Path


OnEvent = Callable[[ChildEvent], None]
OnWarning = Callable[[str, str], None]
"""`on_warning(name of the service, text)`."""


class Child:
    """A running process. The task `exited` is done when the process has exited and all of its output has been read.

    `on_event` and `on_warning` are called in the event loop.
    """

    def __init__(
        self,
        service: Service,
        process: asyncio.subprocess.Process,
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
        with handing_over(secrets) as (secrets_environ, secrets_fd):
            process = await asyncio.create_subprocess_exec(
                *launch.programs[service.role],
                *service.flags,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=environ | secrets_environ,
                pass_fds=(secrets_fd,),
                start_new_session=True,
                limit=_MAX_LINE_BYTES,
            )
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
        _, unfinished = await asyncio.wait(drains, timeout=_DRAIN_S)
        for drain in unfinished:
            drain.cancel()
        await asyncio.gather(*drains, return_exceptions=True)
        self._log.close()
        self._on_event(ChildEvent(self, "exited", {"status": status}))

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


async def _read_lines(stream: asyncio.StreamReader, on_line: Callable[[bytes], None]) -> None:
    while True:
        try:
            line = await stream.readline()
        except ValueError:  # the line is longer than the limit: drop it
            continue
        if not line:
            return
        on_line(line)
