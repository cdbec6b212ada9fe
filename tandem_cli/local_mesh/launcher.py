"""Where services run: the seam between the supervisor and local processes or Ray (on_ray/), and the local processes.

Each child process runs in its own session, so that Ctrl-C in the terminal reaches only the supervisor. Each child also
watches its standard input, and stops when the supervisor disappears for any reason. A child has exited when the
processes that it started, such as ranks, are gone too.
"""

import asyncio
import contextlib
import json
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from mesh.fork_server.client import ForkedProcess, ForkServer
from mesh.process import handing_over
from mesh.tasks import cancel_all
from tandem_cli.configuration.up_settings import split_secrets
from tandem_cli.local_mesh.deployment import Service
from tandem_cli.local_mesh.service_log import ServiceLog

_CONFIGURATION_STATUS = 2
_MAX_LINE_BYTES = 1 << 20
# A grandchild may keep the pipes open after the child has exited.
_DRAIN_S = 1.0
_REAP_INTERVAL_S = 0.01

Programs = Mapping[str, Sequence[str]]
"""The command of each role, and of switchable workers, without flags."""


class RunningService(Protocol):
    """A service that has been started. `address` and the like are set once it has announced them."""

    service: Service
    log_path: Path
    pid: int
    address: str
    metrics_address: str
    tail: deque[str]
    """The last lines of its log."""

    async def stop(self, limit_s: float) -> None:
        """Ask it to stop, and kill it after `limit_s`. Returns when it has exited."""

    def kill(self) -> None:
        """Kill it and all processes that it has started. Does not wait."""


def configuration_fault(status: int, tail: Sequence[str]) -> str:
    """The message of a service that exited because its configuration is wrong; "" for other exits. `tail`: the last
    lines of its log.
    """
    return tail[-1] if status == _CONFIGURATION_STATUS and tail else ""


def describe_exit(status: int, tail: Sequence[str] = ()) -> str:
    """The exit in words, with the reason if the configuration is wrong. `tail`: the last lines of the service's log."""
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-status).name}"
    reason = configuration_fault(status, tail)
    return f"exited with status {status}" + (f" ({reason})" if reason else "")


def end_of_log(child: RunningService) -> str:
    """The last lines of a service's log, to be appended to a message about it."""
    lines = "".join(f"\n    {line[:400]}" for line in child.tail if not line.startswith("info: settings "))
    return f"; {child.service.name}'s log {child.log_path} ends with:{lines}" if lines else f"; log: {child.log_path}"


@dataclass(frozen=True, slots=True)
class ServiceEvent:
    """An event of a service: an announcement that it printed (`kind` is its name), or "exited" with `status`. After
    "exited" the supervisor starts the service again.
    """

    child: RunningService
    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)


OnEvent = Callable[[ServiceEvent], None]
OnWarning = Callable[[str, str], None]
"""`on_warning(name of the service, text)`."""


class Launcher(Protocol):
    """Starts services. Plug point: LocalLauncher, tandem_cli.on_ray.launch.RayLauncher."""

    @property
    def environ(self) -> Mapping[str, str]:
        """The variables from which services read their settings. May contain secrets."""

    async def start(self, service: Service, *, on_event: OnEvent, on_warning: OnWarning) -> RunningService:
        """Start `service`; both functions are called in the event loop. Raises OSError if it cannot be started."""

    def end_starts(self) -> None:
        """Make waiting starts fail, because the mesh stops."""


def with_checkout(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ`, extended so that Python finds the packages of a checkout that is not installed."""
    packages = Path(__file__).resolve().parents[2]
    if not (packages / "pyproject.toml").exists():
        return dict(environ)
    folders = (str(packages), str(packages / "client"), environ.get("PYTHONPATH"))
    return {**environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))}


@dataclass(frozen=True, slots=True)
class LocalLauncher:
    """A Launcher that starts child processes of this one.

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
        self._on_event = on_event
        self._process = process
        self._log = ServiceLog(log_path, partial(on_warning, service.name))
        self.tail = self._log.tail
        self.exited = asyncio.create_task(self._follow())

    @classmethod
    async def start(
        cls, service: Service, launcher: LocalLauncher, *, on_event: OnEvent, on_warning: OnWarning
    ) -> "Child":
        """Start the process of `service`. Raises OSError if the program cannot be executed."""
        environ, secrets = split_secrets(service.role, launcher.environ)
        command = (*launcher.programs[service.program or service.role], *service.flags)
        process = await _start_process(command, environ, secrets, launcher)
        log_path = launcher.log_dir / f"{service.name}.log"
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
        await asyncio.wait(drains, timeout=_DRAIN_S)
        await cancel_all(drains)
        self._log.close()
        self._on_event(ServiceEvent(self, "exited", {"status": status}))

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
        self._on_event(ServiceEvent(self, kind, announced))

    def _on_log(self, line: bytes) -> None:
        self._log.write(line)


async def _start_process(
    command: Sequence[str], environ: Mapping[str, str], secrets: Mapping[str, str], launcher: LocalLauncher
) -> asyncio.subprocess.Process | ForkedProcess:
    """Fork the process, or execute its program if the fork server cannot, or if there is none. Raises OSError."""
    with handing_over(secrets) as (secrets_environ, secrets_fd):
        if launcher.fork_server is not None:
            fds = dict.fromkeys(secrets_environ, secrets_fd)
            forked = await launcher.fork_server.start(command, environ, fds, limit=_MAX_LINE_BYTES)
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
