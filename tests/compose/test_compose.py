"""The cluster of docker-compose.yml, as it is: its parts are killed, added and taken away in the middle of answers
(make compose-test).

It needs a Docker engine and its compose command. What cannot be pulled is named by TANDEM_BASE_IMAGE,
TANDEM_TORCH_INDEX and TANDEM_REDIS_IMAGE, as for `docker compose up`.
"""

import asyncio
import json
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx2
import pytest

import tandem
from router.tenants import digest_of, new_key
from tests.compose.cluster import PROMPTS, Cluster, answers
from tests.compose.engine import docker
from tests.waiting import until, until_told

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

FIGURES_OF_ALL = """
import socket, urllib.request
for role in ("prefill", "decode"):
    addresses = sorted({each[4][0] for each in socket.getaddrinfo(role, 9464, socket.AF_INET)})
    pages = [urllib.request.urlopen(f"http://{address}:9464/metrics").read() for address in addresses]
    print(role, len(pages), all(b"tandem_engine_" in page for page in pages))
"""
"""What Prometheus does: find all addresses of a service by its name, and read the figures of each."""


@pytest.fixture(scope="module")
def cluster(image: str) -> Iterator[Cluster]:
    cluster = Cluster()
    try:
        yield cluster
        print(cluster.compose("ps"))  # noqa: T201 - for the case that a test has failed
    finally:
        cluster.compose("down", "-v", "--timeout", "5")


@pytest.fixture(scope="module")
def expected(cluster: Cluster) -> list[str]:
    """The answers of the whole cluster."""

    async def ask() -> list[str]:
        begun_s = time.monotonic()
        await cluster.start()
        print(f"healthy after {time.monotonic() - begun_s:.0f} s")  # noqa: T201
        return await answers(cluster)

    texts = asyncio.run(ask())
    assert texts[: len(PROMPTS)] == texts[len(PROMPTS) :], "gRPC and HTTP differ"
    assert len(set(texts)) == len(PROMPTS)
    return texts


@pytest.mark.parametrize("victim", ["router-0", "router-1", "decode", "prefill", "redis"])
async def test_answers_go_on_when_a_part_is_killed(cluster: Cluster, expected: list[str], victim: str) -> None:
    assert await answers(cluster, partial(docker, "kill", cluster.containers(victim)[0])) == expected
    await cluster.start()


async def test_a_worker_that_crashes_is_started_again(cluster: Cluster, expected: list[str]) -> None:
    """All its processes die but the container's init: the engine starts it again, and it serves."""
    worker = cluster.containers("decode")[0]
    assert await answers(cluster, partial(docker, "exec", worker, "sh", "-c", "kill -9 -1")) == expected
    await until(lambda: docker("inspect", "--format={{.RestartCount}}", worker).strip() == "1", 60)
    await cluster.wait_healthy()
    assert await answers(cluster) == expected


async def test_decode_workers_come_and_go(cluster: Cluster, expected: list[str]) -> None:
    await cluster.start("--no-recreate", "--scale", "decode=4", num_containers=9)
    await until_told(partial(cluster.num_workers, "decode"), lambda count: count == 4, 120)
    lines = cluster.compose("exec", "-T", "router-0", "python", "-c", FIGURES_OF_ALL).splitlines()
    assert lines == ["prefill 1 True", "decode 4 True"]
    leaving: list[subprocess.Popen[bytes]] = []
    assert await answers(cluster, lambda: leaving.append(cluster.begin("up", "-d", "--no-recreate"))) == expected
    assert await asyncio.to_thread(leaving[0].wait) == 0
    await cluster.wait_healthy()
    await until_told(partial(cluster.num_workers, "decode"), lambda count: count == 2, 120)


async def test_containers_are_as_confined_as_the_file_says(cluster: Cluster, expected: list[str]) -> None:
    for container in cluster.containers():
        (state,) = json.loads(docker("inspect", container))
        assert state["HostConfig"]["ReadonlyRootfs"], state["Name"]
        assert state["HostConfig"]["Memory"] > 0
        (name, *_), status = state["Name"].split("/")[-1:], docker("exec", container, "cat", "/proc/1/status")
        fields = dict(line.split(":", 1) for line in status.splitlines())
        assert int(fields["CapEff"], 16) == int(fields["CapBnd"], 16) == 0, name
        assert fields["NoNewPrivs"].strip() == "1"
        assert fields["Uid"].split()[0] != "0"
        assert not any(log.startswith("Traceback") for log in docker("logs", container).splitlines()), name


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, str]:
    """A folder with a file of keys, and the key in it."""
    key = new_key()
    (tmp_path / "keys.toml").write_text(f'{digest_of(key)} = {{ tenant = "alice" }}\n')
    tmp_path.chmod(0o755)
    return tmp_path, key


async def test_with_keys_nobody_is_served_without_one(
    cluster: Cluster, expected: list[str], keys: tuple[Path, str]
) -> None:
    folder, key = keys
    cluster.environ["COMPOSE_FILE"] = "docker-compose.yml:deploy/compose/keys.yml"
    cluster.environ["TANDEM_KEYS_DIR"] = str(folder)
    await cluster.start()
    async with tandem.AsyncClient(cluster.addresses, api_key=key) as client:
        assert len((await client.generate(prompt="Spell", max_new_tokens=4, ignore_eos=True)).tokens) == 4
    async with tandem.AsyncClient(cluster.addresses) as client:
        with pytest.raises(tandem.Unauthenticated):
            await client.generate(prompt="Spell tandem.", max_new_tokens=4)
    body = {"model": "tandem-small", "prompt": "Spell tandem.", "max_tokens": 4}
    async with httpx2.AsyncClient(base_url=cluster.url, trust_env=False) as http:
        assert (await http.post("/v1/completions", json=body)).status_code == 401
        answer = await http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == 200
