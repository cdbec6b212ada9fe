"""A Redis Cluster that speaks TLS alone: routers and workers ask its servers for the slot over TLS, and go there."""

import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.crc import key_slot
from structlog.testing import capture_logs

from mesh.redis_connection import TAG, WORKERS, name_in, open_redis
from tests.fakes.certificates import Authority, Issued
from tests.fakes.redis_server import free_port, wait_answering
from tests.service.mesh.test_redis_hostile import following, sharing
from tests.service.mesh.test_redis_registry import Worker
from tests.waiting import until, until_told

# The system's: the bundled one, which an active environment has in its path, is built without TLS.
_REDIS = shutil.which("redis-server", path=f"/usr/local/bin{os.pathsep}{os.defpath}") or ""
_NUM_SLOTS = 16384
_MESH_SLOT = key_slot(TAG.encode())

pytestmark = pytest.mark.skipif(not _REDIS, reason="needs the system's redis-server, which speaks TLS")


class SecureCluster:
    """Two servers that listen with TLS only. `url` names the first; the second has the slot of the mesh."""

    def __init__(self, folder: Path) -> None:
        self._authority = Authority(folder / "ca")
        self._folder = folder
        self._ports = [free_port(), free_port()]
        self._buses = [free_port(), free_port()]
        self._processes: list[subprocess.Popen[bytes]] = []
        self.url_without_ca = f"rediss+cluster://127.0.0.1:{self._ports[0]}"
        self.url = f"{self.url_without_ca}?ssl_ca_certs={self._authority.cert}"

    async def start(self) -> None:
        files = self._authority.issue("redis")
        for number in range(2):
            self._processes.append(self._server(number, files))
        for number in range(2):
            slots = [slot for slot in range(_NUM_SLOTS) if (slot == _MESH_SLOT) == (number == 1)]
            async with self.client(number) as redis:
                await wait_answering(redis)
                await redis.execute_command("CLUSTER", "ADDSLOTS", *slots)
        async with self.client(0) as redis:
            await redis.execute_command("CLUSTER", "MEET", "127.0.0.1", self._ports[1], self._buses[1])
        for number in range(2):
            async with self.client(number) as redis:
                await until_told(lambda redis=redis: redis.execute_command("CLUSTER", "INFO"), _is_whole)

    def _server(self, number: int, files: Issued) -> subprocess.Popen[bytes]:
        folder = self._folder / f"redis-{number}"
        folder.mkdir()
        options = {
            "port": 0,
            "tls-port": self._ports[number],
            "cluster-port": self._buses[number],
            "bind": "127.0.0.1",
            "tls-cert-file": files.cert,
            "tls-key-file": files.key,
            "tls-ca-cert-file": self._authority.cert,
            "tls-auth-clients": "no",
            "tls-cluster": "yes",
            "cluster-enabled": "yes",
            "dir": folder,
        }
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        return subprocess.Popen([_REDIS, *words, "--save", ""], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def client(self, number: int) -> Redis:
        """A client of one server."""
        return open_redis(f"rediss://127.0.0.1:{self._ports[number]}/0?ssl_ca_certs={self._authority.cert}")

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def _is_whole(told: object) -> bool:
    text = told.decode() if isinstance(told, bytes) else str(told)
    return "cluster_state:ok" in text and "cluster_known_nodes:2" in text


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[SecureCluster]:
    cluster = SecureCluster(tmp_path)
    try:
        await cluster.start()
        yield cluster
    finally:
        cluster.stop()


async def test_a_cluster_over_tls(cluster: SecureCluster) -> None:
    worker = Worker(cluster.url, "decode-0")
    await worker.start()
    async with following(cluster.url) as router, sharing(cluster.url, "router-0") as permits:
        await router.until(lambda view: view.load.num_running == 3 and view.cached, "decode-0", within_s=40)
        await until(permits.connected.is_set)
        await permits.acquire(1)
        async with open_redis(cluster.url) as redis, cluster.client(1) as owner:
            key = name_in(redis, WORKERS)
            assert await redis.zrange(key, 0, -1) == await owner.zrange(key, 0, -1) == [b"decode-0"]
    await worker.kill()


async def test_a_cluster_with_an_unknown_certificate_is_not_used(cluster: SecureCluster) -> None:
    with capture_logs() as logs:
        async with following(cluster.url_without_ca) as router:
            await until(lambda: "certificate verify failed" in str(logs).lower())
            assert not router.registry.connected.is_set()
