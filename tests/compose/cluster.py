"""A cluster of docker-compose.yml, and answers of it that are compared."""

import asyncio
import json
import os
import secrets
import subprocess
from collections.abc import AsyncIterator, Callable

import httpx2

import tandem
from tests.compose.engine import READY_S, ROOT, compose_command, docker, free_port

NUM_TOKENS = 1500
PROMPTS = ("The opposite of hot is", "Spell tandem.", "What is 17 + 25?", "Once upon a time", "A B C", "One two three")
GREEDY = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0.0}


class Cluster:
    """A compose project of its own, with ports that are free now. `environ` is that of its commands."""

    def __init__(self) -> None:
        self.routers = [free_port(), free_port()]
        self.http = free_port()
        self.environ = os.environ | {
            "COMPOSE_PROJECT_NAME": f"tandem-test-{secrets.token_hex(4)}",
            "TANDEM_MESH_KEY": secrets.token_hex(32),
            "TANDEM_REDIS_PASSWORD": secrets.token_hex(32),
            "TANDEM_ROUTER_PORT": str(self.routers[0]),
            "TANDEM_SECOND_ROUTER_PORT": str(self.routers[1]),
            "TANDEM_HTTP_PORT": str(self.http),
        }

    @property
    def addresses(self) -> str:
        return ",".join(f"127.0.0.1:{port}" for port in self.routers)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http}"

    def compose(self, *arguments: str) -> str:
        command = (*compose_command(), *arguments)
        done = subprocess.run(command, cwd=ROOT, env=self.environ, check=True, text=True, stdout=subprocess.PIPE)
        return done.stdout

    def begin(self, *arguments: str) -> "subprocess.Popen[bytes]":
        """The same, without waiting for its end."""
        return subprocess.Popen((*compose_command(), *arguments), cwd=ROOT, env=self.environ)

    def containers(self, service: str = "") -> list[str]:
        """Ids of the containers that run."""
        found = self.compose("ps", "-q", *([service] if service else [])).split()
        return docker("ps", "-q", "--no-trunc", *(f"--filter=id={each}" for each in found)).split() if found else []

    def num_healthy(self) -> int:
        """Containers whose health check succeeds."""
        ids = self.containers()
        status = docker("inspect", "--format", "{{.State.Health.Status}}", *ids) if ids else ""
        return status.split().count("healthy")

    async def start(self, *options: str, num_containers: int = 7) -> None:
        """Start what does not run, and wait until everything is healthy."""
        await asyncio.to_thread(self.compose, "up", "-d", *options)
        await self.wait_healthy(num_containers)

    async def wait_healthy(self, num_containers: int = 7) -> None:
        async with asyncio.timeout(READY_S):
            while await asyncio.to_thread(self.num_healthy) != num_containers:  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(1)

    async def num_workers(self, role: str) -> int:
        """Workers of a role that serve."""
        async with tandem.AsyncClient(self.addresses) as client:
            return sum(each.role == role and each.state == "ready" for each in await client.workers())


async def _over_grpc(cluster: Cluster, prompt: str, started: asyncio.Event) -> str:
    """One answer of the SDK, which knows both routers."""
    text = ""
    async with tandem.AsyncClient(cluster.addresses) as client:
        options = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0.0}
        async for event in client.stream(prompt=prompt, timeout=300, **options):
            text += event.token.text
            started.set()
    return text


async def _over_http(cluster: Cluster, prompt: str, started: asyncio.Event) -> str:
    """One answer of the gateway, streamed."""
    text = ""
    async for chunk in _chunks(f"{cluster.url}/v1/completions", GREEDY | {"prompt": prompt}):
        text += chunk["choices"][0]["text"] if chunk["choices"] else ""
        started.set()
    return text


async def _chunks(url: str, body: dict[str, object]) -> AsyncIterator[dict[str, list[dict[str, str]]]]:
    async with (
        httpx2.AsyncClient(timeout=300, trust_env=False) as http,
        http.stream("POST", url, json=body | {"stream": True, "model": "tandem-small"}) as response,
    ):
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


async def answers(cluster: Cluster, fault: Callable[[], object] | None = None) -> list[str]:
    """All prompts at once, over gRPC, then over HTTP. `fault` is called when each of them has a first token."""
    calls = [(ask, prompt, asyncio.Event()) for ask in (_over_grpc, _over_http) for prompt in PROMPTS]
    tasks = [asyncio.create_task(ask(cluster, prompt, started)) for ask, prompt, started in calls]
    for (_, _, started), task in zip(calls, tasks, strict=True):
        first = asyncio.create_task(started.wait())
        await asyncio.wait([first, task], return_when=asyncio.FIRST_COMPLETED)
        first.cancel()
    if fault is not None:
        await asyncio.to_thread(fault)
        assert not all(task.done() for task in tasks), "all answers were complete before the fault"
    return await asyncio.gather(*tasks)
