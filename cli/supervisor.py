"""Runs a mesh as child processes, in the foreground.

    start router ──listening──▶ start workers and gateway ──all ready──▶ trial request ──▶ ready ──▶ watch
    a worker or the gateway dies: start it again, later and later    the router dies: stop    SIGINT, SIGTERM: stop
    stop: gateway and router first (they drain), then workers; a second signal kills

Everything that happens comes through one queue, in order, and is handled by one task.
"""

import asyncio
import contextlib
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

from cli.backoff import Backoff
from cli.child import Child, ChildEvent, Launch
from cli.display import Display
from cli.services import MeshPlan, Service
from mesh.domain.errors import ConfigurationError
from tandem import TandemError

_STOP_LIMIT_S = 60.0
_CONFIGURATION_STATUS = 2

Trial = Callable[[str], Awaitable[None]]
"""Sends a request through the whole path of the mesh at an address. Raises TandemError."""


class MeshFailed(Exception):
    """A service died, or never became ready. The message says which, with the end of its log."""


class _StopAsked(Exception):
    """A signal came."""


@dataclass(frozen=True, slots=True)
class _Signal:
    number: int


@dataclass(frozen=True, slots=True)
class _TimeUp:
    """The mesh should serve by now."""


@dataclass(frozen=True, slots=True)
class _TrialEnded:
    error: TandemError | None


@dataclass(frozen=True, slots=True)
class _RestartDue:
    service: Service


_Event: TypeAlias = ChildEvent | _Signal | _TimeUp | _TrialEnded | _RestartDue


