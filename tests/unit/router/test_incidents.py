"""The journal's incidents: what happens to requests does not push out what happens to workers."""

import itertools
from dataclasses import replace
from typing import Any, cast

from mesh.domain.errors import WorkerLost
from mesh.domain.worker import WorkerState
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
    for worker in workers:
        journal.note_worker(worker)
    for _ in range(1000):
        journal.replayed(cast("Choice", _Choice()), WorkerLost("gone"), workers[1].info)
    kinds = [incident.kind for incident in journal.incidents]
    assert kinds[-2:] == [IncidentKind.JOINED, IncidentKind.JOINED]
    assert kinds.count(IncidentKind.REPLAYED) == 50
    times: list[Any] = [incident.at_s for incident in journal.incidents]
    assert times == sorted(times, reverse=True)
    repaired("F14", "1,000 replays later both workers' 'joined' are still among the incidents")


def test_a_dropped_worker_that_comes_back_has_joined_again() -> None:
    journal, worker, other = Journal(lambda: 0.0), decode(), prefill()
    for view in (worker, other, worker, replace(worker, state=WorkerState.LOST)):
        journal.note_worker(view)
    journal.keep([other])
    journal.note_worker(worker)
    journal.note_worker(other)
    kinds = [(incident.kind, incident.worker_id) for incident in reversed(journal.incidents)]
    assert kinds == [
        (IncidentKind.JOINED, "d0"),
        (IncidentKind.JOINED, "p0"),
        (IncidentKind.LOST, "d0"),
        (IncidentKind.JOINED, "d0"),
    ]
