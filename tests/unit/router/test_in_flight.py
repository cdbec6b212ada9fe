"""The sums of claims per worker."""

from router.admission.in_flight import InFlightTable
from router.admission.placement import Placement
from tests.fakes.router_views import BLOCK, decode, prefill


def test_shared_blocks_are_counted_once_until_the_last_that_holds_them_is_gone() -> None:
    worker, in_flight = decode(), InFlightTable(lambda: 0.0)

    def counted() -> int:
        return sum(each.num_blocks for each in in_flight.by_worker().values())

    first = in_flight.claim(Placement(None, worker.info), 8 * BLOCK)
    forks = [first.fork() for _ in range(3)]
    assert counted() == 8 + 4
    for number, gone in enumerate((first, forks[1], forks[0])):
        gone.release()
        assert counted() == 8 + 3 - number
    forks[2].release()
    assert counted() == 0


def test_prompt_tokens_count_where_they_are_computed_until_they_are() -> None:
    first, second, in_flight = prefill(), decode(), InFlightTable(lambda: 0.0)
    room_appeared: list[int] = []

    def counted() -> dict[str, int]:
        sums = in_flight.by_worker()
        return {view.info.worker_id: sums[view.info.incarnation].prefill_tokens for view in (first, second)}

    shipped = in_flight.claim(Placement(first.info, second.info), 7)
    local = in_flight.claim(Placement(None, second.info), 5)
    local.fork()
    assert counted() == {"p0": 7, "d0": 5}
    in_flight.on_change(lambda: room_appeared.append(1))
    shipped.prefill_computed()
    assert counted() == {"p0": 0, "d0": 5}
    for _ in range(2):
        local.first_token()
    assert counted() == {"p0": 0, "d0": 0}
    assert len(room_appeared) == 2
