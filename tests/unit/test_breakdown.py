"""Shares, percentiles and bars of requests whose phases are known."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem import AttemptTiming, Timing
from tandem_cli.breakdown import TimedRequest, bar, median_request, summarise


def sample(total_ms: float, **phases_ms: float) -> TimedRequest:
    spent_ms = sum(phases_ms.values())
    return TimedRequest("r", total_ms, Timing(spent_ms, 0.0, 0.0, (AttemptTiming(**phases_ms),)))


def test_shares_and_percentiles() -> None:
    samples = [sample(100, prefill_ms=20, decode_ms=70), sample(300, prefill_ms=60, decode_ms=200)]
    rows = {row.name: row for row in summarise(samples)}
    assert rows["client"].percentiles_ms[0] == 25  # the mean of 10 and 40: the median of two
    assert rows["prefill"].share == pytest.approx(80 / 400)
    assert rows["total"].percentiles_ms[0] == 200
    assert sum(row.share for row in rows.values()) == pytest.approx(2)  # the phases, and the whole
    assert median_request(samples).total_ms == 300


def test_a_bar_has_the_phases_in_order_and_a_replay_begins_again() -> None:
    first = AttemptTiming(queue_ms=10, prefill_ms=20, backoff_ms=10)
    second = AttemptTiming(queue_ms=10, prefill_ms=20, decode_ms=30)
    replayed = TimedRequest("r", 100, Timing(100, 0, 0, (first, second)))
    assert bar(replayed, 10) == [
        ("queue", 1),
        ("prefill", 2),
        ("backoff", 1),
        ("queue", 1),
        ("prefill", 2),
        ("decode", 3),
    ]


LENGTHS = st.floats(0, 1000, allow_nan=False)


@given(
    st.builds(AttemptTiming, queue_ms=LENGTHS, prefill_ms=LENGTHS, wait_ms=LENGTHS, decode_ms=LENGTHS),
    st.floats(1, 100),
    st.integers(1, 200),
)
def test_a_bar_is_as_wide_as_asked(attempt: AttemptTiming, client_ms: float, width: int) -> None:
    spent_ms = attempt.queue_ms + attempt.prefill_ms + attempt.wait_ms + attempt.decode_ms
    cells = bar(TimedRequest("r", spent_ms + client_ms, Timing(spent_ms, 0, 0, (attempt,))), width)
    assert sum(count for _, count in cells) == width
