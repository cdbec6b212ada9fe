"""The probes of deploy/kubernetes, asked of real processes that have the settings of their pods."""

import asyncio
import json
import os
import random
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import httpx2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from router.tenants import digest_of, new_key
from tests.fakes.redis_server import running_redis
from tests.manifests import ROOT, Pod, pods, rendered
from tests.waiting import LIMIT_S

MODEL = ROOT / "demo_model" / "tandem-small"


def free_port() -> int:
    """A port that nobody has. It is below those that the system chooses for sockets of other processes meanwhile."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_768)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class RunningPod:
    """A pod's command on this machine. Its ports are free ones in place of the pod's."""

    def __init__(self, pod: Pod) -> None:
        self.pod = pod
        self.ports = {port["containerPort"]: free_port() for port in pod.container["ports"]}
        self._names = {port["name"]: port["containerPort"] for port in pod.container["ports"]}

    @asynccontextmanager
    async def running(self, **changed: str) -> AsyncIterator[None]:
        environment = self.pod.environment(rendered("files")) | {"TANDEM_HOST": "127.0.0.1"} | changed
        for name in ("TANDEM_PORT", "TANDEM_METRICS_PORT"):
            if name in environment:
                environment[name] = str(self.ports[int(environment[name])])
        environment |= {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
        command = [sys.executable, *self.pod.container["command"][1:]]
        process = await asyncio.create_subprocess_exec(
            *command, cwd=ROOT, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(LIMIT_S):
                while json.loads(await process.stdout.readline())["event"] != "listening":
                    pass
            yield
        finally:
            process.terminate()
            assert await process.wait() == 0

    async def passes(self, name: str) -> bool:
        """What the kubelet would say of this probe."""
        probe: dict[str, Any] = self.pod.container[name]
        if "httpGet" in probe:
            port = self._names[probe["httpGet"]["port"]]
            # The kubelet calls a pod by its address.
            headers = {"host": f"10.0.0.1:{port}"}
            async with httpx2.AsyncClient(timeout=LIMIT_S, trust_env=False) as http:
                url = f"http://127.0.0.1:{self.ports[port]}{probe['httpGet']['path']}"
                return bool((await http.get(url, headers=headers)).is_success)
        address = f"127.0.0.1:{self.ports[probe['grpc']['port']]}"
        async with grpc.aio.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
            call = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=LIMIT_S)
            return bool((await call).status == health_pb2.HealthCheckResponse.SERVING)


async def test_a_mesh_without_workers_lives_and_is_not_ready(tmp_path: Path) -> None:
    router, gateway = (
        RunningPod(pod) for module in ("router", "gateway") for pod in pods(rendered("files")) if pod.module == module
    )
    keys = tmp_path / "keys.toml"
    keys.write_text(f'{digest_of(new_key())} = {{ tenant = "default" }}\n')
    async with running_redis() as redis:
        settings = {"TANDEM_REGISTRY_URL": redis.url, "TANDEM_API_KEYS_FILE": str(keys), "TANDEM_MODEL": str(MODEL)}
        address = f"127.0.0.1:{router.ports[50051]}"
        async with router.running(**settings), gateway.running(TANDEM_ROUTER=address):
            for pod in (router, gateway):
                assert await pod.passes("startupProbe")
                assert await pod.passes("livenessProbe")
                assert not await pod.passes("readinessProbe")
