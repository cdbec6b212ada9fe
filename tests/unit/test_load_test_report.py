"""Figures of a load test: percentiles, knee, goodput, price. Their report survives its file, with all plots."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.domain.errors import ConfigurationError
from tandem_cli.load_test.benchmark import Case, Kind
from tandem_cli.load_test.figures import (
    ARRIVED,
    BEGUN,
    BURST,
    OVER,
    STEADY,
    Median,
    Outcome,
    Record,
    Run,
    Slo,
    blended_price_per_million,
    burst_figures,
    disturbed_until_s,
    figures,
    goodput,
    knee,
    medians,
    percentile,
    price_per_million,
)
from tandem_cli.load_test.plots import draw
from tandem_cli.load_test.report import Point, Report, show
from tandem_cli.terminal import wide_console

SLO = Slo(ttft_ms=100, tpot_ms=20, share=0.9)
REPORT_SLO = Slo(ttft_ms=100, tpot_ms=20)
BURST_SHAPE = {"num_streams": 1, "tokens": 100}
MACHINE = {"cpu": "a cpu", "cores_allowed": 2, "tandem": "0"}


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


def answer(ttft_s: float, gap_s: float) -> Record:
    times = [round(ttft_s + place * gap_s, 6) for place in range(4)]
    return Record(0.0, 4, "", times, 8, 4, times[-1], Outcome.OK)


def report_of(kind: Kind, points: list[tuple[str, float, Run]]) -> Report:
    cases = [Point(arm, Case(kind, value, 8, 4), [run]) for arm, value, run in points]
    return Report({"burst": BURST_SHAPE}, MACHINE, REPORT_SLO, 1.0, points=cases)


def burst_run() -> Run:
    """One stream with a token every 10 ms; after the burst at 1 s, every 100 ms until 1.5 s."""
    steady = [n / 100 for n in (*range(100), *range(100, 150, 10), *range(150, 200))]
    records = [Record(0.0, 999, STEADY, steady, 1, 0, 2.0, Outcome.STOPPED)]
    records += [Record(1.0, 4, BURST, [at, at + 0.25], 100, 2, at + 0.25, Outcome.OK) for at in (1.2, 1.5)]
    return Run(records, 2.0, marks={BEGUN: 0.0, ARRIVED: 1.0, OVER: 1.75})


def test_a_burst_is_told_from_what_was_before() -> None:
    run = burst_run()
    found = burst_figures(run, REPORT_SLO)
    assert disturbed_until_s(run) == 1.5
    assert found["burst_prefill_ms"] == pytest.approx(500)
    assert found["steady_gap_before_p50_ms"] == pytest.approx(10)
    assert found["steady_gap_during_p50_ms"] == pytest.approx(100)
    assert (found["num_ok"], found["num_errors"]) == (2, 0)


def failed(error: str) -> Record:
    return Record(1.0, 4, BURST, end_s=1.5, outcome=Outcome.ERROR, error=error)


def single_token() -> Record:
    return Record(0.0, 1, "", [0.5], 8, 1, 0.5, Outcome.OK)


def failed_burst() -> Run:
    run = burst_run()
    return replace(run, records=[run.records[0], failed("out of memory")])


def shown(report: Report, capsys: pytest.CaptureFixture[str]) -> str:
    show(report, wide_console())
    return capsys.readouterr().out


def test_a_burst_without_a_first_token_has_no_time_of_its_last(capsys: pytest.CaptureFixture[str]) -> None:
    assert disturbed_until_s(failed_burst()) is None
    found = burst_figures(failed_burst(), REPORT_SLO)
    assert "steady_gap_before_p50_ms" in found
    assert [name for name in found if "during" in name or name == "burst_prefill_ms"] == []
    lines = shown(report_of(Kind.BURST, [("a", 2, failed_burst())]), capsys).splitlines()
    (row,) = [line for line in lines if "burst 2 " in line and "│" in line]
    assert [cell.strip() for cell in row.split("│")[-4:-1]] == ["- / - / -", "-", "-"]


def test_errors_are_shown_as_the_server_told_them(capsys: pytest.CaptureFixture[str]) -> None:
    text = "unexpected token [/INST] after [bold] :warning:"
    assert f"1 x {text}\n" in shown(report_of(Kind.RATE, [("a", 1, Run([failed(text)], 1.0))]), capsys)


def test_a_report_that_cannot_be_written_is_told_by_name(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=str(tmp_path)):
        report_of(Kind.RATE, [("a", 1, Run([failed("gone")], 1.0))]).save(tmp_path)


@pytest.mark.parametrize(
    ("report", "plot"),
    [
        (
            report_of(Kind.CONCURRENCY, [("a", n, Run([answer(n * n, 0.01)] * 2, 1 + n / 4)) for n in (1, 2, 4)]),
            "latency-throughput",
        ),
        (report_of(Kind.CONCURRENCY, [(arm, 8, Run([answer(1, 0.1)], 1.0)) for arm in ("a", "b")]), "throughput"),
        (report_of(Kind.RATE, [("a", n, Run([answer(n / 20, 0.01)], 1.0)) for n in (1, 2, 4)]), "goodput"),
        (report_of(Kind.RATE, [("a", 1, Run([Record(0.0, 4, outcome=Outcome.ERROR)], 1.0))]), "goodput"),
        (report_of(Kind.BURST, [("a", 2, burst_run()), ("b", 2, burst_run())]), "burst"),
        (report_of(Kind.BURST, [("a", 2, failed_burst())]), "burst"),
        (report_of(Kind.CONCURRENCY, [("a", n, Run([single_token()], 1.0)) for n in (1, 2)]), "latency-throughput"),
        (report_of(Kind.CONCURRENCY, [("a", n, Run([failed("gone")], 1.0)) for n in (1, 2)]), "latency-throughput"),
        (report_of(Kind.RATE, [("a", 1, Run([single_token()], 1.0))]), "goodput"),
    ],
)
def test_a_report_survives_its_file_with_its_plots(report: Report, plot: str, tmp_path: Path) -> None:
    report.save(tmp_path / "report.json")
    again = Report.load(tmp_path / "report.json")
    assert again.points == report.points
    assert (again.slo, again.price_per_hour) == (report.slo, report.price_per_hour)
    (drawn,) = draw(again, tmp_path)
    assert drawn.name == f"{plot}.png"
    assert drawn.read_bytes().startswith(b"\x89PNG")


def test_series_have_a_knee_and_a_goodput() -> None:
    bent = [("a", n, Run([answer(latency, 0.0)], 4 / rate)) for n, rate, latency in [(1, 9, 1), (2, 17, 1), (4, 18, 2)]]
    (series,) = report_of(Kind.CONCURRENCY, bent).series()
    knee = series.knee(REPORT_SLO)
    assert knee is not None
    assert knee.case.value == 2
    (rates,) = report_of(Kind.RATE, [("a", n, Run([answer(n / 20, 0.01)], 1.0)) for n in (4, 1, 2)]).series()
    assert rates.goodput(REPORT_SLO) == 2


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"format": "other"}', '{"format": "tandem-bench/1"}'])
def test_other_files_are_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "file.json").write_text(content)
    with pytest.raises(ConfigurationError):
        Report.load(tmp_path / "file.json")
