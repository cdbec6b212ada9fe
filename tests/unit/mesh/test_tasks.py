"""Delays between attempts."""

from mesh.tasks import Backoff


def test_delays_grow_and_begin_again_after_an_attempt_that_lasted() -> None:
    backoff = Backoff(0.5, 30.0)
    assert [backoff.next_s(1.0) for _ in range(8)] == [0.5, 1, 2, 4, 8, 16, 30, 30]
    assert backoff.next_s(31.0) == 0.5
    assert backoff.next_s(1.0) == 1
