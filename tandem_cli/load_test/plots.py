"""Draws the plots of a report. Needs matplotlib, which is part of the extra `bench`.

The colours are those of Okabe and Ito, which colour-blind people can distinguish; markers differ too.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from tandem_cli.load_test.benchmark import Kind
from tandem_cli.load_test.figures import ARRIVED, BEGUN, Run, disturbed_until_s, gaps_over_time
from tandem_cli.load_test.report import Point, Report, Series

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_GREY = "#666666"
_MARK = "#000000"
_STYLE: dict[Any, Any] = {
    "figure.dpi": 150,
    "figure.constrained_layout.use": True,
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e5e5e5",
    "legend.frameon": False,
}
_BIN_S = 0.1


def draw(report: Report, folder: Path) -> list[Path]:
    """Write the plots for the kind of load of `report`; returns their paths."""
    kinds: dict[Kind, tuple[str, Callable[[Report], Figure]]] = {
        Kind.CONCURRENCY: ("latency-throughput", latency_against_throughput),
        Kind.RATE: ("goodput", goodput_against_rate),
        Kind.BURST: ("burst", burst_timeline),
    }
    series = report.series()
    if not series:
        return []
    name, make = kinds.get(series[0].kind, ("throughput", throughput_bars))
    if series[0].kind is Kind.CONCURRENCY and all(len(line.points) == 1 for line in series):
        name, make = "throughput", throughput_bars
    with mpl.rc_context(_STYLE):
        figure = make(report)
        figure.text(0.995, 0.005, _provenance(report), ha="right", va="bottom", fontsize=7, color=_GREY)
        path = folder / f"{name}.png"
        figure.savefig(path)
    return [path]


def latency_against_throughput(report: Report) -> Figure:
    """Time per token and TTFT against throughput. Points are labelled with the concurrency; a ring marks the knee."""
    figure = Figure(figsize=(12, 4.8))
    axes = figure.subplots(1, 2)
    for index, series in enumerate(report.series()):
        for panel, name in zip(axes, ("tpot", "ttft"), strict=True):
            _curve(panel, report, series, name, index)
    for panel, title in zip(axes, ("Time per output token", "Time to first token"), strict=True):
        panel.set(title=title, xlabel="throughput, output tokens/s", ylabel="ms")
        if math.isfinite(panel.dataLim.xmax):  # else it has no point: no answer had two tokens, or none came
            panel.set_xlim(0, 1.08 * panel.dataLim.xmax)
            panel.set_ylim(-0.03 * panel.dataLim.ymax, 1.08 * panel.dataLim.ymax)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize=9)
    legend = "lines: p50; whiskers: up to p90; labels: concurrency; ring: knee"
    figure.suptitle(f"Latency against throughput{_lengths(report)}\n{legend}")
    figure.get_layout_engine().set(rect=(0, 0.03, 1, 0.97))  # type: ignore[union-attr, call-arg]
    return figure


def _curve(panel: Axes, report: Report, series: Series, name: str, index: int) -> None:
    figures = [point.figures(report.slo) for point in series.points]
    points = [(p, medians) for p, medians in zip(series.points, figures, strict=True) if f"{name}_p50_ms" in medians]
    x = [medians["output_tokens_per_s"].median for _, medians in points]
    middle = [medians[f"{name}_p50_ms"].median for _, medians in points]
    high = [medians[f"{name}_p90_ms"].median for _, medians in points]
    colour, marker = _colour_and_marker(index)
    panel.vlines(x, middle, high, color=colour, alpha=0.45, linewidth=2)
    knee = series.knee(report.slo)
    label = f"{series.name}\n(knee: {knee.case.value:g})" if knee is not None else series.name
    panel.plot(x, middle, color=colour, marker=marker, label=label)
    offset = (6, 4) if index % 2 == 0 else (6, -12)  # labels of neighbouring curves go to opposite sides
    for (point, _), at_x, at_y in zip(points, x, middle, strict=True):
        text = f"{point.case.value:g}"
        panel.annotate(text, (at_x, at_y), offset, textcoords="offset points", fontsize=8, color=colour)
        if point is knee:
            panel.plot([at_x], [at_y], "o", ms=15, mfc="none", mec=colour, mew=1.8)


def goodput_against_rate(report: Report) -> Figure:
    """The share of good answers, TTFT and time per token against the rate of requests."""
    figure = Figure(figsize=(13, 4.6))
    share, ttft, tpot = figure.subplots(1, 3)
    for index, series in enumerate(report.series()):
        colour, marker = _colour_and_marker(index)
        figures_by_rate = [(point.case.value, point.figures(report.slo)) for point in series.points]
        rates = [rate for rate, medians in figures_by_rate if "slo_share" in medians]
        good = [100 * medians["slo_share"].median for _, medians in figures_by_rate if "slo_share" in medians]
        best = series.goodput(report.slo)
        label = f"{series.name}: " + (f"goodput {best:g}/s" if best is not None else "no goodput")
        share.plot(rates, good, color=colour, marker=marker, label=label)
        if best is not None:
            share.vlines(best, 0, 100 * report.slo.share, color=colour, linestyle=":", linewidth=1.8)
        for panel, name in ((ttft, "ttft"), (tpot, "tpot")):
            times = [
                (rate, medians[f"{name}_p90_ms"].median)
                for rate, medians in figures_by_rate
                if f"{name}_p90_ms" in medians
            ]
            panel.plot(*zip(*times, strict=True), color=colour, marker=marker, label=series.name)
    slo = report.slo
    share.set(title="Requests within both targets", ylabel="% of all requests", ylim=(-3, 105))
    ttft.set(title="Time to first token, p90", ylabel="ms", yscale="log")
    ttft.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    tpot.set(title="Time per output token, p90", ylabel="ms")
    tpot.set_ylim(bottom=0)
    for panel, limit in ((share, 100 * slo.share), (ttft, slo.ttft_ms), (tpot, slo.tpot_ms)):
        panel.axhline(limit, color=_MARK, linestyle="--", linewidth=1, label=f"target: {limit:g}")
        panel.set_xlabel("offered rate, requests/s (Poisson)")
        panel.set_xlim(left=0)
        panel.legend(loc="best", fontsize=8)
    figure.suptitle(f"Goodput against rate{_lengths(report)}")
    figure.get_layout_engine().set(rect=(0, 0.03, 1, 0.97))  # type: ignore[union-attr, call-arg]
    return figure


def burst_timeline(report: Report) -> Figure:
    """Gaps of the steady streams around a burst: one panel per mesh, showing the run with the median disturbance."""
    series = report.series()
    figure = Figure(figsize=(11, 1.4 + 2.8 * len(series)))
    panels = figure.subplots(len(series), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for index, (panel, line) in enumerate(zip(panels, series, strict=True)):
        _timeline(panel, line.points[-1], _colour_and_marker(index)[0])
        panel.set_title(line.name, loc="left", fontweight="bold")
        panel.set(ylabel="gap between tokens, ms", yscale="log")
        panel.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        panel.legend(loc="lower right", bbox_to_anchor=(1, 1), fontsize=8, ncols=4, markerscale=2)
    panels[0].set_ylim(bottom=1)  # shared by all panels; shorter gaps are tokens that arrived together
    panels[-1].set_xlabel("seconds since the burst arrived")
    shape = report.settings["burst"]
    size = f"{series[0].points[-1].case.value:g} prompts of {shape['tokens']:,} tokens"
    figure.suptitle(f"{size} arrive at once beside {shape['num_streams']} steady streams")
    figure.get_layout_engine().set(rect=(0, 0.03, 1, 0.97))  # type: ignore[union-attr, call-arg]
    return figure


def _timeline(panel: Axes, point: Point, colour: str) -> None:
    run = sorted(point.runs, key=_disturbance_s)[len(point.runs) // 2]
    arrived = run.marks[ARRIVED]
    gaps = [(at - arrived, gap) for at, gap in gaps_over_time(run.records) if at > run.marks[BEGUN]]
    if disturbed_until_s(run) is not None:
        panel.axvspan(0, _disturbance_s(run), color="#f0e442", alpha=0.35, label="burst being prefilled")
    panel.axvline(0, color=_MARK, linewidth=1.5, label="burst arrives")
    times, lengths = [at for at, _ in gaps], [1000 * gap for _, gap in gaps]
    panel.scatter(times, lengths, s=6, color=colour, alpha=0.35, linewidths=0, label="one gap of one stream")
    longest = _longest_by_bin(gaps)
    middles = [(bin_number + 0.5) * _BIN_S for bin_number in sorted(longest)]
    highest = [1000 * longest[bin_number] for bin_number in sorted(longest)]
    panel.plot(middles, highest, color=colour, linewidth=1.3, label="longest at the time")


def _disturbance_s(run: Run) -> float:
    """Seconds until the last first token of the burst; infinite if none of its prompts had one."""
    until_s = disturbed_until_s(run)
    return math.inf if until_s is None else until_s - run.marks[ARRIVED]


def _longest_by_bin(gaps: Sequence[tuple[float, float]]) -> dict[int, float]:
    """The longest gap that overlaps each bin of time, by the number of the bin."""
    longest: dict[int, float] = {}
    for end_s, gap_s in gaps:
        for bin_number in range(math.floor((end_s - gap_s) / _BIN_S), math.floor(end_s / _BIN_S) + 1):
            longest[bin_number] = max(gap_s, longest.get(bin_number, 0.0))
    return longest


def throughput_bars(report: Report) -> Figure:
    """Throughput of several meshes under one load. Whiskers reach from the slowest to the fastest run."""
    points = [(series.name, point) for series in report.series() for point in series.points]
    figure = Figure(figsize=(max(5.0, 1.6 * len(points) + 2), 4.4))
    panel = figure.subplots()
    for position, (_, point) in enumerate(points):
        rate = point.figures(report.slo)["output_tokens_per_s"]
        whisker = [[rate.median - rate.low], [rate.high - rate.median]] if len(point.runs) > 1 else None
        panel.bar(position, rate.median, 0.6, color=_colour_and_marker(0)[0], yerr=whisker, capsize=5, ecolor=_MARK)
        panel.annotate(f"{rate.median:.0f}", (position, rate.median / 2), ha="center", color="white", fontweight="bold")
    many_values = len({point.case.value for _, point in points}) > 1
    names = [f"{name}\n{point.case.label}" if many_values else name for name, point in points]
    panel.set_xticks(range(len(points)), names)
    panel.grid(axis="x", visible=False)
    panel.set_ylabel("output tokens/s")
    figure.suptitle(f"Throughput, {points[0][1].case.label}{_lengths(report)}")
    figure.get_layout_engine().set(rect=(0, 0.04, 1, 0.96))  # type: ignore[union-attr, call-arg]
    return figure


def _colour_and_marker(index: int) -> tuple[str, str]:
    return _COLOURS[index % len(_COLOURS)], _MARKERS[index % len(_MARKERS)]


def _lengths(report: Report) -> str:
    cases: Sequence[tuple[int, int]] = sorted(
        {(point.case.input_tokens, point.case.output_tokens) for point in report.points}
    )
    return f": {cases[0][0]} tokens in, {cases[0][1]} out" if len(cases) == 1 and cases[0][0] else ""


def _provenance(report: Report) -> str:
    machine, num_runs = report.machine, len(report.points[0].runs)
    runs = f"medians of {num_runs} runs" if num_runs > 1 else "one run"
    return f"{machine['cpu']}, {machine['cores_allowed']} cores; {runs}; tandem {machine['tandem']}"
