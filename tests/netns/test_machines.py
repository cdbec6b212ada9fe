"""A worker whose ranks are on two "machines": this process's network namespace, and another that a cable joins to it.

`make netns` runs it: it needs a network namespace of its own, which takes no privilege on most systems.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import psutil
import pytest

import tandem
from tests.component.checkpoints import build_checkpoint
from tests.e2e.in_middle import stream_and_hit
from tests.e2e.mesh_process import RESTART_S, MeshProcess, mesh, pools_are_whole
from tests.e2e.test_ranks import ask, requests
from tests.netns.machines import Machine, machines
from tests.waiting import until

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif("TANDEM_NETNS" not in os.environ, reason="needs a network namespace of its own: make netns"),
]

LEADER = "10.99.0.1"
KEY = "a key of these tests"
CABLE = "rank-leader"
NUM_TOKENS = 250


@pytest.fixture
def other() -> Iterator[Machine]:
    """The second machine, on a cable to this one."""
    with machines("leader", "rank") as lan:
        yield lan.machines["rank"]


@contextmanager
def rank_loop(model: Path, log: Path, other: Machine) -> Iterator["subprocess.Popen[bytes]"]:
    """A shell on the other machine that starts rank 1 again until it ends because the worker has stopped."""
    rank = f"{sys.executable} -m rank_worker --leader {LEADER}:50060 --rank 1 --model {model} --trust-fabric"
    command = [*other.prefix, "sh", "-c", f"until {rank}; do sleep 1; done"]
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT) as loop:
        try:
            yield loop
        finally:
            for process in (*other.processes(), loop):
                process.kill()


@asynccontextmanager
async def ranks_of_two_machines(model: Path, log_dir: Path, other: Machine) -> AsyncIterator[MeshProcess]:
    """A mesh whose decode worker has rank 0 here and rank 1 on the other machine."""
    settings = {
        "decode.tensor_parallel": 2,
        "decode.rank_listen": f"{LEADER}:50060",
        "decode.trust_fabric": "true",
        "router.no_worker_timeout_s": RESTART_S,
    }
    sets = [flag for name, value in settings.items() for flag in ("--set", f"{name}={value}")]
    with rank_loop(model, log_dir.parent / "rank.log", other) as loop:
        async with mesh(model, log_dir, *sets) as running:
            yield running
        await asyncio.to_thread(loop.wait, RESTART_S)


def rank_of(other: Machine) -> psutil.Process:
    """The process of rank 1."""
    (rank,) = (each for each in other.processes() if each.cmdline()[1:3] == ["-m", "rank_worker"])
    return rank


def check_tokens(hit: Sequence[Sequence[tandem.TokenEvent]], expected: Sequence[tuple[tandem.Token, ...]]) -> None:
    """No token is wrong, missing or doubled. Log-probs of an eager decoder depend a little on the batch."""
    for events, tokens in zip(hit, expected, strict=True):
        assert [event.token.id for event in events] == [token.id for token in tokens]
        assert [event.token.logprob for event in events] == pytest.approx([t.logprob for t in tokens], abs=1e-3)
        assert events[-1].finish_reason == "length"


async def wait_back(client: tandem.AsyncClient, pid: int) -> None:
    """Return once another process than `pid` leads the decode worker."""
    async with asyncio.timeout(RESTART_S):
        while not any(w.role == "decode" and w.serving and w.pid != pid for w in await client.workers()):  # noqa: ASYNC110
            await asyncio.sleep(0.2)
    await pools_are_whole(client)


@pytest.mark.timeout(900)
async def test_streams_survive_the_loss_of_a_machine(
    tmp_path: Path, other: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_MESH_KEY", KEY)
    model = build_checkpoint("llama-tied", tmp_path / "model")
    async with mesh(model, tmp_path / "alone") as running, tandem.AsyncClient(running.address) as client:
        expected = await ask(client, requests(NUM_TOKENS))
    async with (
        ranks_of_two_machines(model, tmp_path / "logs", other) as running,
        tandem.AsyncClient(running.address) as client,
    ):
        (leader,) = [worker for worker in await client.workers() if worker.role == "decode"]
        assert leader.tensor_parallel == 2

        async def survive(hit: Callable[[int], None]) -> None:
            (pid,) = running.pids("decode_worker")
            rank = rank_of(other)
            streams, _ = await stream_and_hit(client, requests(NUM_TOKENS), lambda: hit(pid))
            check_tokens(streams, expected)
            await wait_back(client, pid)
            assert not psutil.pid_exists(pid)
            assert not rank.is_running()

        def cut_cable(pid: int) -> None:
            other.run("ip", "link", "set", CABLE, "down")
            tasks.append(asyncio.create_task(mend_cable(pid)))

        async def mend_cable(pid: int) -> None:
            await until(lambda: not psutil.pid_exists(pid))
            other.run("ip", "link", "set", CABLE, "up")

        tasks: list[asyncio.Task[None]] = []
        await survive(lambda _: rank_of(other).kill())
        await survive(lambda pid: os.kill(pid, signal.SIGKILL))
        await survive(cut_cable)
        await asyncio.gather(*tasks)
    assert other.processes() == []
