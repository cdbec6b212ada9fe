"""Throughput and time to first token of a mesh, compared with the same engine without a mesh.

    python -m bench.serving [--shape 135m] [--quantize none] [--clients 1 8 32] [--repeats 3]

Four arms run in turn, `repeats` times, and medians are printed. Comparing `engine, 1 core` with `colocated, 1 core`
shows the overhead of the mesh: it is the same engine on the same core, without and with router, gRPC and client.
`separated` has prefill on one core and decode on the other; `engine, 2 cores` is one engine with both cores. An engine
alone runs in a process of its own, which this module starts as `python -m bench.serving engine MODEL CORES ...`.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

import tandem
from bench.closed_loop import Measured, Workload, median_run, run_closed_loop, through
from bench.shapes import write_shape
from decode_worker.settings import DecodeSettings
from engine.engine import StepResult
from engine.loop import EngineLoop
from engine.sequence import SequenceState
from mesh.domain.request import SamplingParams, SequenceSpec, mint_id
from mesh.interrupts import run_async, run_program
from tandem_cli.load_test.endpoints import own_mesh
from tandem_cli.load_test.figures import percentile
from worker.load_engine import load_engine
from worker.runner_settings import EngineLimits

_ENGINE = "engine"


@dataclass(frozen=True, slots=True)
class Arm:
    """One arm: flags of `tandem up` for a mesh, or cores for the engine alone."""

    name: str
    flags: tuple[str, ...] = ()
    engine_cores: str = ""


def arms() -> list[Arm]:
    """The four arms, on the first two allowed cores."""
    first, second = [*sorted(os.sched_getaffinity(0)), 0, 0][:2]
    return [
        Arm("engine, 1 core", engine_cores=str(first)),
        Arm("colocated, 1 core", ("--colocated", "--threads-per-worker", "1")),
        Arm("engine, 2 cores", engine_cores=f"{first},{second}"),
        Arm("separated", ()),
    ]


async def measure(arm: Arm, folder: Path, quantize: str, clients: Sequence[int]) -> list[Measured]:
    """Measure one run per number of clients."""
    if arm.engine_cores:
        return await _start_engine(arm, folder, quantize, clients)
    flags = ["--model", str(folder), "--load-format", "dummy", "--quantize", quantize, *arm.flags]
    async with own_mesh(flags) as address, tandem.AsyncClient(address) as client:
        send = through(client)
        await run_closed_loop(Workload(1, 1, 32, 8), send)
        return [await run_closed_loop(Workload(number), send) for number in clients]


async def _start_engine(arm: Arm, folder: Path, quantize: str, clients: Sequence[int]) -> list[Measured]:
    arguments = (str(folder), arm.engine_cores, quantize, *map(str, clients))
    command = [sys.executable, "-m", "bench.serving", _ENGINE, *arguments]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    output, _ = await process.communicate()
    return [Measured(**json.loads(line)) for line in output.decode().splitlines() if line.startswith("{")]


class EngineAlone:
    """Sends requests directly to an EngineLoop. Call `stop` at the end."""

    def __init__(self, model_dir: Path, quantize: str) -> None:
        settings = DecodeSettings(model=str(model_dir), registry_address="none", load_format="dummy", quantize=quantize)
        loaded = load_engine(settings, EngineLimits(settings.step_tokens, settings.max_rolling_batch_size))
        self._engine = EngineLoop(loaded.engine(), on_step=self._on_step, on_death=self._on_death)
        self._streams: dict[str, tuple[Callable[[], None], asyncio.Future[None]]] = {}
        self._engine.start()

    async def send(self, prompt: list[int], max_new_tokens: int, on_token: Callable[[], None]) -> int:
        """Run one request. Implements bench.closed_loop.Send."""
        sampling = SamplingParams(max_new_tokens=max_new_tokens, seed=0, ignore_eos=True)
        spec = SequenceSpec(mint_id(), 0, tuple(prompt), len(prompt), sampling)
        done = asyncio.get_running_loop().create_future()
        self._streams[spec.request_id] = (on_token, done)
        await self._engine.call(lambda scheduler: scheduler.add(SequenceState(spec)))
        await done
        return max_new_tokens

    def _on_step(self, result: StepResult) -> None:
        for output in result.outputs:
            on_token, done = self._streams[output.request_id]
            on_token()
            if output.finish_reason is not None:
                done.set_result(None)

    def _on_death(self, error: BaseException) -> None:
        for _, done in self._streams.values():
            if not done.done():
                done.set_exception(error)

    async def stop(self) -> None:
        await self._engine.stop()


async def measure_engine(model_dir: Path, quantize: str, clients: Sequence[int]) -> None:
    """Measure the engine in this process, and print one line of JSON per number of clients."""
    alone = EngineAlone(model_dir, quantize)
    await run_closed_loop(Workload(1, 1, 32, 8), alone.send)  # warm-up: compiles kernels, touches memory
    for num_clients in clients:
        print(json.dumps(asdict(await run_closed_loop(Workload(num_clients), alone.send))), flush=True)
    await alone.stop()


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


async def compare(options: argparse.Namespace) -> None:
    """Run all arms in turn, `options.repeats` times."""
    runs: dict[tuple[str, int], list[Measured]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_shape(options.shape, Path(scratch))
        for repeat in range(options.repeats):
            for arm in arms():
                print(f"round {repeat + 1} of {options.repeats}: {arm.name}", file=sys.stderr, flush=True)
                runs_of_arm = await measure(arm, folder, options.quantize, options.clients)
                for number, measured in zip(options.clients, runs_of_arm, strict=True):
                    runs.setdefault((arm.name, number), []).append(measured)
            print_table(runs, options.clients)  # after each round: a long run may be cut short


def main() -> None:
    if sys.argv[1:2] == [_ENGINE]:
        _, _, folder, cores, quantize, *numbers = sys.argv
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
        run_async(measure_engine(Path(folder), quantize, [int(number) for number in numbers]))
    else:
        parser = argparse.ArgumentParser(prog="python -m bench.serving", description=__doc__.split("\n\n")[0])
        parser.add_argument("--shape", default="135m")
        parser.add_argument("--quantize", default="none", help="none or int8")
        parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
        parser.add_argument("--repeats", type=int, default=3)
        run_async(compare(parser.parse_args()))


if __name__ == "__main__":
    run_program(main)
