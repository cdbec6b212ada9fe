"""Each fault once, on one small mesh of real processes: the short form of `test_soak.py`."""

import asyncio

import pytest

from tests.chaos import drills, figures
from tests.chaos.cluster import Cluster
from tests.chaos.faults import disturb, quick_mix
from tests.chaos.load import Catalogue, Load
from tests.chaos.watch import CapWatch, in_background
from tests.evidence import Evidence

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
]

CLIENTS_PER_ROUTER = 3
FLOOD = 200


async def test_each_fault_once_under_load(cluster: Cluster, catalogue: Catalogue, evidence: Evidence) -> None:
    load, cap = Load(cluster, catalogue, think_s=0.4), CapWatch(cluster)
    async with in_background(cap.run()), load.clients(CLIENTS_PER_ROUTER):
        for faults in quick_mix():
            await asyncio.gather(*(disturb(load, fault) for fault in faults))
    figures.state_load(evidence, load)
    figures.state_redis(evidence, load)
    figures.state_cap(evidence, cap, load.disturbances, "R9")
    await cluster.wait_at_rest()
    returned_s = await drills.permits_return_s(cluster)  # those of the killed router too
    evidence("R9", "all permits back at the end", f"{returned_s:.1f} s", target="all", ok=True)


async def test_a_killed_decode_worker_breaks_no_stream(cluster: Cluster, evidence: Evidence) -> None:
    await cluster.wait_whole()
    killed = await drills.kill_mid_stream(cluster, per_router=4, seed=1)
    figures.state_killed(evidence, [killed])


async def test_a_killed_prefill_worker_loses_no_prompt(cluster: Cluster, evidence: Evidence) -> None:
    kills: list[drills.PrefillKilled] = []
    # Not every kill meets a transfer. Half the cap is what a router may use where Redis is slow to answer.
    while len(kills) < 6 and not any(kill.num_replayed for kill in kills):
        await cluster.wait_whole()
        kills.append(await drills.kill_mid_transfer(cluster, cluster.shape.cap // 2, seed=2 + 100 * len(kills)))
    figures.state_prefill_killed(evidence, kills)


async def test_flipped_bytes_are_refused_and_replayed(cluster: Cluster, evidence: Evidence) -> None:
    await cluster.wait_whole()
    await figures.check_flips(evidence, cluster, 24)


async def test_a_flood_of_streams_that_are_left_leaks_nothing(cluster: Cluster, evidence: Evidence) -> None:
    await cluster.wait_whole()
    await figures.check_flood(evidence, cluster, FLOOD)


async def test_nobody_died_or_complained(cluster: Cluster, evidence: Evidence) -> None:
    """The last one: about all that happened before it."""
    figures.state_processes(evidence, cluster)
