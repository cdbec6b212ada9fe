"""The results of a sweep: what was set, on which machine, and every request. From its file all plots can be remade."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.burst import burst_figures
from bench.figures import Median, Slo, figures, goodput, knee, medians
from bench.plan import Case, Kind
from bench.records import Outcome, Record, Run
from mesh.domain.errors import ConfigurationError

_FORMAT = "tandem-bench/1"
_DIGITS = 6  # microseconds


@dataclass(slots=True)
class Point:
    """All runs of one case with one arm."""

    arm: str
    case: Case
    runs: list[Run] = field(default_factory=list)

    def figures(self, slo: Slo) -> dict[str, Median]:
        """Over the runs."""
        of_run = burst_figures if self.case.kind is Kind.BURST else figures
        return medians([of_run(run, slo) for run in self.runs])


@dataclass(frozen=True, slots=True)
class Series:
    """Points that make one line of a plot, in order of load."""

    name: str
    points: list[Point]

    @property
    def kind(self) -> Kind:
        """Of all its points."""
        return self.points[0].case.kind

    def knee(self, slo: Slo) -> Point | None:
        """Where the closed loop's curve bends; see bench.figures.knee."""
        if self.kind is not Kind.CONCURRENCY:
            return None
        found = [point.figures(slo) for point in self.points]
        if not all("latency_p50_ms" in each for each in found):
            return None
        place = knee([(each["output_tokens_per_s"].median, each["latency_p50_ms"].median) for each in found])
        return None if place is None else self.points[place]

    def goodput(self, slo: Slo) -> float | None:
        """The highest rate that keeps the targets; see bench.figures.goodput."""
        found = [(point.case.value, point.figures(slo)) for point in self.points]
        return goodput([(rate, each["slo_share"].median) for rate, each in found if "slo_share" in each], slo.share)


@dataclass(slots=True)
class Report:
    """What `tandem bench` found."""

    settings: dict[str, Any]
    machine: dict[str, Any]
    slo: Slo
    price_per_hour: float | None = None
    notes: list[str] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)

    def point(self, arm: str, case: Case) -> Point:
        """The point for this arm and case; a new one the first time."""
        for each in self.points:
            if (each.arm, each.case) == (arm, case):
                return each
        self.points.append(Point(arm, case))
        return self.points[-1]

    def series(self) -> list[Series]:
        """Points by arm and lengths."""
        lines: dict[tuple[str, int, int], list[Point]] = {}
        for point in self.points:
            key = (point.arm, point.case.input_tokens, point.case.output_tokens)
            lines.setdefault(key, []).append(point)
        arms = {arm for arm, *_ in lines}
        lengths = {tuple(rest) for _, *rest in lines}
        named = []
        for (arm, tokens_in, tokens_out), points in lines.items():
            shown = [arm] if len(arms) > 1 else []
            shown += [f"{tokens_in} in, {tokens_out} out"] if len(lengths) > 1 else []
            ordered = sorted(points, key=lambda point: point.case.value)
            named.append(Series(", ".join(shown) or arm, ordered))
        return named

    def save(self, path: Path) -> None:
        """Write the file."""
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
        """Read a file that `save` wrote. Raises ConfigurationError for anything else."""
        try:
            content = json.loads(path.read_text())
            if content["format"] != _FORMAT:
                raise ConfigurationError(f"{path} has format {content['format']}, not {_FORMAT}")
            points = [_point_from_json(entry) for entry in content["points"]]
            slo = Slo(**content["slo"])
            rest = {name: content[name] for name in ("settings", "machine", "price_per_hour", "notes")}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(f"{path} holds no results of tandem bench: {error}") from error
        return cls(slo=slo, points=points, **rest)

    def _summary(self) -> list[dict[str, Any]]:
        found = []
        for series in self.series():
            at = series.knee(self.slo)
            good = series.goodput(self.slo) if series.kind is Kind.RATE else None
            found.append({"series": series.name, "knee": at and at.case.value, "goodput_requests_per_s": good})
        return found


def _point_to_json(point: Point, slo: Slo) -> dict[str, Any]:
    found = {name: asdict(figure) for name, figure in point.figures(slo).items()}
    return {"arm": point.arm, "case": asdict(point.case), "figures": found, "runs": list(map(_run_to_json, point.runs))}


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
    given = {name: entry[name] for name in ("duration_s", "generator_cpu_s", "marks", "is_streamed")}
    return Run(records=records, **given)
