"""The cluster of docker-compose.yml, as it is: any of its parts is killed in the middle of answers (make compose-test).

It needs a Docker engine and docker-compose. Images that cannot be pulled are named by TANDEM_BASE_IMAGE and
TANDEM_REDIS_IMAGE, as for `docker-compose up`.
"""

import asyncio
import json
import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx2
import pytest

import tandem

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

ROOT = Path(__file__).resolve().parents[2]
READY_S = 300.0
NUM_TOKENS = 600
PROMPTS = ("The opposite of hot is", "Spell tandem.", "What is 17 + 25?", "Once upon a time", "A B C", "One two three")
GREEDY = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0.0}


class Cluster:
    """A compose project of its own, with ports that are free now."""

    def __init__(self) -> None:
        self.routers = [free_port(), free_port()]
        self.http = free_port()
        self._environment = os.environ | {
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

    def compose(self, *arguments: str) -> str:
        command = ("docker-compose", *arguments)
        return subprocess.run(command, cwd=ROOT, env=self._environment, check=True, text=True, stdout=-1).stdout

    def num_healthy(self) -> int:
        """Containers whose health check succeeds."""
        ids = self.compose("ps", "-q").split()
        command = ("docker", "inspect", "--format", "{{.State.Health.Status}}", *ids)
        return subprocess.run(command, check=True, text=True, stdout=-1).stdout.split().count("healthy")

    async def wait_whole(self) -> None:
        """Start what does not run, and wait until everything is healthy."""
        await asyncio.to_thread(self.compose, "up", "-d")
        num_services = len(self.compose("config", "--services").split()) - 2  # dashboards have a profile of their own
        async with asyncio.timeout(READY_S):
            while await asyncio.to_thread(self.num_healthy) < num_services:  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    if shutil.which("docker-compose") is None or subprocess.run(("docker", "info"), capture_output=True).returncode:
        pytest.skip("needs a Docker engine and docker-compose")
    cluster = Cluster()
    try:
        cluster.compose("build", "-q", "gateway")  # all of ours have the same image
        yield cluster
        print(cluster.compose("ps"))  # noqa: T201 - for the case that a test has failed
    finally:
        cluster.compose("down", "-v", "--timeout", "5")


async def over_grpc(cluster: Cluster, prompt: str, started: asyncio.Event) -> str:
    """One answer of the SDK, which knows both routers."""
    text = ""
    async with tandem.AsyncClient(cluster.addresses) as client:
        options = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0.0}
        async for event in client.stream(prompt=prompt, timeout=300, **options):
            text += event.token.text
            started.set()
    return text


async def over_http(cluster: Cluster, prompt: str, started: asyncio.Event) -> str:
    """One answer of the gateway, streamed."""
    text = ""
    async for chunk in chunks(f"http://127.0.0.1:{cluster.http}/v1/completions", GREEDY | {"prompt": prompt}):
        text += chunk["choices"][0]["text"] if chunk["choices"] else ""
        started.set()
    return text


async def chunks(url: str, body: dict[str, object]) -> AsyncIterator[dict[str, list[dict[str, str]]]]:
    async with (
        httpx2.AsyncClient(timeout=300, trust_env=False) as http,
        http.stream("POST", url, json=body | {"stream": True, "model": "tandem-small"}) as response,
    ):
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


async def answers(cluster: Cluster, victim: str = "") -> list[str]:
    """All prompts at once, over gRPC and HTTP; `victim` is killed when each of them has a first token."""
    calls = [(ask, prompt, asyncio.Event()) for ask in (over_grpc, over_http) for prompt in PROMPTS]
    tasks = [asyncio.create_task(ask(cluster, prompt, started)) for ask, prompt, started in calls]
    for (_, _, started), task in zip(calls, tasks, strict=True):
        first = asyncio.create_task(started.wait())
        await asyncio.wait([first, task], return_when=asyncio.FIRST_COMPLETED)
        first.cancel()
    if victim:
        await asyncio.to_thread(cluster.compose, "kill", victim)
        assert not all(task.done() for task in tasks), "all answers were complete before the kill"
    return await asyncio.gather(*tasks)


async def test_answers_go_on_when_a_part_is_killed(cluster: Cluster) -> None:
    await cluster.wait_whole()
    expected = await answers(cluster)
    assert expected[: len(PROMPTS)] == expected[len(PROMPTS) :], "gRPC and HTTP differ"
    assert len(set(expected)) == len(PROMPTS)
    for victim in ("router-0", "router-1", "decode-0", "prefill-0", "redis"):
        print(f"kill {victim}")  # noqa: T201
        assert await answers(cluster, victim) == expected, victim
        await cluster.wait_whole()
