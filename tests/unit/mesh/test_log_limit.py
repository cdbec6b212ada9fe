"""One cause must not be all that a log is about."""

from mesh.logs import LogLimit


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_few_at_once_then_one_a_second() -> None:
    clock = Clock()
    limit = LogLimit(clock)
    assert [limit.admit("a") for _ in range(7)] == [0] * 5 + [None] * 2
    assert limit.admit("b") == 0, "each cause by itself"
    clock.now_s = 1.0
    assert [limit.admit("a") for _ in range(3)] == [2, None, None]
    clock.now_s = 101.0
    assert [limit.admit("a") for _ in range(6)] == [2, 0, 0, 0, 0, None]
    assert limit.num_suppressed == 5


def test_what_was_left_out_is_told_in_the_end() -> None:
    clock = Clock()
    limit = LogLimit(clock, burst=1)
    for cause in ("a", "a", "a", "b"):
        limit.admit(cause)
    assert limit.overdue() == []
    clock.now_s = 5.0
    assert limit.overdue() == [("a", 2)]
    assert limit.overdue() == []
    limit.admit("c")
    limit.admit("c")
    assert limit.all_suppressed() == [("c", 1)]


def test_causes_do_not_grow_without_end() -> None:
    limit = LogLimit(Clock())
    for number in range(5000):
        assert limit.admit(number) == 0
    assert len(limit._buckets) == 1000
