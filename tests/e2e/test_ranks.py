"""Meshes whose workers have ranks and stages answer as a mesh without, to the bit, also when ranks are killed."""

import asyncio
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

import tandem
from mesh.domain.kv import Degrees
from tests.e2e.in_middle import mixed_requests, stream_and_hit
from tests.e2e.mesh_process import RESTART_S, MeshProcess, mesh, pools_are_whole, wait_serving
from tests.e2e.reference import Reference
from tests.evidence import Evidence
from tests.waiting import until

NUM_STREAMS = 6
NUM_TOKENS = 420  # enough that no stream ends before all have begun
NUM_KILLS = int(os.environ.get("TANDEM_RANK_KILLS", "12"))
PAUSES_S = {"slowed": (0.05,) * 40, "stopped": (2.0,)}
"""For so long the rank is stopped, again and again, with a pause as long between."""

Request = dict[str, Any]
Ranked = tuple[MeshProcess, tandem.AsyncClient]
ONE, TWO, STAGES = Degrees(), Degrees(2), Degrees(1, 2)


def requests(num_tokens: int = NUM_TOKENS) -> list[Request]:
    return mixed_requests(NUM_STREAMS, num_tokens)


def long_prompts() -> list[Request]:
    return [
        {"token_ids": [(11 * i + j) % 256 for j in range(330)], "max_new_tokens": 8, "ignore_eos": True}
        for i in range(12)
    ]


async def ask(client: tandem.AsyncClient, requests: Sequence[Request]) -> list[tuple[tandem.Token, ...]]:
    """The tokens of each answer, with log-probs and alternatives."""
    return [result.tokens for result in await asyncio.gather(*(client.generate(**request) for request in requests))]


@asynccontextmanager
async def ranked_mesh(
    model: Path, log_dir: Path, prefill: Degrees, decode: Degrees, *flags: str
) -> AsyncIterator[Ranked]:
    """A mesh of one prefill and one decode worker of these degrees. Requests wait while the only worker restarts."""
    settings = {
        "prefill.tensor_parallel": prefill.tensor,
        "prefill.pipeline_parallel": prefill.pipeline,
        "decode.tensor_parallel": decode.tensor,
        "decode.pipeline_parallel": decode.pipeline,
        "prefill.max_batch_prefill_tokens": 64,
        "router.no_worker_timeout_s": RESTART_S,
    }
    sets = [flag for name, value in settings.items() for flag in ("--set", f"{name}={value}")]
    async with mesh(model, log_dir, *sets, *flags) as running, tandem.AsyncClient(running.address) as client:
        yield running, client


def ranks_of(running: MeshProcess, role: str) -> list[int]:
    """Process ids of the ranks 1 and up of the role's worker; empty while it restarts."""
    workers = [psutil.Process(pid) for pid in running.pids(f"{role}_worker")]
    ranks = running.pids("rank_worker")
    return [child.pid for worker in workers for child in worker.children() if child.pid in ranks]


def hit_rank(running: MeshProcess, role: str, number: signal.Signals = signal.SIGKILL) -> int:
    """Send a signal to a rank of the role's worker. Returns the process id of the worker."""
    pid = ranks_of(running, role)[0]
    parent = psutil.Process(pid).ppid()
    os.kill(pid, number)
    return parent


async def wait_back(running: MeshProcess, client: tandem.AsyncClient, role: str, pid: int) -> None:
    """Return once another process than `pid` serves in the role, and nothing of `pid` is left."""
    await wait_serving(client, role, pid)
    assert not psutil.pid_exists(pid)
    assert len(running.pids("rank_worker")) == 2
    await pools_are_whole(client)


def check_exact(hit: Sequence[Sequence[tandem.TokenEvent]], expected: Sequence[tuple[tandem.Token, ...]]) -> None:
    """No token is wrong, missing or doubled, and every log-prob is the same, to the bit."""
    for events, tokens in zip(hit, expected, strict=True):
        assert [event.token for event in events] == list(tokens)
        assert events[-1].finish_reason == "length"


