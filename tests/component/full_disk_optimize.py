"""A program for `test_optimize.py`: runs `tandem optimize` on a small disk that gets full at some moment, and again.

    python -m tests.component.full_disk_optimize MODEL DATA DISK

What is served and judged is made up. Prints, as JSON and by moment, what both runs returned and said, what OUT had
after each, and the precisions that each of them measured.
"""

import contextlib
import io
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tandem_cli.main import main
from tandem_cli.optimization import command
from tandem_cli.optimization.candidate_trial import CandidateTrial
from tandem_cli.optimization.candidates import Candidate
from tandem_cli.optimization.choice import OTHER_LOAD, PrecisionQuality
from tandem_cli.optimization.search import State
from tandem_cli.optimization.serving import Answer, Served

_RECIPE = """
precisions = ["w4a16"]
speculation = ["none"]
workers = [{ decode = 1 }]
"""
_SPEEDS = {"base": 100.0, "w4a16": 200.0}
MOMENTS: dict[str, tuple[Any, str, int]] = {
    "the first state": (State, "save", 1),
    "a measurement": (State, "save", 2),
    "a checkpoint": (CandidateTrial, "folder", 2),
    "the reports": (command, "report_json", 1),
    "the choice": (command, "publish", 1),
    "the properties": (command, "properties_of", 1),
    "the last state": (command, "properties_of", 1),
}
"""The function that begins then, and which of its calls."""

measured: list[str] = []


def serve(trial: CandidateTrial, candidate: Candidate, num_timed: int) -> Served:
    trial.folder(candidate.precision)
    measured.append(candidate.precision)
    figures = {"output_tokens_per_s": _SPEEDS[candidate.precision], "num_ok": 1.0, "requests_per_s": 1.0}
    figures |= {OTHER_LOAD: 0.0, "memory_bytes": 1e6, "load_s": 1.0}
    return Served(figures, [Answer("yes", [1, 2]) for _ in range(num_timed)])


def judge(trial: CandidateTrial, precision: str, *_: Sequence[Answer]) -> PrecisionQuality:
    return PrecisionQuality(score=1.0, base_score=1.0)


@contextlib.contextmanager
def full_at(moment: str, disk: Path) -> Iterator[None]:
    """Fill the disk when the function begins that does the moment's work."""
    owner, name, call = MOMENTS[moment]
    function, calls = getattr(owner, name), list[int]()

    def filling(*words: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            fill(disk)
        if moment == "the last state":  # the properties find just the page that they need
            (disk / "spare").unlink()
        return function(*words, **options)

    (disk / "spare").write_bytes(b"x" * 4096)
    setattr(owner, name, filling)
    yield
    setattr(owner, name, function)
    (disk / "filler").unlink(missing_ok=True)
    (disk / "spare").unlink(missing_ok=True)


def fill(disk: Path) -> None:
    with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
        while file.write(b"x" * 4096):
            pass


def run(model: str, data: str, out: Path) -> dict[str, Any]:
    recipe = Path(data).with_name("recipe.toml")
    recipe.write_text(_RECIPE)
    measured.clear()
    with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(io.StringIO()):
        status = main(["optimize", model, f"--data={data}", f"--recipe={recipe}", f"--out={out}"])
    names = sorted(path.name for path in out.iterdir())
    return {"status": status, "said": said.getvalue(), "names": names, "measured": list(measured)}


def _main() -> None:
    model, data, disk = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    CandidateTrial.measure = serve  # type: ignore[method-assign]
    CandidateTrial.assess = judge  # type: ignore[method-assign]
    runs = {}
    for moment in MOMENTS:
        out = disk / "out"
        with full_at(moment, disk):
            first = run(model, data, out)
        runs[moment] = [first, run(model, data, out)]
        shutil.rmtree(out)
    json.dump(runs, sys.stdout)


if __name__ == "__main__":
    _main()
