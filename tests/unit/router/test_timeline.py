"""Phases of a request: they follow each other and add up to the whole, whatever came in which order."""

from dataclasses import astuple
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.timeline import AttemptEvents, AttemptPhases, Timeline, timing_of

EVENTS = ("placed", "prefill_started", "prefill_finished", "transfer_finished", "decode_started")


class Clock:
    """Monotonic seconds, moved by hand."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_separated_request_phase_by_phase() -> None:
    clock = Clock()
    timeline = Timeline(clock)
    clock.now_s += 1
    timeline.begin_attempt()
    for event, seconds in zip(EVENTS, (2, 3, 4, 5, 6), strict=True):
        clock.now_s += seconds
        timeline.mark(event)
    timeline.mark("first_token")
    clock.now_s += 7
    timing = timeline.timing()
    assert timing.prepare_s == 1
    assert timing.attempts[0].phases == AttemptPhases(2, 3, 4, 5, 6, 7, 0)
    assert (timing.first_token_s, timing.total_s) == (21, 28)


def test_a_worker_says_how_long_ago_its_pass_began() -> None:
    clock = Clock()
    timeline = Timeline(clock)
    timeline.begin_attempt()
    timeline.mark("placed")
    clock.now_s += 10
    timeline.mark("prefill_started", ago_s=4)
    phases = timeline.timing().attempts[0].phases
    assert (phases.dispatch_s, phases.prefill_s) == (6, 4)


def test_a_replay_is_an_attempt_of_its_own_and_the_log_has_the_first_events() -> None:
    clock = Clock()
    timeline = Timeline(clock)
    timeline.begin_attempt()
    timeline.mark("placed")
    timeline.mark("prefill_started")
    clock.now_s += 3
    timeline.end_attempt()
    clock.now_s += 0.5
    timeline.begin_attempt()
    clock.now_s += 1
    timeline.mark("placed")
    clock.now_s += 2
    timing = timeline.timing()
    assert [attempt.phases for attempt in timing.attempts] == [
        AttemptPhases(0, 0, 3, 0, 0, 0, 0.5),
        AttemptPhases(1, 2, 0, 0, 0, 0, 0),
    ]
    assert timing.total_s == 6.5
    assert timeline.as_fields() == {"queued_ms": 0, "placed_ms": 0, "prefill_started_ms": 0, "attempts": 2}


@pytest.mark.parametrize(
    ("events", "failing"),
    [(0, "queue_s"), (1, "dispatch_s"), (2, "prefill_s"), (3, "transfer_s"), (4, "wait_s"), (5, "decode_s")],
)
def test_a_failure_belongs_to_the_phase_it_came_in(events: int, failing: str) -> None:
    at_s = {"queued": 0.0} | dict.fromkeys(EVENTS[:events], 1.0)
    (attempt,) = timing_of([AttemptEvents(at_s, ended_s=9.0)], 0.0).attempts
    assert getattr(attempt.phases, failing) == (9.0 if failing == "queue_s" else 8.0)


def test_tokens_that_overtake_the_transfers_end_make_no_negative_phase() -> None:
    at_s = {"queued": 0.0, "placed": 1.0, "prefill_started": 2.0, "decode_started": 5.0, "prefill_finished": 6.0}
    (attempt,) = timing_of([AttemptEvents(at_s, ended_s=8.0)], 5.0).attempts
    assert attempt.phases == AttemptPhases(1, 1, 3, 0, 0, 3, 0)


SECONDS = st.floats(0, 1000, allow_nan=False)


@given(st.lists(st.tuples(SECONDS, st.dictionaries(st.sampled_from(EVENTS), SECONDS), SECONDS), min_size=1, max_size=4))
def test_phases_are_never_negative_and_add_up(drawn: list[tuple[float, dict[str, float], float]]) -> None:
    points = list(accumulate(second for before, _, within in drawn for second in (before, within)))
    attempts = [
        AttemptEvents({"queued": points[2 * number], **events}, ended_s=points[2 * number + 1])
        for number, (_, events, _) in enumerate(drawn)
    ]
    timing = timing_of(attempts, 0.0)
    assert timing.total_s == pytest.approx(points[-1])
    for attempt in timing.attempts:
        assert min(astuple(attempt.phases)) >= 0
