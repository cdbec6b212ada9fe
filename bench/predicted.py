"""The simulator beside the mesh that it predicts: one trace through both, and how far they are apart.

    python -m bench.predicted [--up="--prefill 1 --decode 1"] [--rate 4] [--duration 60] [--repeats 3]
    python -m bench.predicted --pace 20,0.2        # workers that compute nothing: the mesh without its engines

The mesh starts on this machine and is measured while nobody uses it, as `tandem simulate --measure` does. Then the
trace runs through it `--repeats` times and through the simulator once; measured figures are medians. Use a quiet
machine: the profile knows nothing of what others do while the trace runs.
"""

import argparse
import json
import logging
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

import tandem
from mesh.interrupts import run_async, run_program
from mesh.logs import quiet_logs
from mesh.settings import load_settings
from router.settings import RouterSettings
from tandem_cli.load_test import figures as load_figures
from tandem_cli.load_test.endpoints import own_mesh
from tandem_cli.load_test.figures import Slo
from tandem_cli.load_test.jobs import Lengths, read_trace
from tandem_cli.load_test.load_generator import LoadGenerator, mesh_target
from tandem_cli.simulation import figures as simulated_figures
from tandem_cli.simulation import trace
from tandem_cli.simulation.measure import MeshMeter
from tandem_cli.simulation.profile import MeshProfile
from tandem_cli.simulation.run import simulate

_SHOWN = ("output_tokens_per_s", "ttft_p50_ms", "ttft_p90_ms", "ttft_p99_ms", "tpot_p50_ms", "gap_p99_ms")
_GOAL = 0.15


async def measure(
    args: argparse.Namespace, path: Path
) -> tuple[MeshProfile, tuple[int, int], list[Mapping[str, float]]]:
    """Return the profile of a mesh, its workers by role, and the figures of each run. Writes the trace to `path`."""
    mesh = own_mesh(shlex.split(args.up), args.pace)
    async with mesh as address, tandem.AsyncClient(address, max_retries=0) as client:
        roles = [worker.role for worker in await client.workers()]
        model = await client.model("")
        profile = await MeshMeter(client, model).profile()
        limit = profile.decode.max_model_len
        mix = trace.LengthMix(args.input_tokens, args.output_tokens, args.spread, limit)
        trace.write(path, trace.steady(args.rate, args.duration, mix, args.seed))
        runs: list[Mapping[str, float]] = []
        for repeat in range(args.repeats):
            jobs = read_trace(path, Lengths(vocab_size=model.vocab_size), f"{args.seed}/{repeat}")
            run = await LoadGenerator(mesh_target(client)).open_loop(jobs, [job.arrival_s or 0.0 for job in jobs])
            if errors := load_figures.count_errors(run.records):
                sys.stderr.write(f"requests failed: {errors}\n")
            runs.append(load_figures.figures(run, Slo()))
            sys.stderr.write(f"run {repeat + 1} of {args.repeats}\n")
    return profile, (roles.count("prefill"), roles.count("decode")), runs


def predict(profile: MeshProfile, path: Path, num_workers: tuple[int, int]) -> dict[str, float]:
    """The figures of the same trace, simulated."""
    settings = load_settings(RouterSettings, ["--model=simulated"], prog="simulate").values
    with quiet_logs(logging.ERROR):
        observed = simulate(profile, settings, trace.read(path), num_workers)
    return simulated_figures.figures(observed, Slo())


def rows(predicted: Mapping[str, float], runs: Sequence[Mapping[str, float]]) -> list[dict[str, object]]:
    """One row for each figure; `off` is (predicted - measured) / measured."""
    medians = load_figures.medians(runs)
    return [
        {
            "figure": name,
            "predicted": predicted[name],
            "measured": medians[name].median,
            "runs": [run[name] for run in runs if name in run],
            "off": predicted[name] / medians[name].median - 1,
        }
        for name in _SHOWN
        if name in medians and medians[name].median
    ]


def show(profile: MeshProfile, table_rows: Sequence[Mapping[str, object]]) -> None:
    table = Table("figure", "predicted", "measured", "off", "runs")
    for row in table_rows:
        off = float(str(row["off"]))
        runs = row["runs"]
        assert isinstance(runs, list)
        marked = f"{off:+.1%}" if abs(off) <= _GOAL else f"[bold]{off:+.1%}[/bold]"
        measured = (f"{row['predicted']:,.1f}", f"{row['measured']:,.1f}")
        table.add_row(str(row["figure"]), *measured, marked, ", ".join(f"{value:,.1f}" for value in runs))
    console = Console(width=120)
    console.print(
        f"{profile.about}; while the other role computes, steps take {profile.prefill.stretch:g} (prefill) and "
        f"{profile.decode.stretch:g} (decode) times as long; the rest of a first token "
        f"{1000 * profile.overhead_s:.1f} ms, {profile.overhead_stretch:g} times as long while answers run"
    )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--up", default="--prefill 1 --decode 1", metavar="FLAGS", help="flags of tandem up")
    parser.add_argument("--pace", default="", metavar="MS,MS", help="workers that sleep: of a step, of a token")
    parser.add_argument("--rate", type=float, default=4.0, help="requests per second")
    parser.add_argument("--duration", type=float, default=60.0, help="seconds of arrivals")
    parser.add_argument("--input-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--spread", type=float, default=0.6, help="sigma of the lengths' logarithms")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tandem-predicted-") as folder:
        path = Path(folder) / "trace.jsonl"
        profile, num_workers, runs = run_async(measure(args, path))
        table_rows = rows(predict(profile, path, num_workers), runs)
    if args.json:
        print(json.dumps({"profile": asdict(profile), "rows": table_rows}))
    else:
        show(profile, table_rows)


if __name__ == "__main__":
    run_program(main)