class Supervisor:
    """One mesh, from start to stop."""

    def __init__(self, plan: MeshPlan, launch: Launch, display: Display, trial: Trial) -> None:
        self._plan = plan
        self._display = display
        self._trial = trial
        self._queue: asyncio.Queue[_Event] = asyncio.Queue()
        self._launch = replace(launch, on_event=self._queue.put_nowait, on_warning=self._warn)
        self._children: dict[str, Child] = {}
        self._started_s: dict[str, float] = {}
        self._backoffs: dict[str, Backoff] = {}
        self._is_stopping = False

    async def run(self, on_ready: Callable[[str, str], None]) -> None:
        """Serve until a signal comes; calls `on_ready(router's address, gateway's or "")` once.

        Raises MeshFailed or ConfigurationError.
        """
        with self._signals():
            try:
                address = await self._start()
                self._display.table(self._children.values())
                on_ready(address, self._children["gateway"].address if "gateway" in self._children else "")
                await self._watch()
            except _StopAsked:
                self._display.loaded()
                self._display.line("stopping")
            finally:
                self._display.loaded()
                await self._stop()

    async def _start(self) -> str:
        """Start everything; returns the router's address once a trial request went through."""
        timer = asyncio.get_running_loop().call_later(
            self._plan.settings.model_loading_timeout, self._queue.put_nowait, _TimeUp()
        )
        try:
            await self._spawn(self._plan.router())
            await self._until_all_ready()
            self._display.loaded()
            address = self._children["router"].address
            await self._try(address)
        finally:
            timer.cancel()
        return address

    async def _until_all_ready(self) -> None:
        not_ready = {"router"}
        while not_ready:
            event = await self._next_while_starting(not_ready)
            if not isinstance(event, ChildEvent):
                continue
            name = event.child.service.name
            if event.kind == "loading":
                self._display.loading(name, float(event.fields["fraction"]))
            elif event.kind == "ready":
                not_ready.discard(name)
            elif event.kind == "listening" and name == "router":
                for service in self._behind_router(event.child.address, event.fields["registry_address"]):
                    not_ready.add(service.name)
                    await self._spawn(service)

    def _behind_router(self, address: str, registry_address: str) -> list[Service]:
        """What needs to know where the router listens."""
        settings = self._plan.resolve(self._plan.router(), self._launch.environ)
        gateway = self._plan.gateway(address, settings)
        return [*self._plan.workers(registry_address), *([gateway] if gateway else [])]

    async def _try(self, address: str) -> None:
        async def attempt() -> None:
            try:
                await self._trial(address)
            except TandemError as error:
                self._queue.put_nowait(_TrialEnded(error))
            else:
                self._queue.put_nowait(_TrialEnded(None))

        trial = asyncio.create_task(attempt())
        try:
            event: _Event | None = None
            while not isinstance(event, _TrialEnded):
                event = await self._next_while_starting({"the trial request"})
            if event.error is not None:
                raise MeshFailed(f"all services are up, but a trial request failed: {event.error}")
        finally:
            trial.cancel()
            await asyncio.gather(trial, return_exceptions=True)

    async def _next_while_starting(self, waiting_for: set[str]) -> _Event:
        """The next event. Raises if it means that the start has failed."""
        event = await self._next()
        if isinstance(event, _TimeUp):
            raise MeshFailed(self._describe_late(waiting_for))
        if isinstance(event, ChildEvent) and event.kind == "exited":
            child, status = event.child, event.fields["status"]
            if status == _CONFIGURATION_STATUS and child.tail:
                raise ConfigurationError(child.tail[-1])
            raise MeshFailed(f"{child.service.name} {_ending(status)} while starting{_end_of_log(child)}")
        return event

    async def _watch(self) -> None:
        """Start dead workers again until a signal comes. Raises MeshFailed when the router dies."""
        while True:
            event = await self._next()
            if isinstance(event, _RestartDue):
                await self._spawn(event.service)
            elif isinstance(event, ChildEvent):
                self._on_child_event(event)

    def _on_child_event(self, event: ChildEvent) -> None:
        child = event.child
        name = child.service.name
        if event.kind == "ready":
            self._display.line(f"{name}: ready again (pid {child.pid})")
        if event.kind != "exited":
            return
        child.kill()  # what it may have started
        ending = _ending(event.fields["status"])
        if name == "router":
            raise MeshFailed(f"the router {ending}{_end_of_log(child)}")
        if self._plan.settings.no_restart:
            self._display.warning(name, f"{ending}; it stays down")
            return
        lived_s = time.monotonic() - self._started_s[name]
        delay_s = self._backoffs.setdefault(name, Backoff()).delay_s(lived_s)
        self._display.warning(name, f"{ending}; starting it again in {delay_s:g} s")
        asyncio.get_running_loop().call_later(delay_s, self._queue.put_nowait, _RestartDue(child.service))

    async def _next(self) -> _Event:
        event = await self._queue.get()
        if isinstance(event, _Signal):
            raise _StopAsked
        return event

    async def _spawn(self, service: Service) -> None:
        try:
            child = await Child.start(service, self._launch)
        except OSError as error:
            raise MeshFailed(f"cannot start {service.name}: {error}") from error
        self._children[service.name] = child
        self._started_s[service.name] = time.monotonic()

    async def _stop(self) -> None:
        """Stop gateway and router, then all workers. All children are gone afterwards."""
        self._is_stopping = True
        front = [child for name, child in self._children.items() if name in ("gateway", "router")]
        await asyncio.gather(*(child.stop(_STOP_LIMIT_S) for child in front))
        await asyncio.gather(*(child.stop(_STOP_LIMIT_S) for child in self._children.values()))

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM)
        for number in numbers:
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def _on_signal(self, number: int) -> None:
        """The first signal stops in order; one that comes while stopping kills."""
        self._queue.put_nowait(_Signal(number))
        if self._is_stopping:
            for child in self._children.values():
                child.kill()

    def _warn(self, name: str, text: str) -> None:
        """While stopping, services complain about each other's going; nobody needs to know."""
        if not self._is_stopping:
            self._display.warning(name, text)

    def _describe_late(self, waiting_for: set[str]) -> str:
        late = [child for name, child in self._children.items() if name in waiting_for]
        what = ", ".join(sorted(waiting_for))
        logs = "".join(map(_end_of_log, late))
        return f"not ready after {self._plan.settings.model_loading_timeout:g} s: {what}{logs}"


def _ending(status: int) -> str:
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-status).name}"
    return f"exited with status {status}"


def _end_of_log(child: Child) -> str:
    lines = "".join(f"\n    {line[:400]}" for line in child.tail)
    return f"; {child.service.name}'s log {child.log_path} ends with:{lines}" if lines else f"; log: {child.log_path}"
