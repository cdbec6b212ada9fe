"""`tandem up --on ray`, on a Ray cluster of several nodes: nodes die in the middle of streams, and nothing is left.

`make chaos` runs it.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

import tandem
from tests.e2e import mesh_process
from tests.e2e.in_middle import stream_and_hit
from tests.e2e.mesh_process import RESTART_S, mesh, pools_are_whole, wait_serving
from tests.e2e.ray_nodes import START_S, RayNodes, ray_nodes
from tests.e2e.test_failures import check_same, requests, undisturbed
from tests.waiting import until_told

pytest.importorskip("ray", reason="needs the extra ray")

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3 * START_S)]

KEY = "a mesh key of these tests"
API_KEY = "an API key of these tests"
WORKERS = ("--on", "ray", "--prefill", "1", "--decode", "2", "--threads-per-worker", "1")
NOTHING = {"groups": 0, "actors": 0}
GONE_S = 300.0

mesh_on_ray = partial(mesh, start_s=START_S)
started_on_ray = partial(mesh_process.started, start_s=START_S)


@pytest.fixture
def cluster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayNodes]:
    """A head without cores, and two nodes, or as many as the parameter says, with two cores each."""
    with ray_nodes(*[2] * getattr(request, "param", 2)) as nodes:
        for name, value in nodes.environ.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("TANDEM_MESH_KEY", KEY)
        monkeypatch.setenv("TANDEM_API_KEY", API_KEY)
        yield nodes


def services() -> list[psutil.Process]:
    """All processes on this machine that run workers for Ray."""
    found = []
    for process in psutil.process_iter():
        try:
            if "tandem_cli.on_ray.bound_to_actor" in process.cmdline():
                found.append(process)
        except psutil.Error:
            continue
    return found


async def wait_gone(cluster: RayNodes) -> None:
    """Return once nothing is left of the mesh: neither actors, nor placement groups, nor processes."""

    async def left() -> tuple[object, list[int]]:
        await asyncio.sleep(0.2)
        return await cluster.ask_soon("state"), [process.pid for process in services()]

    await until_told(left, lambda told: told == (NOTHING, []), GONE_S)


async def wait_back(client: tandem.AsyncClient) -> None:
    await wait_serving(client, "decode", at_least=2)
    await wait_serving(client, "prefill")
    await pools_are_whole(client)


async def test_streams_survive_the_loss_of_a_node(
    cluster: RayNodes, checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = checkpoint("llama-tied")
    async with mesh(model, tmp_path / "here") as running, tandem.AsyncClient(running.address) as client:
        expected = await undisturbed(client)
    async with (
        mesh_on_ray(model, tmp_path / "logs", *WORKERS, "--no-worker-timeout-s", str(RESTART_S)) as running,
        tandem.AsyncClient(running.address) as client,
    ):
        nodes = await cluster.ask_soon("nodes")
        assert set(nodes) == {"prefill-0", "decode-0", "decode-1"}
        for worker in services():
            text = " ".join([*worker.cmdline(), *worker.environ().values()])
            assert KEY not in text
            assert API_KEY not in text
        losing = asyncio.create_task(cluster.ask_soon("lose", nodes["decode-1"]))
        await asyncio.gather(*(streamed_until(losing, client, expected) for _ in range(2)))
        added = await cluster.ask_soon("add", 2)
        await wait_back(client)
        nodes = await cluster.ask_soon("nodes")
        assert added in nodes.values()
        again = await undisturbed(client)
        assert [result.text for result in again] == [result.text for result in expected]
        log = (tmp_path / "logs" / "decode-1.log").read_text()
        assert log.count('"event": "engine ready"') == 2
        router_log = (tmp_path / "logs" / "router.log").read_text()
        assert '"event": "replay"' in router_log
        for text in (log, router_log):
            assert KEY not in text
    await wait_gone(cluster)


async def streamed_until(
    losing: "asyncio.Task[object]", client: tandem.AsyncClient, expected: Sequence[tandem.Result]
) -> None:
    """Stream all requests, exactly, again and again until the node is lost: that takes longer than an answer."""

    async def stream(request: Mapping[str, Any]) -> list[tandem.TokenEvent]:
        return [event async for event in client.stream(**request)]

    is_over = False
    while not is_over:
        is_over = losing.done()
        for events, result in zip(await asyncio.gather(*map(stream, requests())), expected, strict=True):
            check_same(events, result)


@pytest.mark.parametrize("cluster", [3], indirect=True)
async def test_decode_workers_are_added_under_load_and_one_node_is_lost(
    cluster: RayNodes, checkpoint, tmp_path: Path
) -> None:
    """Two decode workers whose slots are full become four, as the router advises. All answers stay exact, also those
    that a lost node's workers were giving."""
    flags = ("--on", "ray", "--prefill", "2", "--decode", "2", "--max-decode", "4", "--threads-per-worker", "1")
    few = ("--max-rolling-batch-size", "2", "--no-worker-timeout-s", str(RESTART_S))
    async with (
        mesh_on_ray(checkpoint("llama-tied"), tmp_path / "logs", *flags, *few) as running,
        tandem.AsyncClient(running.address) as client,
    ):
        expected = [await client.generate(**request) for request in requests()]
        enough = asyncio.Event()

        async def load(number: int) -> int:
            count = 0
            while not enough.is_set():
                result = await client.generate(**requests()[number])
                assert result.text == expected[number].text
                count += 1
            return count

        # Three times as many as there are slots: on a quick machine fewer would never wait.
        loads = [asyncio.create_task(load(number % len(expected))) for number in range(3 * len(expected))]
        await wait_serving(client, "decode", at_least=4)
        nodes = await cluster.ask_soon("nodes")
        assert {"decode-2", "decode-3"} <= set(nodes)
        losing = asyncio.create_task(cluster.ask_soon("lose", nodes["decode-3"]))
        await asyncio.gather(*(streamed_until(losing, client, expected) for _ in range(2)))
        enough.set()
        assert min(await asyncio.gather(*loads)) > 0
    await wait_gone(cluster)


