"""The results of a sweep: settings, machine and all requests. Its file contains everything that plots need; `show`
prints it as tables.
"""

import json
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, TypeAlias

import psutil
from rich.console import Console
from rich.table import Table

import tandem
from mesh.domain.errors import ConfigurationError
from mesh.domain.json_text import parse_json
from tandem_cli.load_test.benchmark import Case, Kind
from tandem_cli.load_test.figures import (
    PERCENTS,
    Median,
    Outcome,
    Record,
    Run,
    Slo,
    blended_price_per_million,
    burst_figures,
    figures,
    goodput,
    knee,
    medians,
    price_per_million,
)
from tandem_cli.local_mesh.hardware import available_cores
from tandem_cli.terminal import FittingTable

_FORMAT = "tandem-bench/1"
_DIGITS = 6  # microseconds
_PACKAGES = ("torch", "grpcio", "numpy", "numba")
_BUSY_GENERATOR = 0.9  # of a core
_SHOWN_ERRORS = 3
_PHASES = ("before", "during")
_TIMES = {"TTFT": "ttft", "TPOT": "tpot", "token gap": "gap", "latency": "latency"}


@dataclass(slots=True)
class Point:
    """All runs of one case with one arm."""

    arm: str
    case: Case
    runs: list[Run] = field(default_factory=list)

    def figures(self, slo: Slo) -> dict[str, Median]:
        """Median and range of each figure over the runs."""
        of_run = burst_figures if self.case.kind is Kind.BURST else figures
        return medians([of_run(run, slo) for run in self.runs])


@dataclass(frozen=True, slots=True)
class Series:
    """The points of one line in a plot, in order of load. There is at least one."""

    name: str
    points: list[Point]

    @property
    def kind(self) -> Kind:
        return self.points[0].case.kind

    def knee(self, slo: Slo) -> Point | None:
        """The knee of a closed loop; see tandem_cli.load_test.figures.knee."""
        if self.kind is not Kind.CONCURRENCY:
            return None
        of_points = [point.figures(slo) for point in self.points]
        if not all("latency_p50_ms" in each for each in of_points):
            return None
        index = knee([(each["output_tokens_per_s"].median, each["latency_p50_ms"].median) for each in of_points])
        return None if index is None else self.points[index]

    def goodput(self, slo: Slo) -> float | None:
        """The highest rate that meets the targets; see tandem_cli.load_test.figures.goodput."""
        by_rate = [(point.case.value, point.figures(slo)) for point in self.points]
        return goodput([(rate, each["slo_share"].median) for rate, each in by_rate if "slo_share" in each], slo.share)


@dataclass(slots=True)
class Report:
    """Results of `tandem bench`. An interrupted benchmark has the runs that were complete by then, and the exit status
    for its signal; else that is 0.
    """

    settings: dict[str, Any]
    machine: dict[str, Any]
    slo: Slo
    price_per_hour: float | None = None
    notes: list[str] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    interrupted_status: int = 0

    def point(self, arm: str, case: Case) -> Point:
        """The point of this arm and case, created on the first call."""
        for point in self.points:
            if (point.arm, point.case) == (arm, case):
                return point
        self.points.append(Point(arm, case))
        return self.points[-1]

    def series(self) -> list[Series]:
        """The points, grouped by arm and lengths into one series each."""
        lines: dict[tuple[str, int, int], list[Point]] = {}
        for point in self.points:
            key = (point.arm, point.case.input_tokens, point.case.output_tokens)
            lines.setdefault(key, []).append(point)
        arms = {arm for arm, *_ in lines}
        lengths = {tuple(lengths_of_line) for _, *lengths_of_line in lines}
        series = []
        for (arm, tokens_in, tokens_out), points in lines.items():
            labels = [arm] if len(arms) > 1 else []
            labels += [f"{tokens_in} in, {tokens_out} out"] if len(lengths) > 1 else []
            ordered = sorted(points, key=lambda point: point.case.value)
            series.append(Series(", ".join(labels) or arm, ordered))
        return series

    def memory(self) -> dict[str, float]:
        """Mean bytes of a worker, by arm, for meshes that this benchmark started."""
        memory: dict[str, float] = {}
        for arm, about in self.settings.get("endpoints", {}).items():
            sizes = [worker["memory_bytes"] for worker in about.get("workers", ()) if worker.get("memory_bytes")]
            if sizes:
                memory[arm] = sum(sizes) / len(sizes)
        return memory

    def save(self, path: Path) -> None:
        """Write the report as JSON. Raises OSError with the name of the file."""
        content = {
            "format": _FORMAT,
            "settings": self.settings,
            "machine": self.machine,
            "slo": asdict(self.slo),
            "price_per_hour": self.price_per_hour,
            "notes": self.notes,
            "summary": self._summary(),
            "points": [_point_to_json(point, self.slo) for point in self.points],
        }
        try:
            path.write_text(json.dumps(content, separators=(",", ":")) + "\n")
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error  # Python names it at some errors only

    @classmethod
    def load(cls, path: Path) -> "Report":
        """Read a file that `save` wrote. Raises ConfigurationError for any other file."""
        try:
            content = parse_json(path.read_text())
            if content["format"] != _FORMAT:
                raise ConfigurationError(f"{path} has format {content['format']}, not {_FORMAT}")
            points = [_point_from_json(entry) for entry in content["points"]]
            slo = Slo(**content["slo"])
            metadata = {name: content[name] for name in ("settings", "machine", "price_per_hour", "notes")}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(f"{path} holds no results of tandem bench: {error}") from error
        return cls(slo=slo, points=points, **metadata)

    def _summary(self) -> list[dict[str, object]]:
        summary: list[dict[str, object]] = []
        for series in self.series():
            knee = series.knee(self.slo)
            good = series.goodput(self.slo) if series.kind is Kind.RATE else None
            summary.append({"series": series.name, "knee": knee and knee.case.value, "goodput_requests_per_s": good})
        return summary


