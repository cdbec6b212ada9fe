"""What bookings add up to."""

from router.ledger import Ledger
from router.placement import Placement
from tests.fakes.router_views import BLOCK, decode


def test_shared_blocks_are_counted_once_until_the_last_that_holds_them_is_gone() -> None:
    worker, ledger = decode(), Ledger(lambda: 0.0)

    def counted() -> int:
        return sum(each.num_blocks for each in ledger.in_flight([worker]).values())

    first = ledger.book(Placement(None, worker.info), 8 * BLOCK)
    forks = [first.fork() for _ in range(3)]
    assert counted() == 8 + 4
    for number, gone in enumerate((first, forks[1], forks[0])):
        gone.release()
        assert counted() == 8 + 3 - number
    forks[2].release()
    assert counted() == 0
