"""Limits, the Pareto front, and the rule of the choice."""

from collections.abc import Sequence
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_cli.optimization.candidates import BASE, USUAL, Candidate, Layout
from tandem_cli.optimization.choice import (
    OTHER_LOAD,
    CandidateResult,
    PrecisionQuality,
    choose,
    order,
    over_limits,
    pareto,
    survivors,
    thriftiest,
    undecided,
    why_not,
)
from tandem_cli.optimization.recipe import Recipe

GOOD = PrecisionQuality(top1_agreement=1.0, mean_kl=0.0, perplexity=2.0, base_perplexity=2.0)


def result(
    speed: float, precision: str = BASE, *, speculation: str = "none", layout: Layout = USUAL, ttft: float = 100.0
) -> CandidateResult:
    figures = {"output_tokens_per_s": speed, "ttft_p99_ms": ttft, "gap_p99_ms": 10.0, "num_ok": 16.0}
    return CandidateResult(Candidate(precision, speculation, layout), {0: figures})


def test_the_fastest_is_chosen() -> None:
    slow, fast = result(100), result(200, "int8")
    choice = choose([slow, fast])
    assert choice is not None
    assert (choice.result, choice.equal) == (fast, ())


@pytest.mark.parametrize(("speed", "is_simple"), [(199, True), (191, True), (189, False)])
def test_of_equally_fast_ones_the_simpler_one_is_chosen(speed: float, is_simple: bool) -> None:
    simple, fast = result(speed, "int8"), result(200, "gptq", speculation="ngram")
    choice = choose([fast, simple])
    assert choice is not None
    assert choice.result is (simple if is_simple else fast)
    assert choice.equal == ((fast.candidate.name,) if is_simple else ())


def test_the_order_of_equally_fast_ones() -> None:
    """Fewer processes, then less memory, then fewer parts; a few percent of memory are no less."""
    few, small, plain, other = (
        result(200, "gptq", layout=Layout(0, 1)),
        result(201, "int4", layout=Layout(0, 2)),
        result(202, "int8", layout=Layout(0, 2)),
        result(203, "gptq", layout=Layout(0, 2)),
    )
    for each, memory in ((few, 9e9), (small, 5e9), (plain, 8.1e9), (other, 8e9)):
        each.rounds[0]["memory_bytes"] = memory
    expected = [few, small, plain, other]
    for shuffled in permutations(expected):
        assert thriftiest(shuffled) == expected
        choice = choose(shuffled)
        assert choice is not None
        assert choice.result is few


def test_one_bad_round_decides_nothing() -> None:
    slow, fast = result(100), result(120, "int8")
    for number, speeds in ((1, (101, 119)), (2, (99, 60)), (3, (100, 121))):
        for each, speed in zip((slow, fast), speeds, strict=True):
            each.rounds[number] = each.rounds[0] | {"output_tokens_per_s": speed}
    choice = choose([slow, fast])
    assert choice is not None
    assert choice.result is fast


def test_who_is_measured_again() -> None:
    fast, near, far = result(200), result(190, "int8"), result(100, "int4")
    assert undecided([fast, near, far], before=1) == [fast, near, far], "one round says nothing of noise"
    for number, speeds in ((1, (200, 194, 101)), (2, (200, 187, 100)), (3, (200, 191, 102))):
        for each, speed in zip((fast, near, far), speeds, strict=True):
            each.rounds[number] = each.rounds[0] | {"output_tokens_per_s": speed}
    assert undecided([fast, near, far], before=4) == [fast, near]
    assert undecided([fast, far], before=4) == []
    assert undecided([fast], before=4) == []


RECORDED = {
    "awq, 2 colocated": (2747, 2284),
    "int8, 2 colocated": (2235, 2262),
    "awq, 1 colocated": (1866, 2190),
    "base, 1 prefill + 1 decode": (1748, 1843),
}
"""Tokens/s of two rounds of 600 requests on two cores that other processes used, too."""


def recorded(rounds: Sequence[int], other_load: Sequence[float] = (0.0, 0.0)) -> dict[str, CandidateResult]:
    layouts = {layout.name: layout for layout in (USUAL, Layout(0, 1), Layout(0, 2))}
    results = {}
    for name, speeds in RECORDED.items():
        precision, _, layout = name.partition(", ")
        results[name] = CandidateResult(Candidate(precision, "none", layouts[layout]))
        for number in rounds:
            figures = {"output_tokens_per_s": float(speeds[number]), "num_ok": 600.0, OTHER_LOAD: other_load[number]}
            results[name].rounds[number] = figures
    return results


@pytest.mark.parametrize(("round_number", "chosen"), [(0, "awq, 2 colocated"), (1, "awq, 1 colocated")])
def test_recorded_rounds_would_choose_otherwise_one_by_one(round_number: int, chosen: str) -> None:
    choice = choose([*recorded([round_number]).values()])
    assert choice is not None
    assert choice.result.candidate.name == chosen


def test_recorded_rounds_leave_open_who_is_as_fast() -> None:
    results = recorded([0, 1])
    names = [result.candidate.name for result in undecided([*results.values()], before=2)]
    assert names[0] == "awq, 2 colocated"
    assert set(names) == set(RECORDED), "two rounds that far apart exclude nobody"


