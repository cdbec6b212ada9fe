"""Prints a report as tables."""

from collections import Counter
from collections.abc import Mapping
from typing import TypeAlias

from rich.console import Console
from rich.table import Table

from tandem_cli.load_test.figures import PERCENTS, Median, blended_price_per_million, price_per_million
from tandem_cli.load_test.plan import Kind
from tandem_cli.load_test.records import Outcome
from tandem_cli.load_test.report import Point, Report, Series

Figures: TypeAlias = Mapping[str, Median]

_BUSY_GENERATOR = 0.9  # of a core
_SHOWN_ERRORS = 3
_PHASES = ("before", "during")


def show(report: Report, console: Console) -> None:
    """Print the table, then findings, notes and warnings."""
    if not report.points:
        return
    is_burst = report.points[0].case.kind is Kind.BURST
    console.print(_burst_table(report) if is_burst else _load_table(report))
    for line in [*_findings(report), *report.notes, *_warnings(report)]:
        console.print(line, soft_wrap=True, highlight=False)


def _load_table(report: Report) -> Table:
    table = Table(title=_title(report))
    table.add_column("load")
    percents = " / ".join(f"p{percent}" for percent in PERCENTS)
    names = [
        "tokens/s (min..max)" if len(report.points[0].runs) > 1 else "tokens/s",
        "requests/s",
        *(f"{name} ms\n{percents}" for name in _TIMES),
    ]
    for name in (*names, "ok / refused\n/ errors, in all", f"good %\n(≤ {_targets(report)})"):
        table.add_column(name, justify="right")
    if report.price_per_hour is not None:
        table.add_column("$ per M tokens\noutput / blended 3:1", justify="right")
    for series in report.series():
        for point in series.points:
            name = f"{series.name}, {point.case.label}" if len(report.series()) > 1 else point.case.label
            table.add_row(name, *_load_row(point, report))
        if len(series.points) > 1:
            table.add_section()
    return table


_TIMES = {"TTFT": "ttft", "TPOT": "tpot", "token gap": "gap", "latency": "latency"}


def _load_row(point: Point, report: Report) -> list[str]:
    figures = point.figures(report.slo)
    rate = figures["output_tokens_per_s"]
    spread = f" ({rate.low:.1f}..{rate.high:.1f})" if len(point.runs) > 1 else ""
    row = [f"{rate.median:.1f}{spread}", f"{figures['requests_per_s'].median:.2f}"]
    row += [_percentiles(figures, name) for name in _TIMES.values()]
    row.append(" / ".join(str(_total(point, outcome)) for outcome in (Outcome.OK, Outcome.REFUSED, Outcome.ERROR)))
    row.append(f"{100 * figures['slo_share'].median:.0f}" if "slo_share" in figures else "-")
    if report.price_per_hour is not None:
        row.append(_prices(report.price_per_hour, figures))
    return row


def _prices(per_hour: float, figures: Figures) -> str:
    output = figures["output_tokens_per_s"].median
    blended = blended_price_per_million(per_hour, figures["input_tokens_per_s"].median, output)
    prices = (price_per_million(per_hour, output), blended)
    return " / ".join("-" if price is None else f"{price:.3f}" for price in prices)


def _burst_table(report: Report) -> Table:
    table = Table(title=_title(report))
    table.add_column("load")
    for phase in _PHASES:
        table.add_column(f"steady gap {phase}\np50 / p99 / max ms", justify="right")
    for name in ("last first token of\nthe burst after ms", "TTFT of the burst\np50 / p90 / p99 ms"):
        table.add_column(name, justify="right")
    for series in report.series():
        for point in series.points:
            figures = point.figures(report.slo)
            gaps = [
                " / ".join(_ms(figures, f"steady_gap_{phase}_{of}_ms") for of in ("p50", "p99", "max"))
                for phase in _PHASES
            ]
            prefill = _ms(figures, "burst_prefill_ms")
            table.add_row(f"{series.name}, {point.case.label}", *gaps, prefill, _percentiles(figures, "ttft"))
    return table


def _findings(report: Report) -> list[str]:
    """Lines about knees, goodput and the price at the goodput."""
    lines = []
    for series in report.series():
        at = series.knee(report.slo)
        if at is not None:
            lines.append(f"{series.name}: the knee is at {at.case.label}")
        elif series.kind is Kind.CONCURRENCY and len(series.points) > 2:
            lines.append(f"{series.name}: no knee up to {series.points[-1].case.label}: the curve does not bend")
        if series.kind is Kind.RATE:
            lines.append(f"{series.name}: {_goodput(report, series)}")
    return lines


def _goodput(report: Report, series: Series) -> str:
    good = series.goodput(report.slo)
    best = f"{good:g} requests/s" if good is not None else "below all measured rates"
    text = f"goodput {best} ({report.slo.share:.0%} of requests ≤ {_targets(report)})"
    if good is None or report.price_per_hour is None:
        return text
    (point,) = (point for point in series.points if point.case.value == good)
    return f"{text}, at $ {_prices(report.price_per_hour, point.figures(report.slo))} per M tokens"


def _warnings(report: Report) -> list[str]:
    """Lines about problems that make figures doubtful, and the most frequent errors."""
    lines = []
    for point in report.points:
        figures = point.figures(report.slo)
        where = f"{point.arm}, {point.case.label}"
        if "generator_cpu" in figures and figures["generator_cpu"].median > _BUSY_GENERATOR:
            used = figures["generator_cpu"].median
            lines.append(f"{where}: the load generator used {used:.0%} of a core: the server may be faster than shown")
        if figures["num_short"].high and not report.settings.get("data"):
            lines.append(f"{where}: up to {figures['num_short'].high:.0f} answers of a run were shorter than asked")
        errors = sum((Counter(run.errors()) for run in point.runs), Counter[str]())
        lines += [f"{where}: {count} x {text}" for text, count in errors.most_common(_SHOWN_ERRORS)]
    return lines


def _total(point: Point, outcome: Outcome) -> int:
    """The number of requests with this outcome over all runs. A median would hide errors."""
    return sum(len(run.of(outcome)) for run in point.runs)


def _percentiles(figures: Figures, name: str) -> str:
    if f"{name}_p50_ms" not in figures:
        return "-"
    return " / ".join(_ms(figures, f"{name}_p{percent}_ms") for percent in PERCENTS)


def _ms(figures: Figures, name: str) -> str:
    if name not in figures:
        return "-"
    value = figures[name].median
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _targets(report: Report) -> str:
    return f"{report.slo.ttft_ms:g} ms, {report.slo.tpot_ms:g} ms"


def _title(report: Report) -> str:
    first = report.points[0]
    lengths = {(point.case.input_tokens, point.case.output_tokens) for point in report.points}
    tokens = f"{first.case.input_tokens} tokens in, {first.case.output_tokens} out; " if len(lengths) == 1 else ""
    tokens = "" if first.case.input_tokens == 0 or first.case.kind is Kind.BURST else tokens
    num_runs = len(first.runs)
    return f"{tokens}{f'medians of {num_runs} runs' if num_runs > 1 else 'one run'}"
