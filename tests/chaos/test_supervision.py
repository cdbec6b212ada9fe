"""A real `tandem up` whose disk is full, that is stopped or killed itself, or loses its router. `make chaos`."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

import tandem
from tests.chaos.attack import attack, listening, service
from tests.chaos.neighbours import Neighbours, Period
from tests.e2e.mesh_process import MeshProcess, is_alive, mesh, pools_are_whole, started
from tests.evidence import Evidence
from tests.small_disk import on_small_disk
from tests.waiting import until, until_told

FLAGS = ("--http-port=0", "--decode=2", "--grace-s=40")
REQUESTS = 5000
STOPPED_S = 12.0
LONGEST_WAIT_S = 4.0
ROUTER_KILLS = 3
END_S = 180.0
DRAIN_S = 20.0

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]


@asynccontextmanager
async def up(log_dir: Path, *, prefix: tuple[str, ...] = ()) -> AsyncIterator[tuple[MeshProcess, Neighbours]]:
    """A mesh with two decode workers and a gateway, and neighbours. Afterwards every block is free."""
    async with mesh("tandem-small", log_dir, *FLAGS, prefix=prefix) as running:
        async with Neighbours.beside(running) as neighbours:
            yield running, neighbours
        async with tandem.AsyncClient(running.address) as client:
            await pools_are_whole(client)


async def test_log_disk_is_full(tmp_path: Path, evidence: Evidence) -> None:
    """The disk of all logs, that of `tandem up` too."""
    async with up(tmp_path, prefix=on_small_disk(tmp_path, errors=tmp_path / "up.log")) as (running, neighbours):
        calm = await loaded(running, neighbours)
        disk = Path(f"/proc/{running.process.pid}/root{tmp_path}")
        filler = disk / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(256))
        assert os.statvfs(disk).f_bavail == 0
        async with neighbours.period() as hit:
            answered = await ask_much(running, REQUESTS)
        neighbours.state(evidence, "the log disk is full", calm, hit)
        measured = f"{answered} of {REQUESTS}"
        evidence("R10", "requests answered while the log disk is full", measured, target="all", ok=answered == REQUESTS)
        filler.unlink()
        log = disk / "router.log"
        size = log.stat().st_size
        await ask_much(running, 100)
        await until(lambda: log.stat().st_size > size, END_S, state=lambda: (log.stat().st_size, os.statvfs(disk)))


async def test_up_is_stopped(tmp_path: Path, evidence: Evidence) -> None:
    async with up(tmp_path) as (running, neighbours):
        calm = await loaded(running, neighbours)
        running.process.send_signal(signal.SIGSTOP)
        try:
            async with neighbours.period(STOPPED_S) as hit:
                answered = await ask_much(running, REQUESTS // 2)
        finally:
            running.process.send_signal(signal.SIGCONT)
        neighbours.state(evidence, "`tandem up` is stopped", calm, hit)
        longest_s, ok = neighbours.longest_s(hit), neighbours.longest_s(hit) <= LONGEST_WAIT_S
        evidence("R10", "longest wait: `tandem up` is stopped", f"{longest_s:.2f} s", target="<= 4 s", ok=ok)
        measured = f"{answered} of {REQUESTS // 2}"
        ok = answered == REQUESTS // 2
        evidence("R10", "requests answered while `tandem up` is stopped", measured, target="all", ok=ok)


async def test_up_is_killed(tmp_path: Path, evidence: Evidence) -> None:
    """Streams that run end normally, new ones are refused, and everything stops."""
    async with started("tandem-small", tmp_path, *FLAGS) as running, Neighbours.beside(running) as neighbours:
        await neighbours.calm()
        children, num_running = running.children(), await neighbours.all_running()
        killed_s = time.monotonic()
        running.process.kill()
        await neighbours.end()
        ended_s = time.monotonic() - killed_s
        left = await left_after(children, END_S)
        gone_s = time.monotonic() - killed_s
        broken = neighbours.broken
        measured, ok = f"{len(broken)} of {num_running} {'; '.join(broken)}", not broken
        evidence("R10", "running streams broken by SIGKILL of `tandem up`", measured, target="0", ok=ok)
        evidence(
            "R2", "streams wrong: `tandem up` is killed", neighbours.wrong or 0, target="0", ok=not neighbours.wrong
        )
        measured = f"{left} left, {gone_s:.1f} s; the streams took {ended_s:.1f} s"
        evidence("R10", "services left by SIGKILL of `tandem up`", measured, target="0", ok=not left)


async def left_after(children: list[psutil.Process], within_s: float) -> list[str]:
    """Names of those that do not end in time; they are killed."""
    deadline_s = time.monotonic() + within_s
    while any(map(is_alive, children)) and time.monotonic() < deadline_s:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    left = [child for child in children if is_alive(child)]
    for child in left:
        child.kill()
    return [child.name() for child in left]


async def test_router_is_killed(tmp_path: Path, evidence: Evidence) -> None:
    """Streams go on where they were; it comes back at its address."""
    async with up(tmp_path) as (running, neighbours):
        calm, num_running, back_s = await neighbours.calm(), 0, list[float]()
        async with neighbours.period() as hit:
            for _ in range(ROUTER_KILLS):
                num_running += await neighbours.all_running()
                killed_s = time.monotonic()
                await gone(running, "router", signal.SIGKILL)
                async with tandem.AsyncClient(running.address) as client:
                    await client.wait_ready(END_S)
                back_s.append(time.monotonic() - killed_s)
                await neighbours.new_streams()
        neighbours.state(evidence, "the router is killed", calm, hit, may_refuse=True)
        measured = f"{len(neighbours.broken)} of {num_running}"
        evidence("R10", "streams broken by SIGKILL of the router", measured, target="0", ok=not neighbours.broken)
        measured = f"{max(back_s):.1f} s"
        evidence(
            "R10",
            "router serves again after SIGKILL",
            measured,
            target="<= 15 s",
            ok=max(back_s) <= 15,
            is_reported_only=True,
        )


async def test_watchers_that_take_nothing(tmp_path: Path, evidence: Evidence) -> None:
    """At every gRPC port. A worker and the router stop in their normal time all the same."""
    async with up(tmp_path) as (running, neighbours):
        control_s = [await drained_s(running, neighbours, role) for role in ("decode_worker", "router")]
        calm = await neighbours.calm()
        addresses = [f"127.0.0.1:{port}" for port in sorted(listening(running))]
        async with attack("watchers", *addresses) as watchers:
            async with neighbours.period() as hit:
                async with tandem.AsyncClient(running.address) as client:
                    await client.wait_ready(END_S)
                await neighbours.new_streams()
            held_s = [await drained_s(running, neighbours, role) for role in ("decode_worker", "router")]
            assert await watchers.end() == {"watchers": 3 * len(addresses)}
        neighbours.state(evidence, "watchers that take nothing", calm, hit, may_refuse=True)
        ping_s = neighbours.slowest_ping_s(hit)
        measured, ok = f"{ping_s:.2f} s", ping_s <= LONGEST_WAIT_S
        evidence("R19", "slowest /ping: watchers that take nothing", measured, target="<= 4 s", ok=ok)
        for role, held, control in zip(("decode worker", "router"), held_s, control_s, strict=True):
            measured, ok = f"{held:.1f} s; without: {control:.1f} s", held <= control + DRAIN_S
            evidence("R10", f"SIGTERM of a {role} beside such watchers", measured, target="+20 s at most", ok=ok)


async def drained_s(running: MeshProcess, neighbours: Neighbours, module: str) -> float:
    """How long a service takes from SIGTERM to its end; returns when the mesh is whole again."""
    began_s = time.monotonic()
    await gone(running, module, signal.SIGTERM)
    took_s = time.monotonic() - began_s
    async with tandem.AsyncClient(running.address) as client:
        await client.wait_ready(END_S)
        await until_told(client.workers, all_ready, END_S)
    await neighbours.new_streams()
    return took_s


def all_ready(workers: Sequence[tandem.Worker]) -> bool:
    return sum(worker.state == "ready" for worker in workers) == 3


async def gone(running: MeshProcess, module: str, number: signal.Signals) -> None:
    """Signal a service; return when that process has ended. AssertionError if it does not."""
    process = service(running, module)
    process.send_signal(number)
    deadline_s = time.monotonic() + END_S
    while is_alive(process):
        assert time.monotonic() < deadline_s, f"{module} is still there {END_S:g} s after {number.name}"
        await asyncio.sleep(0.02)


async def loaded(running: MeshProcess, neighbours: Neighbours) -> Period:
    """A time in which requests are asked, and nothing else is done."""
    async with neighbours.period() as period:
        await ask_much(running, REQUESTS // 4)
    return period


async def ask_much(running: MeshProcess, count: int, at_a_time: int = 16) -> int:
    """One-token requests; how many were answered."""
    numbers, answered = iter(range(count)), 0

    async def ask(client: tandem.AsyncClient) -> None:
        nonlocal answered
        for number in numbers:
            with contextlib.suppress(tandem.TandemError):
                await client.generate(token_ids=[number % 250, 1], max_new_tokens=1, timeout=60)
                answered += 1

    async with tandem.AsyncClient(running.address) as client:
        await asyncio.gather(*(ask(client) for _ in range(at_a_time)))
    return answered
