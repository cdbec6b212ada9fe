"""A real mesh of plain processes: two routers, prefill and decode workers, and a redis-server they share.

    async with running(Shape(model, log_dir)) as cluster:
        async with cluster.client("router-0") as client: ...
        cluster.kill("decode-1")            # comes back by itself, at the same port
        await cluster.restart("router-0")   # SIGTERM: drains, then comes back
        await cluster.wait_whole()          # everybody is up, at both routers

Nodes are called router-0, prefill-0, decode-0 and so on. Each keeps its ports over restarts and logs to
`log_dir/NAME.log`. What a node does is watched: `exits` tells which ended, and whether the harness wanted it to.

Between the nodes stand proxies (`tests/chaos/proxy.py`), one in front of each router and each decode worker: a worker
listens on 127.0.0.1 and advertises 127.0.0.2, where its proxy listens at the same port.
"""

import asyncio
import contextlib
import os
import random
import secrets
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import httpx2
import psutil

import tandem
from mesh.fork_server.client import ForkedProcess, ForkServer, can_fork
from tests.chaos.proxy import Proxy
from tests.fakes.redis_server import RedisServer
from tests.orphans import disown_orphans

ROOT = Path(__file__).resolve().parents[2]
START_S = 200.0
STOP_S = 90.0
_RESTART_AFTER_S = 0.2
_CHUNK_BYTES = 1 << 16
_LISTEN_HOST = "127.0.0.1"
_PROXY_HOST = "127.0.0.2"
_MODULES = {"router": "router", "prefill": "prefill_worker", "decode": "decode_worker", "gateway": "gateway"}
_WORKERS = ("prefill", "decode")
# Below the ports that outgoing connections take, so that a node finds its own again after a restart.
_PORTS = range(20_000, 32_000)


@dataclass(frozen=True, slots=True)
class Shape:
    """The services of a cluster. `flags` are added by node name, or by role for all of a kind."""

    model: Path
    log_dir: Path
    num_routers: int = 2
    num_prefill: int = 2
    num_decode: int = 3
    num_gateways: int = 0
    cap: int = 16
    flags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    code: Path = ROOT
    """The checkout that all nodes run first."""

    @property
    def names(self) -> list[str]:
        numbers = {"router": self.num_routers, "prefill": self.num_prefill, "decode": self.num_decode}
        numbers["gateway"] = self.num_gateways
        return [f"{role}-{number}" for role, count in numbers.items() for number in range(count)]


@dataclass(frozen=True, slots=True)
class Exit:
    """The end of one run of a node. `wanted` if the harness has brought it about."""

    name: str
    status: int
    wanted: bool
    at_s: float


class Node:
    """One process, started again whenever it ends, until told to stop."""

    def __init__(
        self, name: str, command: list[str], environ: Mapping[str, str], log_path: Path, forks: ForkServer | None
    ) -> None:
        self.name = name
        self.log_path = log_path
        self._forks = forks
        self.exits: list[Exit] = []
        self.code = ROOT
        """The checkout that its next run is of."""
        self._command = command
        self._environ = environ
        self._process: asyncio.subprocess.Process | ForkedProcess | None = None
        self._end_is_wanted = False
        self._is_stopping = False
        self._ended = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """The process id of the current run; None between two runs."""
        return None if self._process is None or self._process.returncode is not None else self._process.pid

    def start(self) -> None:
        """Begin to watch over it."""
        self._task = asyncio.create_task(self._supervise())

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if it runs. Those that end it are counted as wanted."""
        if self.pid is not None:
            self._end_is_wanted |= number in (signal.SIGKILL, signal.SIGTERM)
            os.kill(self.pid, number)

    async def wait_exit(self, num_exits: int, within_s: float = STOP_S) -> Exit:
        """Return once it has ended more often than `num_exits` times."""
        try:
            async with asyncio.timeout(within_s), self._ended:
                await self._ended.wait_for(lambda: len(self.exits) > num_exits)
        except TimeoutError:
            raise TimeoutError(f"{self.log_path.stem} has not ended in {within_s:g} s; so far {self.exits}") from None
        return self.exits[num_exits]

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL; it stays down."""
        self._is_stopping = True
        task = self._task
        if task is None:
            return
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        done, _ = await asyncio.wait([task], timeout=STOP_S)
        if not done:
            self.signal(signal.SIGKILL)
            await task

    async def _supervise(self) -> None:
        while not self._is_stopping:
            self._process = await self._start()
            with self.log_path.open("ab", buffering=0) as log:
                await asyncio.gather(*(_copy(each, log) for each in (self._process.stdout, self._process.stderr)))
                status = await self._process.wait()
            async with self._ended:
                self.exits.append(Exit(self.name, status, self._end_is_wanted, time.monotonic()))
                self._end_is_wanted = False
                self._ended.notify_all()
            if not self._is_stopping:
                await asyncio.sleep(_RESTART_AFTER_S)

    async def _start(self) -> asyncio.subprocess.Process | ForkedProcess:
        """Its standard input is a pipe, for `--follow-stdin`: a harness that is killed leaves nothing behind."""
        if self._forks is not None and self.code == ROOT:
            forked = await self._forks.start(self._command, self._environ, {}, limit=_CHUNK_BYTES)
            if forked is not None:
                return forked
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.PIPE)
        environ = {**self._environ, "PYTHONPATH": f"{self.code}:{self.code}/client"}
        return await asyncio.create_subprocess_exec(
            *self._command, **pipes, env=environ, cwd=self.code, start_new_session=True
        )