def degrees() -> list[Any]:
    """All pairs of degrees and transports but the one of `test_ranks_answer_as_one_also_when_they_are_killed`; the last
    ones with windows.
    """
    pairs = [(STAGES, TWO), (ONE, TWO), (TWO, ONE), (ONE, STAGES), (Degrees(2, 2), STAGES)]
    plain = [("llama-tied", *pair, transport) for pair in pairs for transport in ("grpc", "shm")][1:]
    windowed = [(ONE, STAGES, "grpc"), (STAGES, ONE, "shm"), (Degrees(2, 2), STAGES, "grpc"), (TWO, STAGES, "shm")]
    return plain + [("gemma3", *row) for row in windowed]


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("family", "prefill", "decode", "transport"), degrees(), ids=str)
async def test_ranks_answer_as_one(
    checkpoint: Callable[[str], Path], tmp_path: Path, family: str, prefill: Degrees, decode: Degrees, transport: str
) -> None:
    model = checkpoint(family)
    expected = await answers_alone(model, tmp_path)
    async with ranked_mesh(model, tmp_path / "ranks", prefill, decode, *over(transport)) as (running, client):
        num_ranks = [1 + len(ranks_of(running, role)) for role in ("prefill", "decode")]
        assert num_ranks == [prefill.num_ranks, decode.num_ranks]
        await check_as_one(running, client, expected, transport)


def over(transport: str) -> tuple[str, ...]:
    return ("--set", f"prefill.kv_transports={transport}", "--log-level", "debug")


async def answers_alone(model: Path, log_dir: Path) -> list[tuple[tandem.Token, ...]]:
    """Those of a mesh without ranks."""
    async with ranked_mesh(model, log_dir / "alone", ONE, ONE) as (_, client):
        return await ask(client, as_one())


def as_one() -> list[Request]:
    return [*requests(40), *long_prompts()[:3]]


async def check_as_one(
    running: MeshProcess, client: tandem.AsyncClient, expected: list[tuple[tandem.Token, ...]], transport: str
) -> None:
    """The answers are those of one rank, to the bit, and their KV came over the transport."""
    assert await ask(client, as_one()) == expected
    await pools_are_whole(client)
    logs = "".join(path.read_text() for path in running.log_dir.glob("*.log"))
    assert f'"transport": "{transport}"' in logs
    assert '"event": "replay"' not in logs


