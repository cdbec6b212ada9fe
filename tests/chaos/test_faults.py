"""Each fault once, on one small mesh of real processes: the short form of `test_soak.py`."""

import asyncio

import pytest

from tests.chaos import drills, figures
from tests.chaos.cluster import Cluster
from tests.chaos.faults import disturb, quick_mix
from tests.chaos.history import percentile
from tests.chaos.load import Catalogue, Load
from tests.chaos.watch import CapWatch, in_background
from tests.evidence import Evidence

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.xdist_group("chaos"),
    pytest.mark.timeout(300),
]

CLIENTS_PER_ROUTER = 3
FLOOD = 500


async def test_each_fault_once_under_load(cluster: Cluster, catalogue: Catalogue, evidence: Evidence) -> None:
    load, cap = Load(cluster, catalogue, think_s=0.15), CapWatch(cluster)
    async with in_background(cap.run()), load.clients(CLIENTS_PER_ROUTER):
        for faults in quick_mix():
            await asyncio.gather(*(disturb(load, fault) for fault in faults))
    figures.state_load(evidence, load)
    figures.state_redis(evidence, load)
    figures.state_cap(evidence, cap, load.disturbances, "R9")
    await cluster.wait_at_rest()
    await drills.permits_return_s(cluster)


async def test_a_killed_decode_worker_breaks_no_stream(cluster: Cluster, evidence: Evidence) -> None:
    await cluster.wait_whole()
    killed = await drills.kill_mid_stream(cluster, per_router=4, seed=1)
    state_killed(evidence, [killed])
    await cluster.wait_whole()
    await cluster.wait_at_rest()


def state_killed(evidence: Evidence, kills: list[drills.Killed]) -> None:
    """R6, over all kills."""
    num_streams, num_exact = sum(each.num_streams for each in kills), sum(each.num_exact for each in kills)
    said = f"{num_exact} of {num_streams}"
    evidence("R6", "streams token-exact over SIGKILL", said, target=">= 99 %", ok=num_exact >= 0.99 * num_streams)
    p95 = percentile([gap_s for each in kills for gap_s in each.gaps_s], 95)
    evidence("R6", "longest wait for a token, p95", f"{p95:.2f} s", target="<= 5 s", ok=p95 <= 5, is_time=True)
    most = max((count for each in kills for count in each.failed_new.values()), default=0)
    num_new = sum(each.num_new for each in kills)
    said = f"{most} of {num_new // max(1, 2 * len(kills))}"
    evidence("R6", "most failed new requests at a router", said, target="<= 1 per kill", ok=most <= 1)


async def test_flipped_bytes_are_refused_and_replayed(cluster: Cluster, evidence: Evidence) -> None:
    await cluster.wait_whole()
    before = figures.num_refused(cluster)
    flipped = await drills.flip_transfers(cluster, 24)
    refused = figures.num_refused(cluster) - before
    said = f"{refused} refused of {flipped.num_flips}"
    ok = refused == flipped.num_flips > 0
    evidence("R3", "transfers with a flipped byte", said, target="all refused, and some", ok=ok)
    wrong = f"{flipped.num_wrong} of {flipped.num_answers}"
    evidence("R3", "wrong answers after flips", wrong, target="0", ok=not flipped.num_wrong)


async def test_a_flood_of_streams_that_are_left_leaks_nothing(cluster: Cluster, evidence: Evidence) -> None:
    await cluster.wait_whole()
    await check_flood(cluster, evidence, FLOOD)


async def check_flood(cluster: Cluster, evidence: Evidence, count: int) -> None:
    """R28: open, leave, and look whether everything is back."""
    cap = CapWatch(cluster)
    async with in_background(cap.run()):
        endings = await drills.flood(cluster, count)
    broken = {name: number for name, number in endings.items() if name not in _FLOOD_ENDINGS}
    evidence("R28", f"{count} streams opened and left", dict(endings), target="0 broken", ok=not broken)
    figures.state_cap(evidence, cap, [], "R28")
    await drills.permits_return_s(cluster)
    await cluster.wait_at_rest()
    evidence("R28", "permits and blocks at rest after the flood", "all back", target="all back", ok=True)


_FLOOD_ENDINGS = ("left after a token", "left while waiting", "finished", "Overloaded")


async def test_nobody_died_or_complained(cluster: Cluster, evidence: Evidence) -> None:
    """The last one: about all that happened before it."""
    figures.state_processes(evidence, cluster)
