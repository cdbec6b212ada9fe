"""The actor of a worker, on the node where Ray has placed it: it runs the worker as its child process.

follow(handover)  starts the worker if it does not run, and returns what it has announced and logged since
worker ends       the actor reports it, then ends its own process, and Ray starts the actor again
actor ends        the worker dies with it (bound_to_actor.py)
stop(limit_s)     drains the worker; then the launcher removes the actor
"""

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray.util

from mesh.process import adopt_orphans
from mesh.tasks import set_within
from tandem_cli.configuration.up_settings import ROLES
from tandem_cli.local_mesh.launcher import Child, LocalLauncher, ServiceEvent, with_checkout
from tandem_cli.on_ray.handover import Handover

LOG_LINE = "log_line"
"""The kind of an event that is a line of the worker's log, `line`."""

_NEWS_S = 2.0
_LAST_NEWS_S = 3.0
_MIN_LIFE_S = 5.0
"""A worker that ends sooner is started again only after this time."""


@dataclass(frozen=True)
class News:
    """The announcements and log lines of a worker, in order: kinds of events, and their fields."""

    pid: int
    events: tuple[tuple[str, Mapping[str, Any]], ...]


class _LoggingChild(Child):
    """Reports its log lines as events. The driver writes them to a file, and Ray gets a copy as this actor's stderr."""

    def _on_log(self, line: bytes) -> None:
        sys.stderr.write(line.decode(errors="replace"))
        self._on_event(ServiceEvent(self, LOG_LINE, {"line": line}))


class WorkerActor:
    """Runs one worker. Ray calls the methods in one event loop."""

    def __init__(self) -> None:
        self._child: Child | None = None
        self._starting = asyncio.Lock()
        self._ending: asyncio.Task[None] | None = None
        self._started_s = 0.0
        self._events: list[tuple[str, Mapping[str, Any]]] = []
        self._has_news = asyncio.Event()
        self._is_read = asyncio.Event()
        self._is_stopping = False

    async def follow(self, handover: Handover) -> News:
        """Start the worker, at the first call, and return the news since the last call: at once, or when there are
        some, or after a while. Raises ConfigurationError if the node cannot start the worker.
        """
        async with self._starting:
            if self._child is None:
                self._child = await self._start(handover)
        await set_within(self._has_news, _NEWS_S)
        return self._take_news()

    async def stop(self, limit_s: float) -> News:
        """Stop the worker as Ctrl-C stops a local one. Returns its last news."""
        self._is_stopping = True
        self._has_news.set()
        if self._child is not None:
            await self._child.stop(limit_s)
        return self._take_news()

    async def _start(self, handover: Handover) -> Child:
        service = handover.on_node(ray.util.get_node_ip_address())
        environ = with_checkout({**os.environ, **handover.environ, **handover.secrets})
        environ.pop("OMP_NUM_THREADS", None)  # Ray sets it to the actor's cores; workers have num_threads
        bound = (sys.executable, "-m", "tandem_cli.on_ray.bound_to_actor", str(os.getpid()))
        programs = {role: (*bound, module) for role, (module, _) in ROLES.items()}
        adopt_orphans()
        self._started_s = time.monotonic()
        launcher = LocalLauncher(programs, environ, Path(tempfile.gettempdir()))
        return await _LoggingChild.start(service, launcher, on_event=self._on_event, on_warning=self._on_warning)

    def _on_event(self, event: ServiceEvent) -> None:
        self._events.append((event.kind, dict(event.fields)))
        self._has_news.set()
        if event.kind == "exited" and not self._is_stopping:
            self._ending = asyncio.create_task(self._end())

    def _on_warning(self, name: str, text: str) -> None:
        """The driver reads the warnings from the log lines."""

    def _take_news(self) -> News:
        events, self._events = tuple(self._events), []
        self._has_news.clear()
        self._is_read.set()
        return News(0 if self._child is None else self._child.pid, events)

    async def _end(self) -> None:
        """End this actor, once the driver has learnt of the worker's end."""
        self._is_read.clear()
        await set_within(self._is_read, _LAST_NEWS_S)
        await asyncio.sleep(max(0.2, self._started_s + _MIN_LIFE_S - time.monotonic()))
        if not self._is_stopping:
            os._exit(1)