async def test_a_worker_that_ends_is_started_again(cluster: RayNodes, tmp_path: Path) -> None:
    async with (
        mesh_on_ray("tandem-small", tmp_path / "logs", *WORKERS) as running,
        tandem.AsyncClient(running.address) as client,
    ):
        pid = next(worker.pid for worker in await client.workers() if worker.worker_id == "decode-0")
        expected = await client.generate(prompt="Hello", max_new_tokens=200, ignore_eos=True)
        request = {"prompt": "Hello", "max_new_tokens": 200, "ignore_eos": True}
        hit, _ = await stream_and_hit(client, [request] * 4, lambda: os.kill(pid, signal.SIGKILL))
        assert ["".join(event.text for event in events) for events in hit] == [expected.text] * 4
        await wait_back(client)
        assert pid not in [worker.pid for worker in await client.workers()]
    await wait_gone(cluster)


async def test_a_killed_command_leaves_nothing(cluster: RayNodes, tmp_path: Path) -> None:
    async with started_on_ray("tandem-small", tmp_path / "logs", *WORKERS) as running:
        assert len(services()) == 3
        running.process.kill()
        await running.process.wait()
        await wait_gone(cluster)


async def test_a_worker_of_two_ranks_is_on_one_node(cluster: RayNodes, checkpoint, tmp_path: Path) -> None:
    flags = ("--on", "ray", "--prefill", "1", "--decode", "1", "--set", "decode.tensor_parallel=2")
    async with (
        mesh_on_ray(checkpoint("llama-tied"), tmp_path / "logs", *flags) as running,
        tandem.AsyncClient(running.address) as client,
    ):
        [worker] = [worker for worker in await client.workers() if worker.role == "decode"]
        assert worker.tensor_parallel == 2
        nodes = await cluster.ask_soon("nodes")
        assert nodes["decode-0"] != nodes["prefill-0"], "two ranks take both cores of a node"
        [process] = [each for each in services() if each.pid == worker.pid]
        assert any("rank" in " ".join(child.cmdline()) for child in process.children())
    await wait_gone(cluster)


def refused(*flags: str) -> str:
    """The line with which `tandem up` refuses to start."""
    command = [sys.executable, "-m", "tandem_cli", "up", "--port", "0", "--no-http", *flags]
    result = subprocess.run(command, capture_output=True, text=True, timeout=START_S)
    assert result.returncode == 2, result.stderr
    return result.stderr.splitlines()[-1]


def test_what_cannot_be_placed_is_refused(cluster: RayNodes) -> None:
    too_small = refused("--on", "ray", "--decode", "8")
    assert "the Ray cluster is too small: 9 workers need 9 CPU" in too_small
    assert "2 nodes have 4 CPU" in too_small
    no_node = refused("--on", "ray", "--pipeline-parallel", "4")
    assert "needs 4 CPU" in no_node
    assert "choose a smaller degree" in no_node
    assert cluster.ask("state") == NOTHING


def test_a_cluster_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert "no Ray cluster answers at 127.0.0.1:1" in refused("--on", "ray")


def test_a_machine_without_ray_is_told_which_extra_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['ray'] = None\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    assert "--on ray needs ray: install tandem-serve[ray]" in refused("--on", "ray")
