"""A Redis Cluster of three masters, one of which, that of the mesh's slot, has a replica."""

from pathlib import Path

from redis.asyncio import Redis
from redis.crc import key_slot

from mesh.redis_cluster import TAG
from mesh.redis_connection import open_redis
from tests.fakes.redis_server import RedisServer, free_port
from tests.waiting import until_told

_NUM_SLOTS = 16384


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
