"""Figures of the load generator: percentiles, knee, goodput, price."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_cli.load_test.figures import (
    Median,
    Outcome,
    Record,
    Run,
    Slo,
    blended_price_per_million,
    figures,
    goodput,
    knee,
    medians,
    percentile,
    price_per_million,
)

SLO = Slo(ttft_ms=100, tpot_ms=20, share=0.9)


def ok(ttft_s: float, tpot_s: float, num_tokens: int = 5) -> Record:
    times = [1.0 + ttft_s + place * tpot_s for place in range(num_tokens)]
    return Record(1.0, num_tokens, "", times, 15, num_tokens, times[-1], Outcome.OK)


def test_percentiles_are_linear_between_neighbours() -> None:
    assert [percentile(range(101), percent) for percent in (50, 90, 99)] == [50, 90, 99]
    assert percentile([1.0, 2.0], 50) == 1.5
    assert (percentile([7.0], 99), percentile([], 99)) == (7.0, 0.0)


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_percentiles_are_in_order_and_within_the_values(values: list[float]) -> None:
    p50, p90, p99 = (percentile(values, percent) for percent in (50, 90, 99))
    slack = 1e-9 * max(values)
    assert min(values) <= p50 + slack
    assert p50 <= p90 + slack
    assert p90 <= p99 + slack
    assert p99 <= max(values) + slack


def test_the_figures_of_a_run() -> None:
    failed = Record(1.0, 5, token_s=[1.01], num_tokens=0, end_s=1.5, outcome=Outcome.ERROR, error="gone")
    refused = Record(1.0, 5, end_s=1.0, outcome=Outcome.REFUSED, error="full")
    good, slow_start, slow_tokens = ok(0.05, 0.01), ok(0.2, 0.01), ok(0.05, 0.03)
    found = figures(Run([good, slow_start, slow_tokens, failed, refused], 2.0, 0.5), SLO)
    assert (found["num_ok"], found["num_errors"], found["num_refused"], found["num_short"]) == (3, 1, 1, 0)
    assert (found["requests_per_s"], found["output_tokens_per_s"], found["input_tokens_per_s"]) == (1.5, 7.5, 22.5)
    assert found["slo_share"] == 1 / 5
    assert found["generator_cpu"] == 0.25
    assert found["ttft_p50_ms"] == pytest.approx(50)
    assert found["tpot_p50_ms"] == pytest.approx(10)
    assert found["latency_p50_ms"] == pytest.approx(170)


def test_time_per_token_is_by_tokens_and_gaps_are_by_messages() -> None:
    record = Record(0.0, 5, token_s=[1.0, 2.0, 3.0], num_tokens=5, outcome=Outcome.OK)
    assert (record.tpot_s, record.gaps_s) == (0.5, [1.0, 1.0])
    single = Record(0.0, 1, token_s=[0.05], num_tokens=1, outcome=Outcome.OK)
    assert single.tpot_s is None
    assert SLO.is_met(single)


def test_a_run_in_which_everything_failed_has_no_good_requests() -> None:
    assert figures(Run([Record(0.0, 5, outcome=Outcome.ERROR)], 1.0), SLO)["slo_share"] == 0


def test_medians_over_runs() -> None:
    assert medians([{"a": 1.0}, {"a": 5.0, "b": 2.0}, {"a": 3.0}]) == {"a": Median(3, 1, 5), "b": Median(2, 2, 2)}


def test_goodput_is_the_highest_rate_with_enough_good_requests() -> None:
    assert goodput([(1, 1.0), (2, 0.9), (4, 0.89)], 0.9) == 2
    assert goodput([(1, 0.5)], 0.9) is None


def test_the_knee_is_where_throughput_over_latency_is_largest() -> None:
    bent = [(100, 10), (190, 11), (350, 14), (400, 28), (410, 60)]
    assert knee(bent) == 2
    assert knee([(100, 10), (200, 10), (400, 10)]) is None  # not bent yet
    assert knee(bent[:2]) is None
    assert knee([(100, 10), (100, 20), (100, 40)]) == 0  # more load brings nothing


def test_prices() -> None:
    assert price_per_million(3.6, 100) == pytest.approx(10)
    assert price_per_million(3.6, 0) is None
    assert blended_price_per_million(3.6, 300, 100) == pytest.approx(2.5)
    assert blended_price_per_million(3.6, 100, 100) is None
