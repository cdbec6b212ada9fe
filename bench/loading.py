"""Time and memory of loading a model: from its checkpoint, and from a partition of it.

    python -m bench.loading [--shape 0.5b] [--quantize none int8] [--tensor-parallel N] [--repeats 3]

A checkpoint in fp32 with random weights is written, and partitioned. Then each of the two is loaded in a process of its
own, in turns: cold, after the system was asked to drop the files from its page cache, and warm. Seconds are those of
loading, without the start of Python and its imports; private memory is what a second worker would take again. At the
end two workers of the partition run at once. After a step, which reads all weights, the second says which of their
pages it shares with nobody, and whether its logits are those of the checkpoint, to the bit. Needs disk and page cache
of twice the model's size.
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
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from bench.shapes import SHAPES, write_shape, write_weights
from engine.loading.load_phases import PHASES, measured_load
from engine.loading.resolve import kv_layout, resolve
from engine.model_runner import ModelRunner
from engine.ranks.launch import load_ranked_runner
from engine.runner_settings import RunnerSettings
from engine.sequence import SequenceState
from engine.settings import QUANTIZATIONS
from mesh.domain.request import SamplingParams, SequenceSpec
from mesh.interrupts import run_program

_COLD, _WARM = "cold", "warm"
_PROMPT = tuple(range(3, 40))


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
        load(options.load, options.quantize[0], options.tensor_parallel, until_stdin_ends=options.hold)
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
    parser.add_argument("--hold", action="store_true", help="with --load: go on until standard input ends")
    return parser.parse_args(argv)


def load(folder: Path, quantize: str, num_ranks: int, *, until_stdin_ends: bool) -> None:
    """Load a model once. Prints seconds, seconds of each phase, bytes (private memory now, the peak, private pages of
    mapped weights) and a digest of logits.
    """
    settings = RunnerSettings(folder, quantize=quantize, tensor_parallel=num_ranks)
    resolved, config = resolve(settings)
    settings = replace(settings, num_blocks=kv_layout(config, resolved).num_blocks_for(len(_PROMPT)))
    before = _memory()
    begun_s = time.perf_counter()
    with (
        measured_load() as phases,
        closing(load_ranked_runner(settings, on_lost=sys.exit, log_level="error")) as runner,
    ):
        seconds = time.perf_counter() - begun_s
        private = {f"{name}_bytes": value - before[name] for name, value in _memory().items()}
        measured = {"seconds": seconds, **phases, **private, "logits": _digest(runner)}
        measured["weights_bytes"] = sum(_private_pages(process.pid, folder) for process in _processes())
        sys.stdout.write(json.dumps(measured) + "\n")
        sys.stdout.flush()
        if until_stdin_ends:
            sys.stdin.read()


def _processes() -> list[psutil.Process]:
    """This process and its ranks."""
    return [psutil.Process(), *psutil.Process().children()]


def _digest(runner: ModelRunner) -> str:
    """A digest of the logits after each token of a prompt. Its step reads all weights but most of the embedding."""
    prompt = SequenceState(SequenceSpec("load", 0, _PROMPT, len(_PROMPT), SamplingParams()))
    prompt.block_table = list(range(runner.kv_cache.num_blocks))
    return blake2b(runner.prompt_logits(prompt, range(len(_PROMPT))).numpy().tobytes()).hexdigest()


def _private_pages(pid: int, folder: Path) -> int:
    """Bytes of pages of the folder's files that a process has mapped and shares with no other."""
    num_bytes, is_of_folder = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, *values = line.split()
        if not name.endswith(":"):  # the first line of a mapping
            is_of_folder = line.endswith(".safetensors") and str(folder) in line
        elif is_of_folder and name in ("Private_Clean:", "Private_Dirty:"):
            num_bytes += int(values[0]) * 1024
    return num_bytes


def _memory() -> dict[str, int]:
    """Of this process and its ranks: bytes that are theirs alone, and the sum of the peaks."""
    processes = _processes()
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
    if len(sources) == 2:
        _share(console, sources, quantize, num_ranks)


def _share(console: Console, sources: Sequence[Source], quantize: str, num_ranks: int) -> None:
    """Load the partition while another worker has it."""
    checkpoint, partition = sources
    command = _command(partition.folder, quantize, num_ranks)
    with subprocess.Popen([*command, "--hold"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        first.stdout.readline()
        second = _load_in_process(partition.folder, quantize, num_ranks)
    digests = {load["logits"] for load in (second, *checkpoint.loads[_WARM], *partition.loads[_WARM])}
    console.print(
        f"a second worker: loaded in {second['seconds']:.2f} s, {second['weights_bytes'] / 1e6:.1f} MB of the weights "
        f"are its own; logits of all loads are {'equal' if len(digests) == 1 else 'NOT EQUAL'} to the bit"
    )


def _partition(console: Console, checkpoint: Path, out: Path, quantize: str, num_ranks: int) -> bool:
    """Write the partition and print what it took. Returns False, after printing why, if it is not possible."""
    flags = (f"--quantize={quantize}", f"--tensor-parallel={num_ranks}")
    command = [sys.executable, "-m", "tandem_cli", "partition", str(checkpoint), str(out), *flags]
    begun_s = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    with process.stderr as errors:
        stderr = errors.read().strip()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        console.print(f"no partition: {stderr}", highlight=False)
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


def _command(folder: Path, quantize: str, num_ranks: int) -> Sequence[str]:
    flags = (f"--load={folder}", f"--quantize={quantize}", f"--tensor-parallel={num_ranks}")
    return (sys.executable, "-m", "bench.loading", *flags)


def _load_in_process(folder: Path, quantize: str, num_ranks: int) -> Mapping[str, Any]:
    done = subprocess.run(_command(folder, quantize, num_ranks), stdout=subprocess.PIPE, check=True)
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
        phases_text = ", ".join(f"{name} {seconds:.2f}" for name, seconds in phases.items() if seconds >= 0.005)
        table.add_row(source.name, *times, *sizes, phases_text)
    return table


if __name__ == "__main__":
    run_program(main)
