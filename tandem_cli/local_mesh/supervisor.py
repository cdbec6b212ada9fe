"""Runs a mesh as child processes, in the foreground.

    start routers ──listening──▶ start workers and gateway ──all ready──▶ trial requests ──▶ ready ──▶ watch
    a service exits: restart it with backoff; routers and gateway keep their addresses. During the start one that exits
    by itself ends the start; one that somebody or the system has killed is started again, up to twice
    the routers' advice, on Ray: start another worker, or stop one
    SIGINT, SIGTERM, a closed terminal: stop gateway and routers (they drain), then workers; a second SIGINT or SIGTERM
    kills all

All events pass through one queue and are handled in order by one task.
"""

import asyncio
import contextlib
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from mesh.domain.errors import ConfigurationError
from mesh.domain.host import is_unspecified, local_address
from mesh.interrupts import leave_terminal, stopping_signals
from mesh.process import adopt_orphans
from mesh.tasks import Backoff, cancel_all
from tandem import TandemError
from tandem_cli.local_mesh.deployment import Deployment, Service
from tandem_cli.local_mesh.display import Display
from tandem_cli.local_mesh.launcher import (
    Launcher,
    RunningService,
    ServiceEvent,
    configuration_fault,
    describe_exit,
    end_of_log,
)
from tandem_cli.local_mesh.scaling import Change, Scaling
from tandem_cli.local_mesh.trial import Trial

_FIRST_RESTART_S, _MAX_RESTART_S = 0.5, 30.0
_KILLS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_MAX_KILLS = 2
_SILENT_S = 300.0
"""A start fails if no service reports anything for this long. Workers that load, or wait for ranks, report every few
seconds until their own limits end that.
"""
_LISTEN_S = 5.0
_COMPILE_HINT = "compiles kernels for this CPU, for 10 to 60 s, longer on a busy machine; later starts find them"


class MeshFailed(Exception):
    """A service exited, or did not become ready. The message names the service and contains the end of its log."""


class _StopRequested(Exception):
    """Raised when a signal has arrived."""


@dataclass(frozen=True, slots=True)
class _Signal:
    number: int


@dataclass(frozen=True, slots=True)
class _TrialEnded:
    """The trial request has been answered or has failed."""


@dataclass(frozen=True, slots=True)
class _RestartDue:
    service: Service


_Event: TypeAlias = ServiceEvent | _Signal | _TrialEnded | _RestartDue | Change


