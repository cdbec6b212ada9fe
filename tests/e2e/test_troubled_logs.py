"""Streams of a real mesh go on whatever becomes of its logs, and it stops in order whatever its clients do."""

import asyncio
import json
import resource
import signal
import time
from contextlib import AsyncExitStack
from pathlib import Path

import psutil
import pytest

import tandem
from tests.defects import Repaired
from tests.e2e.mesh_process import STOP_S, MeshProcess, is_alive, pools_are_whole, started
from tests.zero_window import zero_window_call

pytestmark = pytest.mark.timeout(300)

WATCH = "/grpc.health.v1.Health/Watch"
NUM_REQUESTS, NUM_AT_A_TIME = 400, 16
LONG = 600
GRACE = ("--set", "router.grace_s=50", "--set", "decode.drain_grace_s=50")
"""On a busy machine a long stream takes longer than the default."""
DROPPED = b'"event": "log lines dropped"'


async def ask(client: tandem.AsyncClient, count: int = NUM_REQUESTS) -> int:
    """Send so many short requests; all must be answered. Returns how many were."""
    waiting = iter(range(count))
    answered = 0

    async def some() -> None:
        nonlocal answered
        for number in waiting:
            await client.generate(token_ids=[5, 6, 7 + number % 50], max_new_tokens=1, ignore_eos=True)
            answered += 1

    await asyncio.gather(*(some() for _ in range(NUM_AT_A_TIME)))
    return answered


async def stream(client: tandem.AsyncClient, first: asyncio.Event) -> int:
    """The number of tokens of one long stream; `first` is set with the first of them."""
    count = 0
    async for event in client.stream(token_ids=[5, 6, 7], max_new_tokens=LONG, ignore_eos=True):
        count += event.token is not None
        first.set()
    return count


async def begin_streams(client: tandem.AsyncClient, count: int) -> list[asyncio.Task[int]]:
    """So many long streams, all with their first token."""
    firsts = [asyncio.Event() for _ in range(count)]
    streams = [asyncio.create_task(stream(client, first)) for first in firsts]
    await asyncio.gather(*(first.wait() for first in firsts))
    return streams


def count_lines(log: bytes) -> tuple[int, int]:
    """How many lines the log says are missing, in one place at most, and how many it holds."""
    *lines, _ = log.split(b"\n")
    gaps = [json.loads(line)["num_lines"] for line in lines if DROPPED in line]
    assert len(gaps) <= 1
    return sum(gaps), len(lines) - len(gaps)


async def lose_and_regain_the_disk(running: MeshProcess, client: tandem.AsyncClient) -> str:
    """`tandem up` may not make any file longer, as on a full disk."""
    limits = resource.prlimit(running.process.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    log = running.log_dir / "router.log"
    size = log.stat().st_size
    answered = await ask(client)
    assert log.stat().st_size == size
    resource.prlimit(running.process.pid, resource.RLIMIT_FSIZE, limits)
    await ask(client, 1)
    async with asyncio.timeout(60):
        # The last lines of these requests may come when the disk is back: then they are written.
        while sum(count_lines(log.read_bytes()[size:])) < answered:  # noqa: ASYNC110  (nothing tells of it)
            await asyncio.sleep(0.05)
    num_dropped, _ = count_lines(log.read_bytes()[size:])
    assert num_dropped
    return f"log disk full: {answered} of {NUM_REQUESTS} requests answered, then the log goes on with a count"


async def stop_and_continue_up(running: MeshProcess, client: tandem.AsyncClient) -> str:
    running.process.send_signal(signal.SIGSTOP)
    try:
        answered = await ask(client)
    finally:
        running.process.send_signal(signal.SIGCONT)
    return f"`tandem up` stopped: {answered} of {NUM_REQUESTS}"


async def addresses(running: MeshProcess, client: tandem.AsyncClient) -> list[str]:
    """The addresses of all ports: the public one, HTTP, the registry's and the workers'."""
    workers = [worker.address for worker in await client.workers()]
    (decode, *_) = running.pids("decode_worker")
    (registry,) = [flag for flag in psutil.Process(decode).cmdline() if flag.startswith("--registry-address=")]
    return [running.address, running.http.removeprefix("http://"), registry.partition("=")[2], *workers]


async def test_full_disk_stopped_supervisor_and_watchers_that_take_nothing(tmp_path: Path, repaired: Repaired) -> None:
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(started("tandem-small", tmp_path, "--http-port=0", *GRACE))
        client = await stack.enter_async_context(tandem.AsyncClient(running.address, timeout=60))
        repaired("D1", await lose_and_regain_the_disk(running, client))
        repaired("D1", await stop_and_continue_up(running, client))
        await pools_are_whole(client)
        ports = await addresses(running, client)
        async with AsyncExitStack() as stuck:
            for address in ports:
                await stuck.enter_async_context(zero_window_call(address, WATCH))
            await client.wait_ready(60)
            (going,) = await begin_streams(client, 1)
            began_s = time.monotonic()
            running.process.send_signal(signal.SIGINT)
            assert await going == LONG
            assert await asyncio.wait_for(running.process.wait(), STOP_S) == 0
            took_s = time.monotonic() - began_s
        repaired("D2", f"on all {len(ports)} ports of a mesh: its stream ends, and it stops in {took_s:.0f} s")


async def test_a_killed_supervisor(tmp_path: Path, repaired: Repaired) -> None:
    async with (
        started("tandem-small", tmp_path, "--http-port=0", *GRACE) as running,
        tandem.AsyncClient(running.address, timeout=60, max_retries=0) as client,
    ):
        children = running.children()
        streams = await begin_streams(client, 4)
        running.process.kill()
        counts = await asyncio.gather(*streams)
        assert counts == [LONG] * len(streams)
        async with asyncio.timeout(60):
            while any(map(is_alive, children)):  # noqa: ASYNC110  (they are nobody's children now)
                await asyncio.sleep(0.1)
    repaired("D1", f"`tandem up` killed: {len(counts)} of {len(counts)} running streams end whole, then all services")
