"""Results survive their file, with all plots."""

from pathlib import Path

import pytest

from mesh.domain.errors import ConfigurationError
from tandem_cli.load_test.benchmark import Case, Kind
from tandem_cli.load_test.figures import (
    ARRIVED,
    BEGUN,
    BURST,
    OVER,
    STEADY,
    Outcome,
    Record,
    Run,
    Slo,
    burst_figures,
    disturbed_until_s,
)
from tandem_cli.load_test.plots import draw
from tandem_cli.load_test.report import Point, Report

SLO = Slo(ttft_ms=100, tpot_ms=20)
BURST_SHAPE = {"num_streams": 1, "tokens": 100}
MACHINE = {"cpu": "a cpu", "cores_allowed": 2, "tandem": "0"}


def answer(ttft_s: float, gap_s: float) -> Record:
    times = [round(ttft_s + place * gap_s, 6) for place in range(4)]
    return Record(0.0, 4, "", times, 8, 4, times[-1], Outcome.OK)


def report_of(kind: Kind, points: list[tuple[str, float, Run]]) -> Report:
    cases = [Point(arm, Case(kind, value, 8, 4), [run]) for arm, value, run in points]
    return Report({"burst": BURST_SHAPE}, MACHINE, SLO, 1.0, points=cases)


def burst_run() -> Run:
    """One stream with a token every 10 ms; after the burst at 1 s, every 100 ms until 1.5 s."""
    steady = [n / 100 for n in (*range(100), *range(100, 150, 10), *range(150, 200))]
    records = [Record(0.0, 999, STEADY, steady, 1, 0, 2.0, Outcome.STOPPED)]
    records += [Record(1.0, 4, BURST, [at, at + 0.25], 100, 2, at + 0.25, Outcome.OK) for at in (1.2, 1.5)]
    return Run(records, 2.0, marks={BEGUN: 0.0, ARRIVED: 1.0, OVER: 1.75})


def test_a_burst_is_told_from_what_was_before() -> None:
    run = burst_run()
    found = burst_figures(run, SLO)
    assert disturbed_until_s(run) == 1.5
    assert found["burst_prefill_ms"] == pytest.approx(500)
    assert found["steady_gap_before_p50_ms"] == pytest.approx(10)
    assert found["steady_gap_during_p50_ms"] == pytest.approx(100)
    assert (found["num_ok"], found["num_errors"]) == (2, 0)


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
    knee = series.knee(SLO)
    assert knee is not None
    assert knee.case.value == 2
    (rates,) = report_of(Kind.RATE, [("a", n, Run([answer(n / 20, 0.01)], 1.0)) for n in (4, 1, 2)]).series()
    assert rates.goodput(SLO) == 2


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"format": "other"}', '{"format": "tandem-bench/1"}'])
def test_other_files_are_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "file.json").write_text(content)
    with pytest.raises(ConfigurationError):
        Report.load(tmp_path / "file.json")
