"""The results of a sweep: settings, machine and all requests. Its file contains everything that plots need."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mesh.domain.errors import ConfigurationError
from tandem_cli.load_test.burst import burst_figures
from tandem_cli.load_test.figures import Median, Slo, figures, goodput, knee, medians
from tandem_cli.load_test.plan import Case, Kind
from tandem_cli.load_test.records import Outcome, Record, Run

_FORMAT = "tandem-bench/1"
_DIGITS = 6  # microseconds


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
        figures = [point.figures(slo) for point in self.points]
        if not all("latency_p50_ms" in medians for medians in figures):
            return None
        index = knee([(medians["output_tokens_per_s"].median, medians["latency_p50_ms"].median) for medians in figures])
        return None if index is None else self.points[index]

    def goodput(self, slo: Slo) -> float | None:
        """The highest rate that meets the targets; see tandem_cli.load_test.figures.goodput."""
        figures_by_rate = [(point.case.value, point.figures(slo)) for point in self.points]
        return goodput(
            [(rate, medians["slo_share"].median) for rate, medians in figures_by_rate if "slo_share" in medians],
            slo.share,
        )


@dataclass(slots=True)
class Report:
    """Results of `tandem bench`. An interrupted benchmark has the runs that were complete by then."""

    settings: dict[str, Any]
    machine: dict[str, Any]
    slo: Slo
    price_per_hour: float | None = None
    notes: list[str] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    is_interrupted: bool = False

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

    def save(self, path: Path) -> None:
        """Write the report as JSON. Raises ConfigurationError if the file cannot be written."""
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
            raise ConfigurationError(f"cannot write {path}: {error.strerror}") from error

    @classmethod
    def load(cls, path: Path) -> "Report":
        """Read a file that `save` wrote. Raises ConfigurationError for any other file."""
        try:
            content = json.loads(path.read_text())
            if content["format"] != _FORMAT:
                raise ConfigurationError(f"{path} has format {content['format']}, not {_FORMAT}")
            points = [_point_from_json(entry) for entry in content["points"]]
            slo = Slo(**content["slo"])
            metadata = {name: content[name] for name in ("settings", "machine", "price_per_hour", "notes")}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(f"{path} holds no results of tandem bench: {error}") from error
        return cls(slo=slo, points=points, **metadata)

    def _summary(self) -> list[dict[str, Any]]:
        summary = []
        for series in self.series():
            knee = series.knee(self.slo)
            good = series.goodput(self.slo) if series.kind is Kind.RATE else None
            summary.append({"series": series.name, "knee": knee and knee.case.value, "goodput_requests_per_s": good})
        return summary


def _point_to_json(point: Point, slo: Slo) -> dict[str, Any]:
    figures = {name: asdict(figure) for name, figure in point.figures(slo).items()}
    return {
        "arm": point.arm,
        "case": asdict(point.case),
        "figures": figures,
        "runs": list(map(_run_to_json, point.runs)),
    }


def _run_to_json(run: Run) -> dict[str, Any]:
    return asdict(run) | {"records": [_rounded(asdict(record)) for record in run.records], "errors": run.errors()}


def _rounded(record: Mapping[str, Any]) -> dict[str, Any]:
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
