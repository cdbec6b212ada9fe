"""How long one engine step takes, without a mesh: a prompt, and decode steps of several batch sizes.

    python -m bench.step [--shape 135m] [--quantize none int8] [--batch 1 8 32] [--repeats 3]

On one core, random weights; kinds of arithmetic by turns, medians. Times are those of the engine's thread on its core,
so that others on the machine disturb them less than a clock on the wall.
"""

import argparse
import os
import statistics
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from bench.engine_steps import EngineSteps, StepPlan
from bench.shapes import write_shape

_PROMPT_TOKENS = 256


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.step", description=__doc__.split("\n\n")[0])
    parser.add_argument("--shape", default="135m")
    parser.add_argument("--quantize", nargs="+", default=["none", "int8"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    found: dict[tuple[str, int], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model_dir = write_shape(options.shape, Path(folder))
        engines = {
            kind: EngineSteps(StepPlan(model_dir, kind, max(options.batch), _PROMPT_TOKENS))
            for kind in options.quantize
        }
        for _ in range(options.repeats):
            for kind, steps in engines.items():
                found.setdefault((kind, 0), []).append(steps.prompt_ms())
                for batch in options.batch:
                    found.setdefault((kind, batch), []).append(steps.decode_ms(batch))
    table = Table("arithmetic", f"prompt of {_PROMPT_TOKENS}, ms", *(f"step of {n}, ms" for n in options.batch))
    for kind in options.quantize:
        cells = (found[kind, batch] for batch in (0, *options.batch))
        table.add_row(kind, *(f"{statistics.median(ms):.1f} ({min(ms):.1f}..{max(ms):.1f})" for ms in cells))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
