"""The long form of `test_faults.py`: `make chaos`.

TANDEM_CHAOS_REQUESTS  requests under the fault mix (default 3000, some minutes; 10000 for the whole of R1)
"""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mesh.rpc.server import KEEPALIVE_MS
from tests.chaos import drills, figures
from tests.chaos.cluster import Cluster, Shape, running
from tests.chaos.faults import FailOverRedis, KillRouter, StopRedis, WipeRedis, disturb, mix
from tests.chaos.history import percentile
from tests.chaos.load import Catalogue, Load
from tests.chaos.readers import read_beside, watch_silently
from tests.chaos.watch import CapWatch, in_background, warnings_by_cause
from tests.evidence import Evidence

REQUESTS = int(os.environ.get("TANDEM_CHAOS_REQUESTS", "3000"))
CLIENTS_PER_ROUTER = 5
KILLS = 6
FLOOD = 10_000
READERS = 100
SLOW_READER_S = 10.0
SILENT_S = 60.0
REDIS_AWAY_S = 60.0

pytestmark = [
    pytest.mark.soak,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(900 + REQUESTS),
]


async def test_fault_mix_under_load(cluster: Cluster, catalogue: Catalogue, evidence: Evidence) -> None:
    load, cap, turn = Load(cluster, catalogue), CapWatch(cluster), 0
    async with in_background(cap.run()), load.clients(CLIENTS_PER_ROUTER):
        while len(load.histories) < REQUESTS:
            for fault in mix(cluster, turn):
                await disturb(load, fault)
            turn += 1
    figures.state_load(evidence, load)
    figures.state_redis(evidence, load)
    figures.state_cap(evidence, cap, load.disturbances, "R9")
    await cluster.wait_at_rest()
    await drills.permits_return_s(cluster)


async def test_redis_away_for_a_minute(cluster: Cluster, catalogue: Catalogue, evidence: Evidence) -> None:
    await cluster.wait_whole()
    load, cap = Load(cluster, catalogue), CapWatch(cluster)
    async with in_background(cap.run()), load.clients(CLIENTS_PER_ROUTER):
        before = warnings_by_cause(cluster)
        for fault in (StopRedis(REDIS_AWAY_S), WipeRedis(), FailOverRedis()):
            away = await disturb(load, fault)
            normal_s = away.ended_s - away.began_s - getattr(fault, "for_s", 0.0)
            measured, ok = f"{normal_s:.1f} s", normal_s <= 5
            evidence("R9", f"{fault.name}: whole again", measured, target="<= 5 s", ok=ok, is_reported_only=True)
    figures.state_log_rate(evidence, before, warnings_by_cause(cluster), REDIS_AWAY_S)
    figures.state_load(evidence, load)
    figures.state_redis(evidence, load)
    figures.state_cap(evidence, cap, load.disturbances, "R9")


async def test_killed_decode_workers_break_no_stream(cluster: Cluster, evidence: Evidence) -> None:
    kills = []
    for number in range(KILLS):
        await cluster.wait_whole()
        kills.append(await drills.kill_mid_stream(cluster, per_router=6, seed=100 * number))
    figures.state_killed(evidence, kills)


async def test_killed_prefill_workers_lose_no_prompt(cluster: Cluster, evidence: Evidence) -> None:
    kills = []
    for number in range(KILLS):
        await cluster.wait_whole()
        kills.append(await drills.kill_mid_transfer(cluster, cluster.shape.cap // 2, seed=number))
    figures.state_prefill_killed(evidence, kills)


async def test_flipped_bytes_are_refused_and_replayed(cluster: Cluster, evidence: Evidence) -> None:
    await cluster.wait_whole()
    await figures.check_flips(evidence, cluster, 96)


async def test_a_flood_of_streams_that_are_left_leaks_nothing(cluster: Cluster, evidence: Evidence) -> None:
    await cluster.wait_whole()
    await figures.check_flood(evidence, cluster, FLOOD)


async def test_cap_holds_while_redis_and_a_router_go(
    cluster: Cluster, catalogue: Catalogue, evidence: Evidence
) -> None:
    await cluster.wait_whole()
    load, cap = Load(cluster, catalogue, think_s=0.01), CapWatch(cluster)
    async with in_background(cap.run()), load.clients(cluster.shape.cap):  # twice as many as there are permits
        for fault in (StopRedis(4.0), KillRouter("router-0"), FailOverRedis(), KillRouter("router-1"), WipeRedis()):
            await disturb(load, fault)
    figures.state_pressure(evidence, cap, load.disturbances)
    await drills.permits_return_s(cluster)
    await cluster.wait_at_rest()


async def test_silent_streams_with_keepalive_stay(cluster: Cluster, evidence: Evidence) -> None:
    """Silent streams are held at a router and, as routers do, at workers."""
    await cluster.wait_whole()
    keepalive = (("grpc.keepalive_time_ms", KEEPALIVE_MS), ("grpc.http2.max_pings_without_data", 0))
    addresses = [f"127.0.0.1:{cluster.proxies[name].port}" for name in ("router-0", "decode-0", "prefill-0")]
    ended = await asyncio.gather(*(watch_silently(address, SILENT_S, keepalive) for address in addresses))
    broken = [error for error in ended if error]
    evidence("R28", f"silent streams that broke in {SILENT_S:g} s", broken or 0, target="0", ok=not broken)
    told_off = sum(cluster.log(name).count("too_many_pings") for name in cluster.nodes)
    evidence("R28", "GOAWAYs for too many pings in all logs", told_off, target="0", ok=not told_off)


async def test_nobody_died_or_complained(cluster: Cluster, evidence: Evidence) -> None:
    """About all that happened before it."""
    figures.state_processes(evidence, cluster)


@pytest.mark.parametrize("num_choices", [2, 1], ids=["while generating", "after all is generated"])
async def test_readers_that_stop_are_cut(
    num_choices: int, checkpoint: Callable[[str], Path], tmp_path: Path, evidence: Evidence
) -> None:
    seats = ("--max-rolling-batch-size=256", "--max-batch-total-tokens=131072")
    flags = {"router": (f"--slow-reader-s={SLOW_READER_S}", "--max-queued-requests=400"), "decode": seats}
    shape = Shape(checkpoint("llama-tied"), tmp_path, 1, 1, 1, cap=4 * READERS, flags=flags)
    async with running(shape) as cluster:
        good = await read_beside(cluster, READERS, 0.0, num_choices)
        base = cluster.rss_bytes("router-0")
        slow = await read_beside(cluster, READERS, 3 * SLOW_READER_S, num_choices)
        await cluster.wait_at_rest()
    how = f"with {num_choices} choice(s) unread"
    extra_mib = (slow.most_rss_bytes - base) / READERS / (1 << 20)
    measured = f"{extra_mib:.2f} MiB"
    evidence("R12", f"router's extra memory for a reader {how}", measured, target="<= 1 MiB", ok=extra_mib <= 1)
    cut = sum(count for ending, count in slow.endings.items() if ending.startswith("ABORTED"))
    measured = f"{cut} of {READERS}" if cut == READERS else dict(slow.endings)
    evidence("R12", f"readers {how} cut", measured, target=f"all {READERS}", ok=cut == READERS)
    ours, theirs = percentile(slow.neighbours_gaps_s, 95), percentile(good.neighbours_gaps_s, 95)
    measured, ok = f"{1000 * ours:.0f} ms; all read: {1000 * theirs:.0f} ms", ours <= 1.05 * theirs
    evidence("R12", f"neighbours' waits for a token, {how}, p95", measured, target="+5 %", ok=ok, is_reported_only=True)
