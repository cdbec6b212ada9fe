"""Did this commit make anything slower? Runs benchmarks of two commits in turns on this machine and compares them.

    python -m bench.guard [--against HEAD~1] [--rounds 5] [--only step transfer router]

Each commit is checked out into a folder of its own and runs its own benchmarks with this Python's packages, so that
both must know `--json`. A figure is called slower if the median of the rounds' ratios is above `--limit` and its ranges
do not overlap. The exit status is then 1.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mesh.interrupts import run_program

BENCHMARKS: Mapping[str, Sequence[str]] = {
    "step": ("bench.step", "--shape", "135m", "--repeats", "1"),
    "transfer": ("bench.transfer", "--tokens", "1500", "--runs", "5"),
    "router": ("bench.router", "--clients", "32", "--repeats", "1"),
}
Figures = Mapping[str, Sequence[float]]
"""Values by name, one of each round. Less is better."""


def main() -> int:
    options = _options()
    with _checkout(options.against) as before, _checkout("HEAD") as after:
        rounds: dict[Path, dict[str, list[float]]] = {before: {}, after: {}}
        for number in range(options.rounds):
            for folder in (before, after) if number % 2 == 0 else (after, before):
                for name in options.only:
                    print(f"round {number + 1} of {options.rounds}: {name}, {_subject(folder)}", flush=True)
                    for figure, value in _measure(folder, BENCHMARKS[name]).items():
                        rounds[folder].setdefault(figure, []).append(value)
        table, num_slower = compare(rounds[before], rounds[after], options.limit)
    Console().print(table)
    return 1 if num_slower else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.guard", description=__doc__.split("\n\n")[0])
    parser.add_argument("--against", default="HEAD~1", metavar="COMMIT", help="the commit before")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS))
    parser.add_argument("--limit", type=float, default=1.03, help="a ratio above it may be called slower")
    return parser.parse_args()


def compare(before: Figures, after: Figures, limit: float) -> tuple[Table, int]:
    """A table of the figures that both have, and how many of them are slower beyond noise."""
    table = Table("figure", "before (range)", "after (range)", "ratio", "")
    num_slower = 0
    for name in (name for name in before if name in after):
        ratio = statistics.median(new / old for old, new in zip(before[name], after[name], strict=True))
        is_slower = len(after[name]) > 1 and ratio > limit and min(after[name]) > max(before[name])
        is_faster = len(after[name]) > 1 and ratio < 1 / limit and max(after[name]) < min(before[name])
        num_slower += is_slower
        verdict = "slower" if is_slower else "faster" if is_faster else ""
        table.add_row(name, _range(before[name]), _range(after[name]), f"{ratio:.2f}", verdict)
    return table, num_slower


def _range(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f}..{max(values):.1f})"


@contextmanager
def _checkout(commit: str) -> Iterator[Path]:
    """A folder with the files of a commit, which is deleted afterwards."""
    with tempfile.TemporaryDirectory(prefix="tandem-guard-") as base:
        folder = Path(base, "tree")
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", folder, commit], check=True)
        try:
            yield folder
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", folder], check=True)


def _subject(folder: Path) -> str:
    command = ["git", "-C", str(folder), "log", "-1", "--format=%h %s"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _measure(folder: Path, benchmark: Sequence[str]) -> Mapping[str, float]:
    """The figures of one run of a commit's benchmark. Raises SystemExit, with its output, if it fails."""
    path = folder / "figures.json"
    environ = os.environ | {"PYTHONPATH": os.pathsep.join((str(folder), str(folder / "client")))}
    command = [sys.executable, "-m", *benchmark, "--json", str(path)]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    if done.returncode != 0 or not path.exists():
        raise SystemExit(
            f"{' '.join(command)} failed at {_subject(folder)}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    figures: dict[str, float] = json.loads(path.read_text())
    return figures


if __name__ == "__main__":
    run_program(main)