class Supervisor:
    """Runs the services of one mesh from start to stop. Use it once."""

    def __init__(
        self,
        deployment: Deployment,
        launcher: Launcher,
        display: Display,
        trial: Trial,
        scaling: Scaling | None = None,
    ) -> None:
        self._deployment = deployment
        self._scaling = scaling
        self._display = display
        self._trial = trial
        self._queue: asyncio.Queue[_Event] = asyncio.Queue()
        self._launcher = launcher
        self._children: dict[str, RunningService] = {}
        self._started_s: dict[str, float] = {}
        self._backoffs: dict[str, Backoff] = {}
        self._num_kills: Counter[str] = Counter()
        """How often each service was killed during the start."""
        self._registries: dict[str, str] = {}
        """The registry address of each router, by its name."""
        self._down: set[str] = set()
        self._removed: set[str] = set()
        self._leaving: dict[asyncio.Task[None], RunningService] = {}
        self._has_told_of_compiling = False
        self._start_ends_s: float | None = None
        """The deadline of a start that has a limit."""
        self._is_stopping = False

    async def run(self, on_ready: Callable[[str, str], None]) -> None:
        """Serve until a signal arrives. Raises MeshFailed or ConfigurationError.

        Calls `on_ready(addresses of the routers, URL of the gateway or "")` once.
        """
        adopt_orphans()
        with self._signals():
            try:
                await self._start()
                self._show_services()
                on_ready(",".join(map(local_address, self._router_addresses())), self._http_url())
                async with self._scaled():
                    await self._watch()
            except _StopRequested:
                self._display.loaded()
                self._display.line("stopping")
            finally:
                self._display.loaded()
                await self._stop()

    def _show_services(self) -> None:
        """Show the table of services, the URLs of their metrics, and which of them other machines reach."""
        self._display.table(self._children.values())
        metrics_urls = [
            f"{name} http://{local_address(child.metrics_address)}/metrics"
            for name, child in self._children.items()
            if child.metrics_address
        ]
        if metrics_urls:
            self._display.line(f"metrics: {', '.join(metrics_urls)}")
        open_to_all = [
            name
            for name, child in self._children.items()
            if child.service.role in ("router", "gateway") and is_unspecified(child.address.rpartition(":")[0])
        ]
        if open_to_all:
            self._display.line(
                f"{', '.join(open_to_all)}: on all interfaces; clients on other machines use an address of this one"
            )

    async def _start(self) -> None:
        """Start all services. Returns after a successful trial request through each router."""
        limit_s = self._deployment.settings.model_loading_timeout
        if limit_s is not None:
            self._start_ends_s = time.monotonic() + limit_s - self._deployment.download_s
        for router in self._deployment.routers():
            await self._spawn(router)
        await self._until_all_ready()
        self._display.loaded()
        for address in self._router_addresses():
            await self._run_trial(address)

    async def _until_all_ready(self) -> None:
        not_ready = set(self._children)
        while not_ready:
            event = await self._next_while_starting(not_ready)
            if not isinstance(event, ServiceEvent):
                continue
            name = event.child.service.name
            if event.kind == "loading":
                self._display.loading(name, float(event.fields["fraction"]))
            elif event.kind == "compiling" and not self._has_told_of_compiling:
                self._has_told_of_compiling = True
                self._display.line(_COMPILE_HINT)
            elif event.kind == "kv_memory":
                self._display.line(f"{name}: {event.fields['summary']}")
            elif event.kind == "waiting_for_ranks":
                self._display.line(f"{name}: waits for ranks from other machines on port {event.fields['port']}")
            elif event.kind == "ready":
                not_ready.discard(name)
            elif event.kind == "listening" and event.child.service.role == "router":
                self._registries[name] = event.fields["registry_address"]
                num_routers = self._deployment.settings.routers
                if len(self._registries) < num_routers or len(self._children) > num_routers:
                    continue
                for service in self._services_behind_routers():
                    not_ready.add(service.name)
                    await self._spawn(service)

    def _services_behind_routers(self) -> list[Service]:
        """Workers and gateway, which need the addresses of the routers. With several routers, workers register in
        Redis.
        """
        settings = self._deployment.resolve(self._deployment.router(), self._launcher.environ)
        gateway = self._deployment.gateway(self._router_addresses(), settings)
        workers = self._deployment.workers(next(iter(self._registries.values())))
        return [*workers, *([gateway] if gateway else [])]

    def _http_url(self) -> str:
        if (gateway := self._children.get("gateway")) is None:
            return ""
        has_tls = self._deployment.resolve(gateway.service, self._launcher.environ).public_tls_cert
        return f"{'https' if has_tls else 'http'}://{local_address(gateway.address)}"

    def _router_addresses(self) -> list[str]:
        return [child.address for child in self._children.values() if child.service.role == "router"]

    async def _run_trial(self, address: str) -> None:
        trial = asyncio.create_task(self._trial(address))
        trial.add_done_callback(lambda _: self._queue.put_nowait(_TrialEnded()))
        try:
            event: _Event | None = None
            while not isinstance(event, _TrialEnded):
                event = await self._next_while_starting({"the trial request"})
            trial.result()
        except TandemError as error:
            raise MeshFailed(f"all services are up, but a trial request failed: {error}") from error
        finally:
            await cancel_all([trial])

    async def _next_while_starting(self, waiting_for: set[str]) -> _Event:
        """The next event. Raises MeshFailed or ConfigurationError if it means that the start has failed. A service that
        starts again is added to `waiting_for`.
        """
        if (event := await self._next_in_time()) is None:
            raise MeshFailed(self._describe_timeout(waiting_for))
        if isinstance(event, _RestartDue):
            await self._respawn(event.service)
        if isinstance(event, ServiceEvent) and event.kind == "exited":
            child, status = event.child, event.fields["status"]
            if reason := configuration_fault(status, child.tail):
                raise ConfigurationError(reason)
            name, exit_text = child.service.name, f"{describe_exit(status)} while starting"
            self._num_kills[name] += 1
            is_final = self._num_kills[name] > _MAX_KILLS or self._deployment.settings.no_restart
            if -status not in _KILLS or is_final:
                hint = "; the system does that when memory runs out" if status == -signal.SIGKILL else ""
                raise MeshFailed(f"{name} {exit_text}{hint}{end_of_log(child)}")
            waiting_for.add(name)
            self._schedule_restart(self._replacement(child), exit_text)
            self._registries.pop(name, None)  # until the router listens again
        return event

    async def _next_in_time(self) -> _Event | None:
        """The next event of the start; None if the start has no time left, or the services are silent.

        Silence is counted in periods of listening, not by the clock: after a laptop has slept, reports are still
        unread.
        """
        ends_s, num_silent = self._start_ends_s, round(_SILENT_S / _LISTEN_S)
        for listen_s in [_LISTEN_S] * num_silent if ends_s is None else [ends_s - time.monotonic()]:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(listen_s):
                    return await self._next()
        return None

    async def _watch(self) -> None:
        """Restart services that exit until a signal arrives. Raises MeshFailed if no router is left."""
        while True:
            event = await self._next()
            if isinstance(event, _RestartDue):
                if event.service.name not in self._removed:
                    await self._respawn(event.service)
            elif isinstance(event, Change):
                await self._change(event)
            elif isinstance(event, ServiceEvent):
                self._on_child_event(event)

    @contextlib.asynccontextmanager
    async def _scaled(self) -> AsyncIterator[None]:
        """Follow the routers' advice until the end of the context, if that is wanted."""
        if self._scaling is None:
            yield
            return
        addresses, registry = ",".join(self._router_addresses()), next(iter(self._registries.values()))
        scaling = asyncio.create_task(
            self._scaling.run(
                addresses, registry, on_change=self._queue.put_nowait, on_warning=partial(self._warn, "scaling")
            )
        )
        try:
            yield
        finally:
            await cancel_all([scaling])

    async def _change(self, change: Change) -> None:
        name = change.service.name
        self._display.line(f"{name}: {'added' if change.is_added else 'drains and is removed'}: {change.reason}")
        if change.is_added:
            self._removed.discard(name)
            await self._respawn(change.service)
            return
        self._removed.add(name)
        if child := self._children.pop(name, None):
            limit_s = self._deployment.stop_limit_s(change.service, self._launcher.environ)
            leaving = asyncio.create_task(child.stop(limit_s))
            self._leaving[leaving] = child
            leaving.add_done_callback(self._leaving.pop)

    def _on_child_event(self, event: ServiceEvent) -> None:
        child = event.child
        name = child.service.name
        if self._children.get(name) is not child:  # it was removed
            return
        if event.kind == "ready":
            self._display.line(f"{name}: ready again (pid {child.pid})")
        if event.kind == "switching":
            self._display.line(f"{name}: changes its role to {event.fields['role']}")
        if event.kind != "exited":
            return
        child.kill()  # also kills processes that it has started
        exit_text = describe_exit(event.fields["status"], child.tail)
        self._down.add(name)
        if self._deployment.settings.no_restart:
            if self._down.issuperset(self._registries):
                raise MeshFailed(f"the {name} {exit_text}{end_of_log(child)}")
            self._display.warning(name, f"{exit_text}; it is not restarted")
            return
        self._schedule_restart(self._replacement(child), exit_text)

    def _schedule_restart(self, service: Service, reason: str) -> None:
        lived_s = time.monotonic() - self._started_s[service.name]
        delay_s = self._backoffs.setdefault(service.name, Backoff(_FIRST_RESTART_S, _MAX_RESTART_S)).next_s(lived_s)
        self._display.warning(service.name, f"{reason}; restarting it in {delay_s:g} s")
        asyncio.get_running_loop().call_later(delay_s, self._queue.put_nowait, _RestartDue(service))

    async def _respawn(self, service: Service) -> None:
        try:
            await self._spawn(service)
        except MeshFailed as error:  # the machine cannot run another process now
            self._schedule_restart(service, str(error))

    def _replacement(self, child: RunningService) -> Service:
        """The replacement for a service that exited. Routers and gateway keep their addresses, which others use."""
        registry_port = self._registries.get(child.service.name, "")
        if child.service.role not in ("router", "gateway"):
            return child.service
        return child.service.listening_at(
            port=child.address, registry_port=registry_port, metrics_port=child.metrics_address
        )

    async def _next(self) -> _Event:
        event = await self._queue.get()
        if isinstance(event, _Signal):
            raise _StopRequested
        return event

    async def _spawn(self, service: Service) -> None:
        self._started_s[service.name] = time.monotonic()
        try:
            child = await self._launcher.start(service, on_event=self._queue.put_nowait, on_warning=self._warn)
        except OSError as error:
            raise MeshFailed(f"cannot start {service.name}: {error}") from error
        self._children[service.name] = child
        self._down.discard(service.name)

    async def _stop(self) -> None:
        """Stop gateway and routers, then all workers. Returns when all children have exited."""
        self._is_stopping = True
        children = list(self._children.values())
        for some in ([child for child in children if child.service.role in ("gateway", "router")], children):
            limits_s = [self._deployment.stop_limit_s(child.service, self._launcher.environ) for child in some]
            await asyncio.gather(*(child.stop(limit_s) for child, limit_s in zip(some, limits_s, strict=True)))
        await asyncio.gather(*self._leaving)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        numbers = stopping_signals()
        for number in numbers:
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def _on_signal(self, number: int) -> None:
        """The first signal starts an orderly stop; Ctrl-C or SIGTERM during the stop kills all children."""
        if number == signal.SIGHUP:
            leave_terminal()
        self._queue.put_nowait(_Signal(number))
        self._launcher.end_starts()
        if self._is_stopping and number != signal.SIGHUP:  # the shell and the system each send one
            for child in (*self._children.values(), *self._leaving.values()):
                child.kill()

    def _warn(self, name: str, text: str) -> None:
        """Show a warning, but not during a stop, when services warn about each other's exit."""
        if not self._is_stopping:
            self._display.warning(name, text)

    def _describe_timeout(self, waiting_for: set[str]) -> str:
        late = [child for name, child in self._children.items() if name in waiting_for]
        names = ", ".join(sorted(waiting_for))
        logs = "".join(map(end_of_log, late))
        if (limit_s := self._deployment.settings.model_loading_timeout) is None:
            return f"no sign of life for {_SILENT_S:g} s, and not ready: {names}{logs}"
        return f"not ready after {limit_s:g} s: {names}; --model-loading-timeout gives them longer{logs}"