async def _copy(stream: asyncio.StreamReader | None, log: BinaryIO) -> None:
    assert stream is not None
    while chunk := await stream.read(_CHUNK_BYTES):
        log.write(chunk)


class Cluster:
    """A mesh that runs. Made by `running`."""

    def __init__(self, shape: Shape, redis: RedisServer) -> None:
        self.shape = shape
        self.redis = redis
        ports = dict(zip(shape.names, free_ports(len(shape.names)), strict=True))
        self.proxies = {name: self._proxy(name, port) for name, port in ports.items()}
        self._environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")},
            "TANDEM_REGISTRY_URL": redis.url,
            "TANDEM_MESH_KEY": secrets.token_hex(32),
            "OMP_NUM_THREADS": "1",
        }
        programs = [(sys.executable, "-m", module) for module in _MODULES.values()]
        self._forks = ForkServer(programs, self._environ, print) if can_fork() else None
        self.nodes = {name: self._node(name, port) for name, port in ports.items()}

    @property
    def routers(self) -> list[str]:
        return self.of_role("router")

    def of_role(self, role: str) -> list[str]:
        """Names of the nodes of one role."""
        return [name for name in self.nodes if name.startswith(f"{role}-")]

    def client(self, router: str, *, direct: bool = False) -> tandem.AsyncClient:
        """A client that never tries again by itself. `direct` goes around the router's proxy."""
        host = _LISTEN_HOST if direct else _PROXY_HOST
        # What the mesh does is measured, not what the client makes good.
        address = f"{host}:{self.proxies[router].port}"
        return tandem.AsyncClient(address, max_retries=0, resume_timeout=0, timeout=60)

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a node, if it runs."""
        self.nodes[name].signal(number)

    def kill(self, name: str) -> None:
        """SIGKILL; the node comes back by itself."""
        self.signal(name, signal.SIGKILL)

    async def restart(self, name: str) -> Exit:
        """SIGTERM; returns when it has ended. It comes back by itself."""
        num_exits = len(self.nodes[name].exits)
        self.signal(name, signal.SIGTERM)
        return await self.nodes[name].wait_exit(num_exits)

    def exits(self, *, wanted: bool | None = None) -> list[Exit]:
        """All ends of processes so far, oldest first."""
        ends = [end for node in self.nodes.values() for end in node.exits if wanted in (None, end.wanted)]
        return sorted(ends, key=lambda end: end.at_s)

    def http(self, gateway: str, timeout_s: float) -> httpx2.AsyncClient:
        """An HTTP client of a gateway, without a proxy between them."""
        address = f"http://{_LISTEN_HOST}:{self.proxies[gateway].port}"
        return httpx2.AsyncClient(base_url=address, timeout=timeout_s)

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the nodes that run now."""
        return {name: node.pid for name, node in self.nodes.items() if node.pid is not None}

    def rss_bytes(self, name: str) -> int:
        """Memory a node holds now; 0 if it does not run."""
        with contextlib.suppress(psutil.Error, KeyError):
            return int(psutil.Process(self.pids[name]).memory_info().rss)
        return 0

    def log(self, name: str) -> str:
        """All a node has written, over all its runs."""
        path = self.nodes[name].log_path
        return path.read_text(errors="replace") if path.exists() else ""

    def connections_of(self, name: str) -> set[int]:
        """Local ports of the node's connections: which of a proxy's connections are its."""
        pid = self.nodes[name].pid
        if pid is None:
            return set()
        with contextlib.suppress(psutil.Error):
            return {
                connection.laddr.port for connection in psutil.Process(pid).net_connections("tcp") if connection.laddr
            }
        return set()

    async def wait_whole(self, within_s: float = START_S) -> None:
        """Return when each router serves and has all workers ready."""
        await asyncio.gather(*(self.wait_ready_at(router, within_s=within_s) for router in self.routers))

    async def wait_ready_at(
        self, router: str, needed: Callable[[set[str]], bool] | None = None, *, within_s: float = START_S
    ) -> None:
        """Return when the workers ready at a router are enough: by default all. AssertionError after `within_s`."""
        wanted = {name for role in _WORKERS for name in self.of_role(role)}
        deadline_s, ready = time.monotonic() + within_s, set[str]()
        async with self.client(router, direct=True) as client:
            while True:
                with contextlib.suppress(tandem.TandemError):
                    workers = await client.workers(timeout=2)
                    ready = {
                        worker.worker_id for worker in workers if worker.state == "ready" and self._is_current(worker)
                    }
                    if needed(ready) if needed else ready >= wanted:
                        return
                if time.monotonic() > deadline_s:
                    raise AssertionError(f"after {within_s:g} s only {sorted(ready)} are ready at {router}")
                await asyncio.sleep(0.1)

    def _is_current(self, worker: tandem.Worker) -> bool:
        """False if a router still speaks of a run that is over."""
        return worker.pid == self.nodes[worker.worker_id].pid

    async def wait_at_rest(self, within_s: float = 60.0) -> None:
        """Return when every worker has all its blocks free and the routers hold no permit. AssertionError if not."""
        for router in self.routers:
            async with self.client(router, direct=True) as client:
                await _at_rest(client, within_s)

    async def start(self) -> None:
        """Start everything at once; returns when all are ready."""
        await self.redis.start()
        for proxy in self.proxies.values():
            await proxy.start()
        for node in self.nodes.values():
            node.start()
        await self.wait_whole()

    async def stop(self) -> None:
        """In the order of requests: gateways, routers, workers."""
        for roles in (("gateway",), ("router",), _WORKERS):
            await asyncio.gather(*(self.nodes[name].stop() for role in roles for name in self.of_role(role)))
        for proxy in self.proxies.values():
            await proxy.stop()
        self.redis.stop()
        if self._forks is not None:
            self._forks.close()
            disown_orphans()

    def _proxy(self, name: str, port: int) -> Proxy:
        return Proxy((_PROXY_HOST, port), (_LISTEN_HOST, port))

    def _node(self, name: str, port: int) -> Node:
        role = name.partition("-")[0]
        flags = self._worker_flags(role, name) if role in _WORKERS else self._front_flags(role)
        added = (*self.shape.flags.get(role, ()), *self.shape.flags.get(name, ()))
        command = [sys.executable, "-m", _MODULES[role], *flags, f"--port={port}", *added]
        node = Node(name, command, self._environ, self.shape.log_dir / f"{name}.log", self._forks)
        node.code = self.shape.code
        return node

    def _front_flags(self, role: str) -> list[str]:
        """A gateway speaks with the first router, without a proxy between them."""
        if role == "gateway":
            router = self.proxies[self.shape.names[0]].port
            return [f"--router={_LISTEN_HOST}:{router}", f"--host={_LISTEN_HOST}", "--follow-stdin"]
        return [
            *self._shared_flags(),
            f"--max-concurrent-requests={self.shape.cap}",
            f"--expect-prefill={self.shape.num_prefill}",
            f"--expect-decode={self.shape.num_decode}",
        ]

    def _worker_flags(self, role: str, name: str) -> list[str]:
        size = "--max-batch-total-tokens=8192" if role == "decode" else "--kv-cache-bytes=8388608"
        advertised = [f"--advertise-host={_PROXY_HOST}"]
        return [*self._shared_flags(), f"--worker-id={name}", "--num-threads=1", "--device=cpu", size, *advertised]

    def _shared_flags(self) -> list[str]:
        return [f"--model={self.shape.model}", "--name=tiny", f"--host={_LISTEN_HOST}", "--follow-stdin"]


@asynccontextmanager
async def running(shape: Shape) -> AsyncIterator[Cluster]:
    """Start a cluster; stop it, whatever happens."""
    cluster = Cluster(shape, RedisServer())
    try:
        await cluster.start()
        yield cluster
    finally:
        await cluster.stop()


def free_ports(count: int) -> list[int]:
    """Ports nobody listens at now."""
    free_ports: set[int] = set()
    while len(free_ports) < count:
        port = random.choice(_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("0.0.0.0", port))
            free_ports.add(port)
    return sorted(free_ports)


async def _at_rest(client: tandem.AsyncClient, within_s: float) -> None:
    deadline_s = time.monotonic() + within_s
    while True:
        mesh = await client.mesh()
        busy = [
            worker
            for worker in mesh.workers
            if worker.state not in ("lost", "stopped", "switching")
            and (worker.load.free_blocks != worker.num_blocks or worker.load.num_running or worker.load.num_waiting)
        ]
        if not busy and not mesh.active_requests and not mesh.queued_requests:
            return
        assert time.monotonic() < deadline_s, (
            f"not at rest within {within_s:g} s: {mesh.active_requests} active, {mesh.queued_requests} queued, {busy}"
        )
        await asyncio.sleep(0.2)