def test_disturbed_rounds_count_only_where_no_others_are_left() -> None:
    first, second = recorded([0, 1], (0.0, 0.4)), recorded([0, 1], (0.0, 0.05))
    for results in (first, second):
        for number in (2, 3):
            for name, result in results.items():
                figures = {"output_tokens_per_s": float(RECORDED[name][0]), "num_ok": 600.0, OTHER_LOAD: 0.0}
                result.rounds[number] = figures
    ratio = 2235 / 2747
    for results, count in ((first, 3), (second, 4)):
        ratios = results["int8, 2 colocated"].speedups(results["awq, 2 colocated"])
        assert len(ratios) == count
        assert ratios[0] == pytest.approx(ratio)
    alone = recorded([0, 1], (0.4, 0.4))
    assert len(alone["int8, 2 colocated"].speedups(alone["awq, 2 colocated"])) == 2


def test_a_disturbed_candidate_stays_in_by_the_speed_it_might_have_had() -> None:
    disturbed, slower, fast = result(150, "int8"), result(200, "int4"), result(300)
    disturbed.rounds[0][OTHER_LOAD] = 0.5
    assert {each.candidate.precision for each in survivors([disturbed, slower, fast], Recipe(), 2)} == {"int8", BASE}
    choice = choose([disturbed, slower])
    assert choice is not None
    assert choice.result is slower, "nothing is chosen by a hope"


def test_of_those_about_as_fast_as_the_last_the_thriftiest_survive() -> None:
    best, many, few = result(300), result(203, layout=Layout(0, 4)), result(200, layout=Layout(0, 1))
    assert survivors([best, many, few], Recipe(), 2) == [best, few]
    assert survivors([best, many, few], Recipe(), 1) == [best]


def test_nothing_to_choose_from() -> None:
    assert choose([]) is None


def test_the_longest_rounds_count() -> None:
    measured = result(500)
    for number, speed in ((2, 100.0), (3, 120.0)):
        measured.rounds[number] = {"output_tokens_per_s": speed, "num_ok": 128.0}
    assert measured.figures == {"output_tokens_per_s": 110.0, "num_ok": 128.0}


def test_speeds_are_compared_in_the_same_rounds() -> None:
    base, early, late = result(100), result(150), result(150)
    for number, speed in ((2, 40.0), (3, 60.0)):
        base.rounds[number] = {"output_tokens_per_s": speed, "num_ok": 128.0}
        late.rounds[number] = {"output_tokens_per_s": 2 * speed, "num_ok": 128.0}
    assert (base.speedup(base), early.speedup(base), late.speedup(base)) == (1.0, 1.5, 2.0)


def test_limits_order_before_speed() -> None:
    recipe = Recipe(slo_ttft=200.0, slo_itl=20.0)
    slow, late, later = result(10), result(300, ttft=250.0), result(400, ttft=300.0)
    assert over_limits(late.figures, recipe) == {"ttft_p99_ms": 1.25}
    assert sorted([later, late, slow], key=lambda each: order(each, recipe)) == [slow, late, later]
    assert why_not(late, GOOD, recipe) == "TTFT p99 is 1.25 x its limit"
    assert why_not(slow, GOOD, recipe) is None


def test_quality() -> None:
    recipe = Recipe(max_quality_loss=0.01)
    assert PrecisionQuality(perplexity=2.01, base_perplexity=2.0).loss == pytest.approx(0.005)
    judged = PrecisionQuality(perplexity=9.0, base_perplexity=2.0, score=0.99, base_score=1.0)
    assert judged.loss == pytest.approx(0.01), "the user's judge decides"
    assert why_not(result(1), judged, recipe) is None
    worse = PrecisionQuality(score=0.5, base_score=0.6)
    assert why_not(result(1), worse, recipe) == "loses 16.7% of the quality, over 1.0%"
    assert why_not(result(1), PrecisionQuality(score=0.7, base_score=0.6), recipe) is None
    assert PrecisionQuality(score=0.0, base_score=0.0).loss == 0.0
    assert why_not(result(1), PrecisionQuality(), recipe) == "its quality is not known"


def test_speculation_that_changes_answers_is_out() -> None:
    changed = result(1, speculation="ngram")
    changed.num_changed = 2
    assert why_not(changed, GOOD, Recipe()) == "speculation changed 2 answers"
    other = result(1)
    other.num_changed = 2
    assert why_not(other, GOOD, Recipe()) is None


def test_the_best_survive() -> None:
    results = [result(speed) for speed in range(1, 10)]
    assert [each.figures["output_tokens_per_s"] for each in survivors(results, Recipe(), 3)] == [9, 8, 7]


def test_the_front() -> None:
    assert pareto([(1, 3), (2, 2), (3, 1), (3, 3), (2, 2)]) == [True, True, True, False, True]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=12))
def test_each_point_is_on_the_front_or_beaten_by_one_that_is(points: list[tuple[int, int, int]]) -> None:
    marks = pareto(points)
    front = [point for point, mark in zip(points, marks, strict=True) if mark]
    for point, mark in zip(points, marks, strict=True):
        others = [other for other in front if other != point]
        is_beaten = any(all(a <= b for a, b in zip(other, point, strict=True)) for other in others)
        assert is_beaten is not mark
