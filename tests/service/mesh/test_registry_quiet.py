"""How much is written while a worker cannot stay registered (R26)."""

import asyncio
from collections import Counter

import structlog

from router.workers.membership import Membership
from tests.evidence import Evidence
from tests.service.mesh.test_registry import MEMBER, FakeEngine, start_registry
from tests.unit.router.test_membership import INFO
from worker.agent import RegistryAgent, Report


class BrokenEngine(FakeEngine):
    """Every report fails, so that every registration breaks at once."""

    async def report(self) -> Report:
        raise RuntimeError("no report")


async def test_a_registration_that_breaks_at_once_costs_few_lines(evidence: Evidence) -> None:
    server = await start_registry(Membership(asyncio.get_running_loop().time))
    clock = asyncio.get_running_loop().time
    begun_s = clock()
    with structlog.testing.capture_logs() as lines:
        running = asyncio.create_task(RegistryAgent(INFO, BrokenEngine(), MEMBER).run(server.address))
        await asyncio.sleep(8.0)
    watched_s = clock() - begun_s
    running.cancel()
    await server.stop(0)
    [(cause, most), *_] = Counter(line["event"] for line in lines).most_common(1)
    assert most > 2
    evidence(
        "R26",
        "lines of a registration that breaks at once",
        f"{most} in {watched_s:.1f} s ({cause})",
        target="<= 1 per s",
        ok=most <= watched_s,
    )
