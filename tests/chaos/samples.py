"""Samples of a long run, one JSON object a line, and the table they come to.

A run writes them as it goes, so that one that was interrupted has its table too:

    python -m tests.chaos.samples soak.jsonl

A killed process starts a new series: the table has the longest life of each node. Slopes are those of least squares
over the second half of that life.
"""

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from statistics import median

_TOLERATED_FDS = 2
_TOLERATED_THREADS = 2
_TOLERATED_KEYS = 4


@dataclass(frozen=True, slots=True)
class Held:
    """Resources that one process holds. `waited_s`: the longest time that one of its threads waited for a core since
    the last sample.
    """

    pid: int
    rss_mib: float
    uss_mib: float
    pss_mib: float
    num_fds: int
    num_threads: int
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at everything. `counts` and `notes` are of the run up to now; `num_keys` is None without Redis."""

    at_s: float
    held: dict[str, Held]
    num_keys: int | None = None
    counts: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def to_line(sample: Sample) -> str:
    return json.dumps(asdict(sample)) + "\n"


def read(path: Path) -> list[Sample]:
    """All whole lines of a file."""
    samples = []
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            loaded = json.loads(line)
            held = {name: Held(**fields) for name, fields in loaded.pop("held").items()}
            samples.append(Sample(held=held, **loaded))
    return samples


@dataclass(frozen=True, slots=True)
class Life:
    """One process from its first to its last sample."""

    name: str
    num_lives: int
    """How many the node has had."""
    points: list[tuple[float, Held]]

    @property
    def lasted_s(self) -> float:
        return self.points[-1][0] - self.points[0][0]

    def slope_per_min(self, figure: Callable[[Held], float]) -> float:
        """Least squares over the second half, after the process has warmed up."""
        second_half = self.points[len(self.points) // 2 :]
        return slope([(at_s, figure(held)) for at_s, held in second_half]) * 60

    @property
    def has_grown(self) -> bool:
        """True if it holds more descriptors or threads at the end."""
        fds = _growth([held.num_fds for _, held in self.points])
        threads = _growth([held.num_threads for _, held in self.points])
        return fds > _TOLERATED_FDS or threads > _TOLERATED_THREADS


def longest_lives(samples: Iterable[Sample]) -> dict[str, Life]:
    """The longest-lived process of each node."""
    points: dict[str, list[tuple[float, Held]]] = {}
    for sample in samples:
        for name, held in sample.held.items():
            points.setdefault(name, []).append((sample.at_s, held))
    lives_by_name = {}
    for name, series in points.items():
        lives = [list(life) for _, life in groupby(series, key=lambda point: point[1].pid)]
        lives_by_name[name] = Life(name, len(lives), max(lives, key=lambda life: life[-1][0] - life[0][0]))
    return lives_by_name


def keys_have_grown(samples: list[Sample]) -> bool:
    """True if Redis has more keys at the end."""
    return _growth([sample.num_keys for sample in samples if sample.num_keys is not None]) > _TOLERATED_KEYS


def _growth(values: list[int]) -> float:
    """From the median of the second quarter to that of the last one: faults pull single samples down."""
    quarter = len(values) // 4
    return median(values[-quarter:]) - median(values[quarter : 2 * quarter]) if quarter else 0.0


def slope(points: list[tuple[float, float]]) -> float:
    """The slope of the least-squares line through `points`."""
    if len(points) < 2:
        return 0.0
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


def table(samples: list[Sample]) -> list[str]:
    if not samples:
        return ["no samples"]
    last = samples[-1]
    lines = [f"{last.at_s / 60:.1f} minutes, {len(samples)} samples; slopes per minute over the second half of a life"]
    lines.append(f"{'':12}lives  minutes" + "".join(f"{what:>27}" for what in _COLUMNS))
    for name, life in sorted(longest_lives(samples).items()):
        cells = "".join(f"{_cell(life, figure, digits):>27}" for figure, digits in _COLUMNS.values())
        lines.append(f"{name:12}{life.num_lives:5}{life.lasted_s / 60:9.1f}{cells}")
    keys = [sample.num_keys for sample in samples if sample.num_keys is not None]
    if keys:
        second_half = keys[len(keys) // 2 :]
        lines.append(f"keys in Redis: {keys[0]} first, {keys[-1]} last, {min(second_half)} to {max(second_half)}")
    lines += [f"{what}: {count}" for what, count in last.counts.items()]
    return lines + last.notes


def _cell(life: Life, figure: Callable[[Held], float], digits: int) -> str:
    first, last = (figure(life.points[at][1]) for at in (0, -1))
    return f"{first:.{digits}f} to {last:.{digits}f} ({life.slope_per_min(figure):+.3f})"


_COLUMNS: dict[str, tuple[Callable[[Held], float], int]] = {
    "RSS, MiB": (lambda held: held.rss_mib, 1),
    "USS, MiB": (lambda held: held.uss_mib, 1),
    "PSS, MiB": (lambda held: held.pss_mib, 1),
    "descriptors": (lambda held: held.num_fds, 0),
    "threads": (lambda held: held.num_threads, 0),
}


if __name__ == "__main__":
    sys.stdout.write("\n".join(table(read(Path(sys.argv[1])))) + "\n")
