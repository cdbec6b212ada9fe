"""What one router can carry: tokens per second and its CPU time, with workers that compute nothing.

    python -m bench.router [--clients 8 32 128] [--tokens 128] [--repeats 3]
    python -m bench.router --replicas 1 2 3

A router and its workers (bench.paced) run as they always do; the router has the first core to itself, workers and
clients share the second. Its CPU time for each 1,000 tokens says how many a core can carry; gaps between tokens, beside
the workers' own pace, what it adds.

With `--replicas`, so many decode workers in turn, each with 16 clients of its own number: paced workers need no core to
themselves, so what keeps them from adding up is the mesh.
"""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import psutil
from rich.console import Console
from rich.table import Table

import tandem
from bench.load import Measured, Workload, median_run, percentile, run_closed_loop, through
from bench.paced import PACE_ENV
from bench.shapes import BUNDLED

_INPUT_TOKENS = 64
_STEP_MS = 10.0
_CLIENTS_PER_REPLICA = 16


@dataclass(frozen=True, slots=True)
class Carried:
    """One run: what clients saw, and the router's CPU seconds meanwhile."""

    clients: int
    measured: Measured
    router_cpu_s: float

    @property
    def cpu_ms_per_1000_tokens(self) -> float:
        """Of the router alone."""
        return 1e6 * self.router_cpu_s / self.measured.num_tokens


@asynccontextmanager
async def service(core: int, module: str, *flags: str) -> AsyncIterator[tuple[int, Mapping[str, str]]]:
    """Start `python -m module` on one core; its process id, and what it said when it began to listen."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", *module.split(), *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={PACE_ENV: f"{_STEP_MS},0", **os.environ},
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )
    assert process.stdout is not None
    try:
        async for line in process.stdout:
            said = json.loads(line)
            if said["event"] == "listening":
                yield process.pid, said
                break
        else:
            raise SystemExit(f"{module} did not start")
    finally:
        process.terminate()
        await process.communicate()


async def measure(num_clients: list[int], tokens: int, num_decode: int = 1) -> list[Carried]:
    """One mesh, one run for each number of clients."""
    router_core, other_core = [*sorted(os.sched_getaffinity(0)) * 2][:2]
    seats = str(max(num_clients))
    async with AsyncExitStack() as stack:
        model = ("--model", str(BUNDLED))
        caps = ("--max-concurrent-requests", seats, "--max-queued-requests", seats)
        expected = ("--expect-prefill", "1", "--expect-decode", str(num_decode))
        router = service(router_core, "router", *model, "--port", "0", "--registry-port", "0", *caps, *expected)
        pid, said = await stack.enter_async_context(router)
        joined = (*model, "--registry-address", said["registry_address"])
        await stack.enter_async_context(service(other_core, "bench.paced prefill", *joined))
        seated = ("--max-rolling-batch-size", seats, "--max-batch-total-tokens", str(256 * max(num_clients)))
        for _ in range(num_decode):
            await stack.enter_async_context(service(other_core, "bench.paced decode", *joined, *seated))
        os.sched_setaffinity(0, {other_core})
        client = await stack.enter_async_context(tandem.AsyncClient(said["address"]))
        await client.wait_ready()
        await run_closed_loop(Workload(max(num_clients), 1, _INPUT_TOKENS, 4, vocab_size=250), through(client))
        return [await carry(client, psutil.Process(pid), number, tokens) for number in num_clients]


async def carry(client: tandem.AsyncClient, router: psutil.Process, num_clients: int, tokens: int) -> Carried:
    """One closed loop."""
    before = router.cpu_times()
    load = Workload(num_clients, 3, _INPUT_TOKENS, tokens, vocab_size=250)
    measured = await run_closed_loop(load, through(client))
    after = router.cpu_times()
    return Carried(num_clients, measured, after.user + after.system - before.user - before.system)


def show(runs: list[list[Carried]]) -> None:
    """Medians by number of clients."""
    table = Table(
        "clients", "tokens/s", "router CPU ms / 1,000 tokens", "tokens/s one core carries", "gap p50 / p99 ms"
    )
    for of_number in zip(*runs, strict=True):
        typical = median_run([run.measured for run in of_number])
        cpu_ms = sorted(run.cpu_ms_per_1000_tokens for run in of_number)[len(of_number) // 2]
        gaps = " / ".join(f"{1000 * percentile(typical.gaps_s, p):.1f}" for p in (50, 99))
        table.add_row(
            str(of_number[0].clients), f"{typical.tokens_per_s:.0f}", f"{cpu_ms:.0f}", f"{1e6 / cpu_ms:.0f}", gaps
        )
    Console().print(table)


def show_scaling(runs: list[list[Carried]], replicas: list[int]) -> None:
    """Medians by number of decode workers; the first number is what the others are compared with."""
    table = Table("decode workers", "clients", "tokens/s", "of linear", "gap p50 / p99 ms")
    base = 0.0
    for number, of_number in zip(replicas, zip(*runs, strict=True), strict=True):
        typical = median_run([run.measured for run in of_number])
        each = typical.tokens_per_s / number
        base = base or each
        gaps = " / ".join(f"{1000 * percentile(typical.gaps_s, p):.1f}" for p in (50, 99))
        row = (number, of_number[0].clients, f"{typical.tokens_per_s:.0f}", f"{each / base:.2f}", gaps)
        table.add_row(*map(str, row))
    Console().print(table)


async def measure_scaling(replicas: list[int], tokens: int) -> list[Carried]:
    """One mesh for each number of decode workers."""
    return [(await measure([_CLIENTS_PER_REPLICA * number], tokens, number))[0] for number in replicas]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--replicas", type=int, nargs="+", help="numbers of decode workers, instead of clients")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    if args.replicas:
        scaling = [asyncio.run(measure_scaling(args.replicas, args.tokens)) for _ in range(args.repeats)]
        show_scaling(scaling, args.replicas)
    else:
        show([asyncio.run(measure(args.clients, args.tokens)) for _ in range(args.repeats)])


if __name__ == "__main__":
    main()
