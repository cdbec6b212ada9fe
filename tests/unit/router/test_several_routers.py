"""Several routers with the same workers: each counts its own work, and they do not all begin with one worker."""

from collections import Counter
from dataclasses import dataclass, field

import pytest

from router.admission.placement import Placement, place
from router.admission.roster import InFlight
from tests.fakes.router_views import decode, prefill, query, snapshot
from tests.goodness import UNLIKELY, fit

NUM_WORKERS = 4


@dataclass
class Routers:
    """Routers that place one request after the other, none of which ends. `reported`: sequences, as workers say."""

    names: list[str]
    reported: Counter[str] = field(default_factory=Counter)
    own: dict[str, Counter[str]] = field(default_factory=dict)

    def place(self, router: str) -> Placement:
        own = self.own.setdefault(router, Counter())
        workers = [
            make(f"{make.__name__}-{number}", num_running=self.reported[f"{make.__name__}-{number}"])
            for make in (prefill, decode)
            for number in range(NUM_WORKERS)
        ]
        in_flight = {name: InFlight(num_seqs=count, num_blocks=count) for name, count in own.items()}
        placed = place(query(), snapshot(*workers, in_flight=in_flight, router_id=router))
        assert isinstance(placed, Placement)
        own[placed.decode.worker_id] += 1
        return placed

    def report(self) -> None:
        self.reported = sum(self.own.values(), Counter())


def test_each_router_begins_with_a_worker_of_its_own_choice() -> None:
    first = [Routers([]).place(f"router {number}") for number in range(400)]
    pairs = Counter((each.prefill and each.prefill.worker_id, each.decode.worker_id) for each in first)
    assert len(pairs) == NUM_WORKERS**2
    assert fit(list(pairs.values()), [1] * len(pairs)) > UNLIKELY


@pytest.mark.parametrize("num_routers", [2, 3, 4])
def test_routers_take_workers_that_others_have_left_idle(num_routers: int) -> None:
    """Workers report between requests."""
    for group in range(50):
        routers = Routers([f"router {group}.{number}" for number in range(num_routers)])
        for turn in range(NUM_WORKERS):
            routers.place(routers.names[turn % num_routers])
            routers.report()
        assert list(routers.reported.values()) == [1] * NUM_WORKERS


@pytest.mark.parametrize("num_routers", [2, 3, 4])
def test_requests_at_one_moment_are_rarely_at_one_worker(num_routers: int) -> None:
    """Nobody has reported yet: routers meet at a worker as often as chance would have it."""
    num_groups, num_together = 400, 0
    for group in range(num_groups):
        routers = Routers([f"router {group}.{number}" for number in range(num_routers)])
        num_together += len({routers.place(name).decode.worker_id for name in routers.names}) == 1
    expected = NUM_WORKERS ** (1 - num_routers)
    assert fit([num_together, num_groups - num_together], [expected, 1 - expected]) > UNLIKELY
