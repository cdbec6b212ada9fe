"""One child process: its announcements, its log, its end.

Children live in sessions of their own, so that Ctrl-C in the terminal reaches only the supervisor; each watches its
standard input, so that it stops when the supervisor is gone, however that happened.
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
from typing import Any, BinaryIO

from cli.log_lines import read_log_line
from cli.services import Service

_MAX_LINE_BYTES = 1 << 20
_TAIL_LINES = 8
# A grandchild may hold the pipes open after the child's end.
_DRAIN_S = 1.0

Programs = Mapping[str, Sequence[str]]
"""Command of each role, before its flags."""


@dataclass(frozen=True, slots=True)
class ChildEvent:
    """News of a child: an announcement of its own, or "exited" with `status`."""

    child: "Child"
    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Launch:
    """What all children share. `on_event` and `on_warning` are called in the event loop."""

    programs: Programs
    environ: Mapping[str, str]
    log_dir: Path
    on_event: Callable[[ChildEvent], None]
    on_warning: Callable[[str, str], None]


class Child:
    """A started process. `exited` is done when it is gone and all it wrote is read."""

    def __init__(self, service: Service, launch: Launch, process: asyncio.subprocess.Process) -> None:
        self.service = service
        self.log_path = log_path(launch.log_dir, service)
        self.pid = process.pid
        self.address = ""
        self.metrics_address = ""
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._launch = launch
        self._process = process
        self.exited = asyncio.create_task(self._follow())

    @classmethod
    async def start(cls, service: Service, launch: Launch) -> "Child":
        """Start the process of `service`. Raises OSError if its program cannot be run."""
        process = await asyncio.create_subprocess_exec(
            *launch.programs[service.role],
            *service.flags,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=dict(launch.environ),
            start_new_session=True,
            limit=_MAX_LINE_BYTES,
        )
        return cls(service, launch, process)

    async def stop(self, limit_s: float) -> None:
        """Ask it to stop, wait, and kill it after `limit_s`."""
        if not self.exited.done():
            self._signal(signal.SIGTERM)
            await asyncio.wait([self.exited], timeout=limit_s)
        self.kill()
        await self.exited

    def kill(self) -> None:
        """Kill it and whatever it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def _follow(self) -> None:
        """Read all it writes until it is gone."""
        process = self._process
        assert process.stdout is not None
        assert process.stderr is not None
        self.log_path.parent.mkdir(parents=True, exist_ok=True)  # cleaners of temporary folders may have come by
        with self.log_path.open("ab") as log:
            drains = [
                asyncio.create_task(_read_lines(process.stdout, lambda line: self._on_output(line, log))),
                asyncio.create_task(_read_lines(process.stderr, lambda line: self._on_log(line, log))),
            ]
            status = await process.wait()
            _, unfinished = await asyncio.wait(drains, timeout=_DRAIN_S)
            for drain in unfinished:
                drain.cancel()
            await asyncio.gather(*drains, return_exceptions=True)
        self._launch.on_event(ChildEvent(self, "exited", {"status": status}))

    def _on_output(self, line: bytes, log: BinaryIO) -> None:
        """An announcement is a JSON object with an "event"; other lines are kept in the log."""
        try:
            announced = json.loads(line)
            kind = announced.pop("event")
        except (ValueError, KeyError, AttributeError, TypeError):
            self._on_log(line, log)
            return
        if kind == "listening":
            self.address = announced.get("address", "")
        if kind == "metrics":
            self.metrics_address = announced.get("address", "")
        self._launch.on_event(ChildEvent(self, kind, announced))

    def _on_log(self, line: bytes, log: BinaryIO) -> None:
        log.write(line)
        log.flush()
        entry = read_log_line(line)
        if entry.text:
            self.tail.append(entry.text)
        if entry.is_warning:
            self._launch.on_warning(self.service.name, entry.text)


def log_path(log_dir: Path, service: Service) -> Path:
    """Where the log of `service` goes."""
    return log_dir / f"{service.name}.log"


async def _read_lines(stream: asyncio.StreamReader, on_line: Callable[[bytes], None]) -> None:
    while True:
        try:
            line = await stream.readline()
        except ValueError:  # longer than the limit: dropped
            continue
        if not line:
            return
        on_line(line)