@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", ["llama-tied", pytest.param("gemma3", marks=pytest.mark.soak)])
async def test_ranks_answer_as_one_also_when_they_are_killed(
    checkpoint: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    model = checkpoint(family)
    expected = await answers_alone(model, tmp_path)
    async with ranked_mesh(model, tmp_path / "ranks", STAGES, TWO, *over("grpc")) as (running, client):
        assert [worker.degrees for worker in await client.workers()] == [str(TWO), str(STAGES)]
        await check_as_one(running, client, expected, "grpc")
        streams, prompts = await ask(client, requests()), await ask(client, long_prompts())
        hit, pid = await stream_and_hit(client, requests(), lambda: hit_rank(running, "decode"))
        check_exact(hit, streams)
        await wait_back(running, client, "decode", pid)

        tasks = [asyncio.create_task(client.generate(**request)) for request in long_prompts()]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        pid = hit_rank(running, "prefill")
        assert [result.tokens for result in await asyncio.gather(*tasks)] == prompts
        await wait_back(running, client, "prefill", pid)


@pytest.mark.timeout(900)
async def test_ranks_without_shared_memory_also_when_they_are_killed(
    checkpoint: Callable[[str], Path], reference: Callable[[str], Reference], tmp_path: Path
) -> None:
    """As on GPUs. They sum in another order than one rank does, so tokens are compared, and those of transformers."""
    own = ("--set", "prefill.rank_memory=own", "--set", "decode.rank_memory=own")
    async with ranked_mesh(checkpoint("llama-tied"), tmp_path, STAGES, TWO, *own) as (running, client):
        for request, tokens in zip(long_prompts(), await ask(client, long_prompts()), strict=True):
            reference("llama-tied").check_greedy(request["token_ids"], tokens)
        expected = await ask(client, requests())
        hit, pid = await stream_and_hit(client, requests(), lambda: hit_rank(running, "decode"))
        for events, tokens in zip(hit, expected, strict=True):
            assert [event.token.id for event in events] == [token.id for token in tokens]
        await wait_back(running, client, "decode", pid)


@pytest.mark.soak
@pytest.mark.timeout(900)
async def test_a_stopped_rank_is_a_stall_and_ends_its_worker(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    limits = ("--set", "decode.stall_after_s=5", "--set", "decode.wedged_exit_s=15")
    async with ranked_mesh(checkpoint("llama-tied"), tmp_path, ONE, STAGES, *limits) as (running, client):
        expected = await ask(client, requests())
        hit, pid = await stream_and_hit(client, requests(), lambda: hit_rank(running, "decode", signal.SIGSTOP))
        check_exact(hit, expected)
        await until(lambda: not psutil.pid_exists(pid))
        logs = "".join(path.read_text() for path in running.log_dir.glob("decode*.log"))
    for event in ("engine stalled", "engine wedged, exiting"):
        assert f'"event": "{event}"' in logs


def pause_rank(running: MeshProcess, role: str, pauses_s: Sequence[float]) -> threading.Thread:
    """Stop a rank of the role's worker for a moment, several times, on the thread that is returned."""
    pid = ranks_of(running, role)[0]

    def pause() -> None:
        for pause_s in pauses_s:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(pause_s)
            os.kill(pid, signal.SIGCONT)
            time.sleep(pause_s)

    pausing = threading.Thread(target=pause)
    pausing.start()
    return pausing


@pytest.mark.soak
@pytest.mark.timeout(900)
async def test_ranks_that_are_slowed_or_stopped_only_take_longer(
    checkpoint: Callable[[str], Path], tmp_path: Path, evidence: Evidence
) -> None:
    num_wrong = 0
    async with ranked_mesh(checkpoint("llama-tied"), tmp_path, STAGES, TWO) as (running, client):
        expected = await ask(client, requests())
        pids = sorted((*running.pids("rank_worker"), *running.pids("decode_worker"), *running.pids("prefill_worker")))
        for role, pauses_s in itertools.product(("prefill", "decode"), PAUSES_S.values()):
            hit, pausing = await stream_and_hit(client, requests(), partial(pause_rank, running, role, pauses_s))
            await asyncio.to_thread(pausing.join)
            num_wrong += sum(
                [event.token for event in events] != list(tokens) for events, tokens in zip(hit, expected, strict=True)
            )
        await pools_are_whole(client)
        after = sorted((*running.pids("rank_worker"), *running.pids("decode_worker"), *running.pids("prefill_worker")))
    assert after == pids, "a worker was started again"
    measured = f"{num_wrong} of {2 * len(PAUSES_S) * NUM_STREAMS}"
    evidence("R6", "streams not exact while a rank is slowed or stopped", measured, target="0", ok=num_wrong == 0)


@pytest.mark.soak
@pytest.mark.timeout(7200)
async def test_many_killed_ranks_are_not_noticed(
    checkpoint: Callable[[str], Path], tmp_path: Path, evidence: Evidence
) -> None:
    rng = random.Random(5)
    num_wrong = num_tokens = 0
    async with ranked_mesh(checkpoint("llama-tied"), tmp_path, STAGES, TWO) as (running, client):
        expected = await ask(client, requests())
        for _ in range(NUM_KILLS):
            role = rng.choice(("prefill", "decode"))
            hit, pid = await stream_and_hit(client, requests(), partial(hit_rank, running, role))
            for events, tokens in zip(hit, expected, strict=True):
                num_tokens += len(tokens)
                num_wrong += [event.token for event in events] != list(tokens)
            await wait_back(running, client, role, pid)
    measured = f"{num_wrong} of {NUM_KILLS * NUM_STREAMS}, {num_tokens} tokens"
    evidence("R6", f"streams not exact over {NUM_KILLS} killed ranks", measured, target="0", ok=num_wrong == 0)
