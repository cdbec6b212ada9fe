"""Throughput and CPU time of one router, with workers that compute nothing.

    python -m bench.router [--clients 8 32 128] [--tokens 128] [--repeats 3]
    python -m bench.router --replicas 1 2 3

The router has the first core to itself; paced workers (tandem_cli.load_test.paced) and clients share the second. CPU
time per 1,000 tokens gives the throughput that one core can carry. Gaps between tokens, compared with the pace of
the workers, give the delay that the router adds.

With `--replicas`, the mesh has that many decode workers in turn, with 16 clients per worker. Paced workers need no core
of their own, so only the mesh can prevent linear scaling.
"""

import argparse
import asyncio
import json
import os
import statistics
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

import tandem
from bench.paced_mesh import paced_mesh
from tandem_cli.load_test.figures import percentile
from tandem_cli.load_test.load import Measured, Workload, median_run, run_closed_loop, through

_INPUT_TOKENS = 64
_CLIENTS_PER_REPLICA = 16


@dataclass(frozen=True, slots=True)
class RouterRun:
    """One run: the measurements of the clients, and the CPU time of the router."""

    clients: int
    measured: Measured
    router_cpu_s: float

    @property
    def cpu_ms_per_1000_tokens(self) -> float:
        """CPU milliseconds of the router per 1,000 tokens."""
        return 1e6 * self.router_cpu_s / self.measured.num_tokens


async def measure(num_clients: list[int], tokens: int, num_decode: int = 1) -> list[RouterRun]:
    """Start a mesh and measure one run per number of clients."""
    router_core, other_core = [*sorted(os.sched_getaffinity(0)) * 2][:2]
    decode_flags = ("--max-batch-total-tokens", str(256 * max(num_clients)))
    mesh = paced_mesh(router_core, other_core, max(num_clients), decode_flags, num_decode)
    async with mesh as (pid, address):
        os.sched_setaffinity(0, {other_core})
        async with tandem.AsyncClient(address) as client:
            await client.wait_ready()
            await run_closed_loop(Workload(max(num_clients), 1, _INPUT_TOKENS, 4, vocab_size=250), through(client))
            return [await run_clients(client, psutil.Process(pid), number, tokens) for number in num_clients]


async def run_clients(client: tandem.AsyncClient, router: psutil.Process, num_clients: int, tokens: int) -> RouterRun:
    """Run one closed loop with `num_clients` clients."""
    before = router.cpu_times()
    load = Workload(num_clients, 3, _INPUT_TOKENS, tokens, vocab_size=250)
    measured = await run_closed_loop(load, through(client))
    after = router.cpu_times()
    return RouterRun(num_clients, measured, after.user + after.system - before.user - before.system)


def show(runs: list[list[RouterRun]]) -> None:
    """Print medians by number of clients."""
    table = Table(
        "clients", "tokens/s", "router CPU ms / 1,000 tokens", "tokens/s one core carries", "gap p50 / p99 ms"
    )
    for runs_of_number in zip(*runs, strict=True):
        typical = median_run([run.measured for run in runs_of_number])
        cpu_ms = sorted(run.cpu_ms_per_1000_tokens for run in runs_of_number)[len(runs_of_number) // 2]
        gaps = " / ".join(f"{1000 * percentile(typical.gaps_s, p):.1f}" for p in (50, 99))
        table.add_row(
            str(runs_of_number[0].clients), f"{typical.tokens_per_s:.0f}", f"{cpu_ms:.0f}", f"{1e6 / cpu_ms:.0f}", gaps
        )
    Console().print(table)


def _medians(runs: list[list[RouterRun]]) -> dict[str, float]:
    return {
        f"router, {of_number[0].clients} clients, CPU ms / 1,000 tokens": statistics.median(
            run.cpu_ms_per_1000_tokens for run in of_number
        )
        for of_number in zip(*runs, strict=True)
    }


def show_scaling(runs: list[list[RouterRun]], replicas: list[int]) -> None:
    """Print medians by number of decode workers, relative to the first number."""
    table = Table("decode workers", "clients", "tokens/s", "of linear", "gap p50 / p99 ms")
    base_per_worker = 0.0
    for number, runs_of_number in zip(replicas, zip(*runs, strict=True), strict=True):
        typical = median_run([run.measured for run in runs_of_number])
        tokens_per_worker = typical.tokens_per_s / number
        base_per_worker = base_per_worker or tokens_per_worker
        gaps = " / ".join(f"{1000 * percentile(typical.gaps_s, p):.1f}" for p in (50, 99))
        row = (
            number,
            runs_of_number[0].clients,
            f"{typical.tokens_per_s:.0f}",
            f"{tokens_per_worker / base_per_worker:.2f}",
            gaps,
        )
        table.add_row(*map(str, row))
    Console().print(table)


async def measure_scaling(replicas: list[int], tokens: int) -> list[RouterRun]:
    """Measure one mesh per number of decode workers."""
    return [(await measure([_CLIENTS_PER_REPLICA * number], tokens, number))[0] for number in replicas]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--replicas", type=int, nargs="+", help="measure scaling over these numbers of decode workers")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the medians there")
    args = parser.parse_args()
    if args.replicas:
        scaling = [asyncio.run(measure_scaling(args.replicas, args.tokens)) for _ in range(args.repeats)]
        show_scaling(scaling, args.replicas)
    else:
        runs = [asyncio.run(measure(args.clients, args.tokens)) for _ in range(args.repeats)]
        show(runs)
        if args.json:
            args.json.write_text(json.dumps(_medians(runs)))


if __name__ == "__main__":
    main()