def _point_to_json(point: Point, slo: Slo) -> dict[str, object]:
    figures = {name: asdict(figure) for name, figure in point.figures(slo).items()}
    return {
        "arm": point.arm,
        "case": asdict(point.case),
        "figures": figures,
        "runs": list(map(_run_to_json, point.runs)),
    }


def _run_to_json(run: Run) -> dict[str, object]:
    return asdict(run) | {"records": [_rounded(asdict(record)) for record in run.records], "errors": run.errors()}


def _rounded(record: Mapping[str, Any]) -> dict[str, object]:
    token_s: Sequence[float] = record["token_s"]
    times = {name: round(record[name], _DIGITS) for name in ("arrival_s", "end_s")}
    return {**record, **times, "token_s": [round(at, _DIGITS) for at in token_s]}


def _point_from_json(entry: Mapping[str, Any]) -> Point:
    case = Case(**{**entry["case"], "kind": Kind(entry["case"]["kind"])})
    return Point(entry["arm"], case, [_run_from_json(run) for run in entry["runs"]])


def _run_from_json(entry: Mapping[str, Any]) -> Run:
    records = [Record(**{**record, "outcome": Outcome(record["outcome"])}) for record in entry["records"]]
    fields = {name: entry[name] for name in ("duration_s", "generator_cpu_s", "marks", "is_streamed")}
    return Run(records=records, **fields)


def describe_machine() -> dict[str, Any]:
    """Hardware, load and versions, which a reader needs in order to compare figures."""
    return {
        "cpu": _cpu_model(),
        "cores_allowed": len(available_cores()),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "load_average": [round(load, 2) for load in psutil.getloadavg()],
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "tandem": tandem.__version__,
        "packages": {name: metadata.version(name) for name in _PACKAGES},
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


Figures: TypeAlias = Mapping[str, Median]


def show(report: Report, console: Console) -> None:
    """Print the table, then findings, notes and warnings."""
    if not report.points:
        return
    is_burst = report.points[0].case.kind is Kind.BURST
    console.print(FittingTable(_burst_table(report) if is_burst else _load_table(report)))
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
    if report.memory():
        table.add_column("MB of\na worker", justify="right")
    if report.price_per_hour is not None:
        table.add_column("$ per M tokens\noutput / blended 3:1", justify="right")
    for series in report.series():
        for point in series.points:
            name = f"{series.name}, {point.case.label}" if len(report.series()) > 1 else point.case.label
            table.add_row(name, *_load_row(point, report))
        if len(series.points) > 1:
            table.add_section()
    return table


def _load_row(point: Point, report: Report) -> list[str]:
    figures = point.figures(report.slo)
    rate = figures["output_tokens_per_s"]
    spread = f" ({rate.low:.1f}..{rate.high:.1f})" if len(point.runs) > 1 else ""
    row = [f"{rate.median:.1f}{spread}", f"{figures['requests_per_s'].median:.2f}"]
    row += [_percentiles(figures, name) for name in _TIMES.values()]
    row.append(" / ".join(str(_total(point, outcome)) for outcome in (Outcome.OK, Outcome.REFUSED, Outcome.ERROR)))
    row.append(f"{100 * figures['slo_share'].median:.0f}" if "slo_share" in figures else "-")
    if memory := report.memory():
        row.append(f"{memory[point.arm] / 1e6:.0f}" if point.arm in memory else "-")
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
