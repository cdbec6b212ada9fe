"""How long one engine step takes, without a mesh, and where the time goes: a prompt, and decode steps of several sizes.

    python -m bench.step [--quantize none int8] [--kv-dtype auto] [--threads 1 2] [--batch 1 8 32] [--parts]

Random weights; arms by turns, medians. With one thread, times are those of the engine's thread on its core, so that
others on the machine disturb them less than a clock on the wall. A step of one sequence reads all weights: how fast, is
said beside how fast memory is read in the same turns. `--parts` adds a table of what a step is made of.
"""

import argparse
import itertools
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.capacity import WEIGHT_BYTES, ModelSize, model_size
from bench.device_probe import read_bytes_per_s
from bench.engine_steps import EngineSteps, StepPlan
from bench.shapes import write_shape
from engine.models.config import load_decoder_config

_PROMPT_TOKENS = 256
_PROMPT = 0
_ONE = 1


@dataclass(frozen=True, slots=True)
class Arm:
    """How the engine computes."""

    quantize: str
    kv_dtype: str
    num_threads: int

    def __str__(self) -> str:
        kv = "" if self.kv_dtype == "auto" else f", KV {self.kv_dtype}"
        threads = "" if self.num_threads == 1 else f", {self.num_threads} threads"
        return f"{'fp32' if self.quantize == 'none' else self.quantize}{kv}{threads}"


Times = Mapping[tuple[Arm, int], Sequence[float]]


def main() -> None:
    """Measure and print."""
    options = _options()
    arms = [Arm(*each) for each in itertools.product(options.quantize, options.kv_dtype, options.threads)]
    available = sorted(os.sched_getaffinity(0))
    if max(options.threads) == 1:
        os.sched_setaffinity(0, {available[-1]})
    times: dict[tuple[Arm, int], list[float]] = {}
    read: dict[Arm, list[float]] = {arm: [] for arm in arms}
    parts: dict[tuple[Arm, int], Mapping[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model_dir = write_shape(options.shape, Path(folder))
        size = model_size(load_decoder_config(model_dir))
        engines = {arm: EngineSteps(_plan(model_dir, arm, max(options.batch))) for arm in arms}
        for _ in range(options.repeats):
            for arm, steps in engines.items():
                times.setdefault((arm, _PROMPT), []).append(steps.prompt_ms())
                parts[arm, _PROMPT] = steps.take_parts()
                read[arm].append(read_bytes_per_s(arm.num_threads))
                for batch in options.batch:
                    times.setdefault((arm, batch), []).append(steps.decode_ms(batch))
                    parts[arm, batch] = steps.take_parts()
    console = Console(width=140)
    console.print(_times_table(arms, options.batch, times))
    for arm in arms if _ONE in options.batch else ():
        console.print(_speed_of_one(arm, size, statistics.median(times[arm, _ONE]), statistics.median(read[arm])))
    if options.parts:
        for arm in arms:
            console.print(_parts_table(arm, options.batch, parts))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.step", description=__doc__.split("\n\n")[0])
    parser.add_argument("--shape", default="135m")
    parser.add_argument("--quantize", nargs="+", default=["none", "int8"])
    parser.add_argument("--kv-dtype", nargs="+", default=["auto"])
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--parts", action="store_true", help="print what a step is made of, too")
    return parser.parse_args()


def _plan(model_dir: Path, arm: Arm, max_batch: int) -> StepPlan:
    return StepPlan(
        model_dir,
        arm.quantize,
        max_batch,
        prompt_tokens=_PROMPT_TOKENS,
        num_threads=arm.num_threads,
        kv_dtype=arm.kv_dtype,
    )


def _times_table(arms: Sequence[Arm], batches: Sequence[int], times: Times) -> Table:
    table = Table("arithmetic", f"prompt of {_PROMPT_TOKENS}, ms", *(f"step of {n}, ms" for n in batches))
    for arm in arms:
        cells = (times[arm, batch] for batch in (_PROMPT, *batches))
        table.add_row(str(arm), *(f"{statistics.median(ms):.1f} ({min(ms):.1f}..{max(ms):.1f})" for ms in cells))
    return table


def _speed_of_one(arm: Arm, size: ModelSize, step_ms: float, bytes_per_s: float) -> str:
    num_bytes = size.step_params * WEIGHT_BYTES["float32" if arm.quantize == "none" else arm.quantize]
    reached = 1000 * num_bytes / step_ms
    read = f"{num_bytes / 1e6:.0f} MB of weights at {reached / 1e9:.1f} GB/s"
    return f"{arm}: a step of 1 reads {read}, {reached / bytes_per_s:.0%} of the {bytes_per_s / 1e9:.1f} of memory"


def _parts_table(arm: Arm, batches: Sequence[int], parts: Mapping[tuple[Arm, int], Mapping[str, float]]) -> Table:
    columns = (_PROMPT, *batches)
    table = Table("part", "prompt, ms", *(f"step of {n}, ms" for n in batches), title=str(arm))
    for name in parts[arm, _PROMPT]:
        table.add_row(name, *(f"{parts[arm, column].get(name, 0.0):.2f}" for column in columns))
    return table


if __name__ == "__main__":
    main()
