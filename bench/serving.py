"""Throughput and time to first token of a mesh, compared with the same engine without a mesh.

    python -m bench.serving [--shape 135m] [--quantize none] [--clients 1 8 32] [--repeats 3]

Four arms run in turn, `repeats` times, and medians are printed. Comparing `engine, 1 core` with `colocated, 1 core`
shows the overhead of the mesh: it is the same engine on the same core, without and with router, gRPC and client.
`separated` has prefill on one core and decode on the other; `engine, 2 cores` is one engine with both cores.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

import tandem
from bench.shapes import write_shape
from tandem_cli.load_test.endpoints import own_mesh
from tandem_cli.load_test.figures import percentile
from tandem_cli.load_test.load import Measured, Workload, median_run, run_closed_loop, through


@dataclass(frozen=True, slots=True)
class Arm:
    """One arm: flags of `tandem up` for a mesh, or cores for the engine alone."""

    name: str
    flags: tuple[str, ...] = ()
    engine_cores: str = ""


@dataclass(frozen=True, slots=True)
class Model:
    """The model to serve: its folder and quantization."""

    folder: Path
    quantize: str


def arms() -> list[Arm]:
    """The four arms, on the first two allowed cores."""
    first, second = [*sorted(os.sched_getaffinity(0)), 0, 0][:2]
    return [
        Arm("engine, 1 core", engine_cores=str(first)),
        Arm("colocated, 1 core", ("--colocated", "--threads-per-worker", "1")),
        Arm("engine, 2 cores", engine_cores=f"{first},{second}"),
        Arm("separated", ()),
    ]


async def measure(arm: Arm, model: Model, clients: Sequence[int]) -> list[Measured]:
    """Measure one run per number of clients."""
    if arm.engine_cores:
        return await _measure_engine(arm, model, clients)
    flags = ["--model", str(model.folder), "--load-format", "dummy", "--quantize", model.quantize, *arm.flags]
    async with own_mesh(flags) as address, tandem.AsyncClient(address) as client:
        send = through(client)
        await run_closed_loop(Workload(1, 1, 32, 8), send)
        return [await run_closed_loop(Workload(number), send) for number in clients]


async def _measure_engine(arm: Arm, model: Model, clients: Sequence[int]) -> list[Measured]:
    arguments = (str(model.folder), arm.engine_cores, model.quantize, *map(str, clients))
    command = [sys.executable, "-m", "bench.engine_alone", *arguments]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    output, _ = await process.communicate()
    return [Measured(**json.loads(line)) for line in output.decode().splitlines() if line.startswith("{")]


def print_table(runs: dict[tuple[str, int], list[Measured]], clients: Sequence[int]) -> None:
    """Print one row per arm and number of clients, then the overhead of the mesh."""
    table = Table(title="256 tokens in, 64 out; medians")
    for column in ("arm", "clients", "tokens/s (min..max)", "TTFT p50 ms", "token gap p50 ms", "token gap p99 ms"):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for (name, number), measured in runs.items():
        middle = median_run(measured)
        rates = [run.tokens_per_s for run in measured]
        table.add_row(
            name,
            str(number),
            f"{middle.tokens_per_s:.1f} ({min(rates):.1f}..{max(rates):.1f})",
            f"{1000 * percentile(middle.ttft_s, 50):.0f}",
            f"{1000 * percentile(middle.gaps_s, 50):.1f}",
            f"{1000 * percentile(middle.gaps_s, 99):.1f}",
        )
    console = Console(width=120)
    console.print(table)
    for number in clients:
        alone = median_run(runs["engine, 1 core", number]).tokens_per_s
        mesh = median_run(runs["colocated, 1 core", number]).tokens_per_s
        console.print(f"mesh overhead at {number} clients: {100 * (1 - mesh / alone):.1f} %")


async def main(options: argparse.Namespace) -> None:
    """Run all arms in turn, `options.repeats` times."""
    runs: dict[tuple[str, int], list[Measured]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = Model(write_shape(options.shape, Path(folder)), options.quantize)
        for repeat in range(options.repeats):
            for arm in arms():
                print(f"round {repeat + 1} of {options.repeats}: {arm.name}", file=sys.stderr, flush=True)
                for number, measured in zip(options.clients, await measure(arm, model, options.clients), strict=True):
                    runs.setdefault((arm.name, number), []).append(measured)
            print_table(runs, options.clients)  # after each round: a long run may be cut short


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m bench.serving", description=__doc__.split("\n\n")[0])
    parser.add_argument("--shape", default="135m")
    parser.add_argument("--quantize", default="none", help="none or int8")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=3)
    asyncio.run(main(parser.parse_args()))
