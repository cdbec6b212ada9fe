"""`make test-gpu`: runs the stages in order of worth, and writes what it found after each of them.

    python -m tests.gpu.plan [--device cuda] [--results tests/gpu/results.json] [--docs docs/gpu.md] [--cap SECONDS]
                             [--again] [STAGE ...]

A stage that hangs is killed at its limit; all limits together are less than ten minutes. Stages that have passed with
this code on this machine are not run again. At the end the table in docs/gpu.md is made of the results.
"""

import argparse
import json
import multiprocessing
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import blake2b
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from mesh.interrupts import run_program
from tests.gpu.stages import run_stage
from tests.gpu.table import write_table

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "tests/gpu/results.json"
_END_CHARS = 1500
_CODE = (
    *("engine", "checkpoint", "kvtransfer", "mesh", "router", "client", "tandem_cli", "bench"),
    *("worker", "prefill_worker", "decode_worker", "rank_worker", "tests/gpu", "tests/component"),
)
"""What the stages run."""


@dataclass(frozen=True)
class Stage:
    """One function of `tests/gpu/stages.py`: the seconds that it works for, and those after which it is killed."""

    name: str
    work_s: float
    limit_s: float


PLAN = (
    Stage("facts", 15, 40),
    Stage("attention", 55, 85),
    Stage("parity", 50, 85),
    Stage("mesh", 45, 105),
    Stage("copies", 15, 40),
    Stage("prefill_to_decode", 15, 40),
    Stage("steps", 60, 95),
    Stage("copies_beside_steps", 20, 48),
    Stage("attention_times", 35, 60),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if a stage failed."""
    args = _parse(arguments)
    found = _start(args.results, args.device)
    for stage in PLAN:
        has_passed = found["stages"].get(stage.name, {}).get("status") == "passed"
        if (args.stages and stage.name not in args.stages) or (has_passed and not args.again):
            continue
        work_s = stage.work_s if args.cap is None else min(stage.work_s, args.cap)
        found["stages"][stage.name] = outcome = _run(stage, args.device, work_s)
        _write(args.results, found)
        figures = json.dumps(outcome["figures"])
        sys.stdout.write(f"{stage.name}: {outcome['status']} in {outcome['seconds']} s {figures}\n{outcome['error']}")
        sys.stdout.flush()
    if args.docs is not None:
        write_table(args.docs, found)
    return int(any(outcome["status"] != "passed" for outcome in found["stages"].values()))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=", ".join(stage.name for stage in PLAN))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where results are written, and read to go on")
    parser.add_argument("--docs", type=Path, help="the page whose table is made of the results")
    parser.add_argument("--cap", type=float, help="most seconds that a stage works for")
    parser.add_argument("--again", action="store_true", help="run stages that have passed, too")
    args = parser.parse_args(arguments)
    if unknown := set(args.stages) - {stage.name for stage in PLAN}:
        parser.error(f"no such stage: {', '.join(sorted(unknown))}")
    if args.device != "cpu" and not torch.cuda.is_available():
        parser.error(f"device {args.device}: torch finds no CUDA device; --device cpu tries the plan without one")
    return args


def _start(results: Path, device: str) -> dict[str, Any]:
    """What an earlier run found with this code on this machine, or nothing."""
    name = torch.cuda.get_device_name(device) if device != "cpu" else f"cpu {platform.machine()}"
    fresh = {"device": name, "torch": torch.__version__, "code": _code_digest(), "stages": {}}
    if results.exists():
        found: dict[str, Any] = json.loads(results.read_text())
        if all(found.get(key) == fresh[key] for key in ("device", "torch", "code")):
            return found
    return fresh


def _code_digest() -> str:
    digest = blake2b(digest_size=8)
    for package in _CODE:
        for path in sorted((ROOT / package).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _run(stage: Stage, device: str, work_s: float) -> dict[str, Any]:
    """What a stage found. Its process is forked from one that has imported the engine, which takes seconds."""
    begun_s = time.monotonic()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.gpu.stages", "engine.loading.load_runner"])
    with tempfile.TemporaryDirectory() as folder:
        out, said = Path(folder) / "figures.json", Path(folder) / "output"
        process = context.Process(target=run_stage, args=(stage.name, device, work_s, out, said))
        process.start()
        status = _wait(process, stage.limit_s)
        figures = json.loads(out.read_text()) if status == "passed" else {}
        error = "" if status == "passed" or not said.exists() else said.read_text(errors="replace")[-_END_CHARS:]
    return {
        "status": status,
        "seconds": round(time.monotonic() - begun_s, 1),
        "date": datetime.now(UTC).date().isoformat(),
        "figures": figures,
        "error": error,
    }


def _wait(process: BaseProcess, limit_s: float) -> str:
    try:
        process.join(limit_s)
        if process.exitcode is None:
            return f"killed after {limit_s:g} s"
        return "passed" if process.exitcode == 0 else "failed"
    finally:
        if process.exitcode is None:
            assert process.pid is not None
            with suppress(ProcessLookupError):  # it has no group yet
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()


def _write(path: Path, found: dict[str, Any]) -> None:
    """Replace the file whole: a run that is cut off here has lost nothing."""
    partly = path.with_suffix(".partly")
    partly.write_text(json.dumps(found, indent=1) + "\n")
    partly.replace(path)


if __name__ == "__main__":
    run_program(main)
