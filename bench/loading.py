"""Time and memory of loading a model: from its checkpoint, and from a partition of it.

    python -m bench.loading [--shape 0.5b] [--quantize none int8] [--tensor-parallel N] [--repeats 3]

A checkpoint in fp32 with random weights is written, and partitioned. Then each of the two is loaded in a process of its
own, in turns: cold, after the system was asked to drop the files from its page cache, and warm. Seconds are those of
loading, without the start of Python and its imports; private memory is what a second worker would take again. Needs
disk and page cache of twice the model's size.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from bench.shapes import SHAPES, write_shape, write_weights
from engine.load_times import PHASES, measured_load
from engine.ranks.launch import load_ranked_runner
from engine.runner_settings import RunnerSettings
from engine.settings import QUANTIZATIONS

_NUM_BLOCKS = 64
_COLD, _WARM = "cold", "warm"


@dataclass(slots=True)
class Source:
    """A folder that workers load, and what was measured, by state of the page cache."""

    name: str
    folder: Path
    loads: dict[str, list[Mapping[str, Any]]] = field(default_factory=lambda: {_COLD: [], _WARM: []})

    def median(self, state: str, name: str) -> float:
        return statistics.median(load[name] for load in self.loads[state])


def main(argv: Sequence[str] | None = None) -> None:
    options = _options(argv)
    if options.load is not None:
        sys.stdout.write(json.dumps(load(options.load, options.quantize[0], options.tensor_parallel)) + "\n")
        return
    console = Console(width=140)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_shape(options.shape, Path(folder))
        size = write_weights(checkpoint).stat().st_size
        console.print(f"{options.shape}: a checkpoint of {size / 1e6:.0f} MB in fp32")
        for quantize in options.quantize:
            _compare(console, checkpoint, quantize, options)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.loading", description=__doc__.split("\n\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    parser.add_argument("--quantize", nargs="+", choices=QUANTIZATIONS, default=list(QUANTIZATIONS))
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="N")
    parser.add_argument("--repeats", type=int, default=3, metavar="N")
    parser.add_argument("--load", type=Path, metavar="FOLDER", help="load this folder once, and print what it took")
    return parser.parse_args(argv)


def load(folder: Path, quantize: str, num_ranks: int) -> dict[str, Any]:
    """Load a model once. Returns seconds, seconds of each phase, and bytes: private memory now, and the peak."""
    settings = RunnerSettings(folder, quantize=quantize, num_blocks=_NUM_BLOCKS, tensor_parallel=num_ranks)
    before = _memory()
    begun_s = time.perf_counter()
    with measured_load() as phases, closing(load_ranked_runner(settings, on_lost=sys.exit, log_level="error")):
        seconds = time.perf_counter() - begun_s
        private = {f"{name}_bytes": value - before[name] for name, value in _memory().items()}
        return {"seconds": seconds, **phases, **private}


def _memory() -> dict[str, int]:
    """Of this process and its ranks: bytes that are theirs alone, and the sum of the peaks."""
    processes = [psutil.Process(), *psutil.Process().children()]
    return {
        "private": sum(process.memory_full_info().uss for process in processes),
        "peak": sum(_peak_bytes(process.pid) for process in processes),
    }


def _peak_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def _compare(console: Console, checkpoint: Path, quantize: str, options: argparse.Namespace) -> None:
    num_ranks = options.tensor_parallel
    sources = [Source("checkpoint", checkpoint)]
    partition = checkpoint.with_name(f"{checkpoint.name}-{quantize}")
    if _partition(console, checkpoint, partition, quantize, num_ranks):
        sources.append(Source("partition", partition))
    try:
        for _ in range(options.repeats):
            for source in sources:
                for state in (_COLD, _WARM):
                    if state == _COLD:
                        _drop_from_cache(source.folder)
                    source.loads[state].append(_load_in_process(source.folder, quantize, num_ranks))
    finally:  # also after Ctrl-C
        ranks = f", {num_ranks} ranks" if num_ranks > 1 else ""
        console.print(_table(f"{'fp32' if quantize == 'none' else quantize}{ranks}", sources))


def _partition(console: Console, checkpoint: Path, out: Path, quantize: str, num_ranks: int) -> bool:
    """Write the partition and print what it took. Returns False, after printing why, if it is not possible."""
    flags = (f"--quantize={quantize}", f"--tensor-parallel={num_ranks}")
    command = [sys.executable, "-m", "tandem_cli", "partition", str(checkpoint), str(out), *flags]
    begun_s = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    with process.stderr as errors:
        said = errors.read().strip()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        console.print(f"no partition: {said}", highlight=False)
        return False
    seconds, peak_mb = time.perf_counter() - begun_s, usage.ru_maxrss * 1024 / 1e6
    console.print(f"partitioned in {seconds:.1f} s, the start of Python included; peak memory {peak_mb:.0f} MB")
    return True


def _drop_from_cache(folder: Path) -> None:
    """Ask the system to forget the weights. It keeps pages that some process has mapped."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _load_in_process(folder: Path, quantize: str, num_ranks: int) -> Mapping[str, Any]:
    flags = (f"--load={folder}", f"--quantize={quantize}", f"--tensor-parallel={num_ranks}")
    done = subprocess.run([sys.executable, "-m", "bench.loading", *flags], stdout=subprocess.PIPE, check=True)
    measured: Mapping[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def _table(title: str, sources: Sequence[Source]) -> Table:
    columns = ("loaded from", "cold, s", "warm, s", "private, MB", "peak, MB", "phases when warm, s")
    table = Table(*columns, title=title)
    for source in sources:
        if not source.loads[_WARM]:
            continue
        times = (f"{source.median(state, 'seconds'):.2f}" for state in (_COLD, _WARM))
        sizes = (f"{source.median(_WARM, f'{name}_bytes') / 1e6:.0f}" for name in ("private", "peak"))
        phases = {name: source.median(_WARM, name) for name in PHASES}
        named = ", ".join(f"{name} {seconds:.2f}" for name, seconds in phases.items() if seconds >= 0.005)
        table.add_row(source.name, *times, *sizes, named)
    return table


if __name__ == "__main__":
    main()
