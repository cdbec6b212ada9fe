"""The journal's incidents: what happens to requests does not push out what happens to workers."""

import itertools
from typing import Any, cast

from mesh.domain.errors import WorkerLost
from router.choice import Choice
from router.journal import IncidentKind, Journal
from tests.defects import Repaired
from tests.fakes.router_views import decode, prefill


class _Choice:
    request_id = "r"


def test_a_worker_has_joined_although_many_requests_were_replayed(repaired: Repaired) -> None:
    ticks = itertools.count()
    journal = Journal(lambda: float(next(ticks)))
    workers = [prefill(), decode()]
    journal.follow(workers)
    for _ in range(1000):
        journal.replayed(cast("Choice", _Choice()), WorkerLost("gone"), workers[1].info)
    kinds = [incident.kind for incident in journal.incidents]
    assert kinds[-2:] == [IncidentKind.JOINED, IncidentKind.JOINED]
    assert kinds.count(IncidentKind.REPLAYED) == 50
    times: list[Any] = [incident.at_s for incident in journal.incidents]
    assert times == sorted(times, reverse=True)
    repaired("F14", "1,000 replays later both workers' 'joined' are still among the incidents")
