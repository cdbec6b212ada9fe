"""Forecasts: what has been measured, nothing at first, and nothing that is old."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.admission.forecast import BusyRate, Forecast, Latency, retry_after_s


class Clock:
    """Seconds that tests move on."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_nothing_is_known_at_the_start() -> None:
    forecast = Forecast(Clock())
    assert forecast.first_token_s(1000, 10) is None
    assert forecast.permits_s(1) is None
    assert forecast.first_token.expected_s(10) == 0
    assert retry_after_s(forecast.permits_s(1), 1.0) == 1.0


def test_a_rate_counts_busy_time_only() -> None:
    clock = Clock()
    rate = BusyRate(clock)
    rate.did(1000)  # while nobody waits: says nothing about what could have been done
    assert rate.wait_s(1) is None
    for _ in range(3):
        rate.begin()
        clock.now_s += 2
        rate.did(20)
        rate.end()
        clock.now_s += 20
    assert rate.wait_s(40) == pytest.approx(4 + 2)


def test_a_rate_follows_changes() -> None:
    clock = Clock()
    rate = BusyRate(clock)
    rate.begin()
    for pace_s in (1.0, 0.1):
        for _ in range(300):
            clock.now_s += pace_s
            rate.did(10)
        assert rate.wait_s(0) == pytest.approx(pace_s, rel=0.01)
        assert rate.wait_s(40) == pytest.approx(5 * pace_s, rel=0.01)


def test_batches_are_waited_for() -> None:
    clock = Clock()
    rate = BusyRate(clock)
    rate.begin()
    for _ in range(100):
        clock.now_s += 4.0
        for _ in range(4):
            rate.did(10)
    assert rate.wait_s(0) == pytest.approx(4)
    assert rate.wait_s(80) == pytest.approx(8 + 4, rel=0.05)


def test_a_rate_sinks_while_nothing_gets_done() -> None:
    clock = Clock()
    rate = BusyRate(clock)
    rate.begin()
    clock.now_s += 1
    rate.did(10)
    clock.now_s += 9
    assert rate.wait_s(10) == pytest.approx(10 + 8.2)
    rate.did(10)
    assert rate.wait_s(10) == pytest.approx(5 + 8.2, rel=0.05)


def test_what_is_old_is_forgotten() -> None:
    clock = Clock()
    forecast = Forecast(clock)
    forecast.queue.begin()
    clock.now_s += 1
    first_token = forecast.placed(10)
    clock.now_s += 1
    first_token()
    forecast.queue.end()
    assert forecast.first_token_s(0, 10) is not None
    assert forecast.first_token.expected_s(10) > 0
    clock.now_s += 61
    assert forecast.first_token_s(0, 10) is None
    assert forecast.first_token.expected_s(10) == 0


def test_the_wait_is_the_queue_ahead_and_the_way_to_the_first_token() -> None:
    clock = Clock()
    forecast = Forecast(clock)
    forecast.queue.begin()
    for _ in range(50):
        clock.now_s += 0.5
        first_token = forecast.placed(100)  # 200 tokens a second
        first_token()
    for _ in range(200):
        forecast.first_token.record(0.25, 100)
    assert forecast.first_token_s(900, 50) == pytest.approx(1.2 * (4.5 + 0.5) + 0.25, rel=0.01)


@given(st.lists(st.floats(0.01, 10), min_size=1), st.integers(1, 1000))
def test_latencies(measured: list[float], size: int) -> None:
    latency = Latency(Clock())
    for seconds in measured:
        latency.record(seconds, size)
    assert latency.expected_s(size) >= min(measured)
    assert latency.expected_s(1) == pytest.approx(latency.expected_s(size))
    assert latency.expected_s(3 * size) == pytest.approx(3 * latency.expected_s(size))


def test_a_retry_is_neither_at_once_nor_never() -> None:
    assert [retry_after_s(s) for s in (0.0, 3.0, 1e9)] == [0.1, 3.0, 60.0]
