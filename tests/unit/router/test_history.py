"""The history of a router: rates, percentiles, and a day in three resolutions."""

from collections import Counter
from collections.abc import Sequence

import pytest

from mesh.metrics import GAP_SECONDS
from router.history import STEP_S, History, Point, Reading, merged, percentile

NO_GAPS = (0,) * (len(GAP_SECONDS) + 1)


def reading(step: int, generated: dict[str, int], gaps: Sequence[int] = NO_GAPS, **changes: object) -> Reading:
    values = {"computed_tokens": {}, "replays": 0, "failed": 0, "waiting": 0, "running": 0, "kv_used": None}
    return Reading(at_s=step * STEP_S, generated_tokens=generated, gaps=gaps, **(values | changes))


def test_counters_become_what_happened_between_two_readings() -> None:
    history = History()
    history.add(reading(0, {"a": 100}, replays=5))
    assert history.points(60) == []
    history.add(reading(1, {"a": 150, "new": 1000}, replays=6, failed=2, waiting=3, kv_used=0.5))
    history.add(reading(2, {"new": 1030}))  # a is gone
    first, second = history.points(60)
    assert (first.generated_tokens, first.replays, first.failed, first.waiting, first.kv_used) == (50, 1, 2, 3, 0.5)
    assert (second.generated_tokens, second.seconds, second.kv_used) == (30, STEP_S, None)


def test_a_day_is_kept_the_longer_ago_the_coarser() -> None:
    history = History()
    num_readings = int(2 * 86400 / STEP_S)
    for step in range(num_readings + 1):
        history.add(reading(step, {"a": 10 * step}, running=step % 2))
    for span_s, seconds in ((600, 5), (1800, 5), (3600, 60), (6 * 3600, 60), (86400, 300), (10**6, 300)):
        points = history.points(span_s)
        kept_s = min(span_s, 86400)
        assert {point.seconds for point in points} == {seconds}
        assert sum(point.seconds for point in points) == kept_s
        assert sum(point.generated_tokens for point in points) == 10 * kept_s / STEP_S
    assert history.points(86400)[0].running == pytest.approx(0.5)


def test_what_is_not_a_whole_point_yet_is_shown() -> None:
    history = History()
    for step in range(4):
        history.add(reading(step, {"a": 7 * step}))
    (point,) = history.points(86400)
    assert (point.seconds, point.generated_tokens) == (15, 21)


def test_percentiles() -> None:
    bounds = (1.0, 2.0, 4.0)
    assert percentile({}, bounds, 0.5) is None
    assert percentile({0: 1, 1: 2, 2: 1}, bounds, 0.5) == pytest.approx(1.5)
    assert percentile({2: 4}, bounds, 1.0) == 4.0
    assert percentile({1: 1, 3: 9}, bounds, 0.99) == 4.0  # beyond all bounds
    assert percentile({0: 10}, bounds, 0.5) == pytest.approx(0.5)


def test_gaps_are_those_of_the_stretch() -> None:
    history = History()
    history.add(reading(0, {}, (10**6, *NO_GAPS[1:])))
    history.add(reading(1, {}, (10**6, 0, 0, 100, *NO_GAPS[4:])))
    (point,) = history.points(60)
    assert GAP_SECONDS[2] < point.gap_s(0.5) <= GAP_SECONDS[3]
    assert point.first_token_s(0.5) is None


def test_merged_points_weigh_by_their_time() -> None:
    def point(seconds: float, waiting: float, kv_used: float | None) -> Point:
        return Point(seconds, seconds, 1, 2, 0, 1, waiting, 0.0, kv_used, gaps=Counter({1: 1}))

    both = merged([point(1, 4, None), point(3, 0, 0.25)])
    assert (both.seconds, both.generated_tokens, both.computed_tokens, both.failed) == (4, 2, 4, 2)
    assert (both.waiting, both.kv_used, both.gaps) == (1.0, 0.25, Counter({1: 2}))
