from dataclasses import replace
from pathlib import Path

import pytest

from mesh.domain.errors import ConfigurationError
from tandem_cli.load_test.jobs import Lengths, read_trace
from tandem_cli.simulation import trace
from tandem_cli.simulation.trace import Arrival, LengthMix

MIX = LengthMix(200, 50, spread=0.5, max_total_tokens=1000)


def test_equal_seeds_draw_equal_requests() -> None:
    assert trace.steady(5, 100, MIX, seed=1) == trace.steady(5, 100, MIX, seed=1)
    assert trace.steady(5, 100, MIX, seed=1) != trace.steady(5, 100, MIX, seed=2)


def test_rate_and_mean_lengths_are_as_asked() -> None:
    arrivals = trace.steady(20, 500, MIX, seed=0)
    assert len(arrivals) == pytest.approx(10_000, rel=0.05)
    assert sum(arrival.input_tokens for arrival in arrivals) / len(arrivals) == pytest.approx(200, rel=0.05)
    assert max(arrival.input_tokens + arrival.output_tokens for arrival in arrivals) <= 1000


def test_a_day_has_a_peak_and_a_low() -> None:
    arrivals = trace.day(0.5, LengthMix(10, 10), seed=0)
    by_hour = [sum(3600 * hour <= arrival.at_s < 3600 * (hour + 1) for arrival in arrivals) for hour in range(24)]
    assert len(arrivals) == pytest.approx(0.5 * 86400, rel=0.05)
    assert by_hour[15] == pytest.approx(1.6 * 1800, rel=0.1)
    assert by_hour[3] == pytest.approx(0.4 * 1800, rel=0.15)


def test_lengths_swing_between_prompts_and_answers() -> None:
    arrivals = trace.steady(10, 1000, LengthMix(100, 100, shift=4), seed=0)
    ends = [each for each in arrivals if not 50 < each.at_s < 950]
    middle = [each for each in arrivals if 450 < each.at_s < 550]
    assert min(each.input_tokens for each in ends) > 360 > 28 > max(each.output_tokens for each in ends)
    assert max(each.input_tokens for each in middle) < 28 < 360 < min(each.output_tokens for each in middle)
    day = trace.day(0.1, LengthMix(100, 100, shift=2), seed=0)
    assert max(day, key=lambda each: each.input_tokens).at_s == pytest.approx(9 * 3600, abs=3600)
    assert trace.steady(10, 100, MIX, seed=0) == trace.steady(10, 100, replace(MIX, shift=1.0), seed=0)


def test_a_written_trace_is_read_here_and_by_the_load_test(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    trace.write(file, [Arrival(1.0, 20, 5), Arrival(2.5, 30, 6)])
    assert trace.read(file) == [Arrival(0.0, 20, 5), Arrival(1.5, 30, 6)]
    jobs = read_trace(file, Lengths())
    assert [(job.arrival_s, len(job.token_ids or ()), job.max_tokens) for job in jobs] == [(0.0, 20, 5), (1.5, 30, 6)]


def test_traces_of_mooncake_are_read(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"timestamp": 3000, "input_length": 40, "output_length": 2, "hash_ids": [1]}\n')
    assert trace.read(file) == [Arrival(0.0, 40, 2)]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"arrival_s": 0, "max_tokens": 1, "prompt": "text"}', "line 1: input_tokens missing: only lengths"),
        ('{"input_tokens": 3, "max_tokens": 1}', "line 1: arrival_s missing"),
        ('{"arrival_s": 0, "max_tokens": 1, "input_tokens": 0}', "line 1: input_tokens must be a whole number"),
        ("[]", "line 1: expected an object"),
    ],
)
def test_bad_lines_are_named(line: str, complaint: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(ConfigurationError, match=complaint):
        trace.read(file)
