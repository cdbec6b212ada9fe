"""Throughput and CPU time of one router, with workers that compute nothing.

    python -m bench.router [--clients 8 32 128] [--tokens 128] [--repeats 3]
    python -m bench.router --replicas 1 2 3
    python -m bench.router --workers 10 100 1000

"gRPC alone" is the CPU time of a server that streams the same messages at the same pace and does nothing else
(bench.bare_stream), in the router's place and in turn with it: no router in grpc.aio takes less.

The router has the first core to itself; paced workers (tandem_cli.load_test.paced) and clients share the second. CPU
time per 1,000 tokens gives the throughput that one core can carry. Gaps between tokens, compared with the pace of
the workers, give the delay that the router adds.

With `--replicas`, the mesh has that many decode workers in turn, with 16 clients per worker. Paced workers need no core
of their own, so only the mesh can prevent linear scaling.

With `--workers`, the mesh is simulated: the real router, and that many modelled workers in turn, half of them prefill
workers, under the same load. The CPU time is that of everything, so only its growth is the workers'. A placement is
what the queue does for each request that finds capacity.
"""

import argparse
import asyncio
import json
import logging
import os
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

import tandem
from bench.closed_loop import Measured, Workload, median_run, run_closed_loop, through
from bench.paced_mesh import paced_mesh, service
from bench.processes import cpu_s
from mesh.interrupts import run_async, run_program, showing
from mesh.logs import quiet_logs
from router.admission.placement import PlacementQuery, place
from router.admission.prefix_chain import PrefixChain
from router.settings import RouterSettings
from tandem_cli.load_test.figures import p50_and_p99_ms
from tandem_cli.simulation import trace
from tandem_cli.simulation.mesh import SimulatedMesh
from tandem_cli.simulation.observed import Observed
from tandem_cli.simulation.profile import MeshProfile, StepTimes, WorkerProfile
from tandem_cli.simulation.run import simulate

_INPUT_TOKENS = 64
_BLOCK_TOKENS = 16
_CLIENTS_PER_REPLICA = 16
_SIMULATED_RATE, _SIMULATED_S = 20.0, 60.0
_NUM_PLACEMENTS = 200
_NUM_HEARTBEATS = 1000


@dataclass(frozen=True, slots=True)
class RouterRun:
    """One run: the measurements of the clients, and the CPU time of the router."""

    clients: int
    measured: Measured
    router_cpu_s: float
    bare_ms_per_1000_tokens: float

    @property
    def cpu_ms_per_1000_tokens(self) -> float:
        """CPU milliseconds of the router per 1,000 tokens."""
        return 1e6 * self.router_cpu_s / self.measured.num_tokens


async def measure(num_clients: list[int], tokens: int, num_decode: int = 1) -> list[RouterRun]:
    """Start a mesh and measure one run per number of clients."""
    router_core, other_core = [*sorted(os.sched_getaffinity(0)) * 2][:2]
    # A block more than each sequence takes, so that none is preempted.
    decode_flags = ("--max-batch-total-tokens", str(max(num_clients) * (_INPUT_TOKENS + tokens + _BLOCK_TOKENS)))
    mesh = paced_mesh(router_core, other_core, max(num_clients), decode_flags, num_decode)
    async with mesh as (pid, address):
        os.sched_setaffinity(0, {other_core})
        async with tandem.AsyncClient(address) as client:
            await client.wait_ready()
            await run_closed_loop(Workload(max(num_clients), 1, _INPUT_TOKENS, 4, vocab_size=250), through(client))
            runs = []
            for number in num_clients:
                load = Workload(number, 3, _INPUT_TOKENS, tokens, vocab_size=250)
                bare, bare_s = await run_bare(router_core, load)
                measured, router_s = await run_load(client, psutil.Process(pid), load)
                runs.append(RouterRun(number, measured, router_s, 1e6 * bare_s / bare.num_tokens))
            return runs


async def run_bare(core: int, load: Workload) -> tuple[Measured, float]:
    """Run the load against gRPC alone, on this core; returns its CPU seconds too."""
    async with service(core, "bench.bare_stream") as (pid, ready), tandem.AsyncClient(ready["address"]) as client:
        await run_closed_loop(replace(load, requests_per_client=1, output_tokens=4), through(client))
        return await run_load(client, psutil.Process(pid), load)


async def run_load(client: tandem.AsyncClient, server: psutil.Process, load: Workload) -> tuple[Measured, float]:
    """Run a closed loop; returns the CPU seconds of the server too."""
    before_s = cpu_s(server)
    measured = await run_closed_loop(load, through(client))
    return measured, cpu_s(server) - before_s


def show(runs: list[list[RouterRun]]) -> None:
    """Print medians by number of clients."""
    table = Table(
        *("clients", "tokens/s", "router CPU ms / 1,000 tokens", "gRPC alone", "tokens/s one core carries"),
        "gap p50 / p99 ms",
    )
    for runs_of_number in zip(*runs, strict=True):
        typical = median_run([run.measured for run in runs_of_number])
        cpu_ms = statistics.median(run.cpu_ms_per_1000_tokens for run in runs_of_number)
        bare_ms = statistics.median(run.bare_ms_per_1000_tokens for run in runs_of_number)
        gaps = p50_and_p99_ms(typical.gaps_s)
        cpu = (f"{cpu_ms:.0f}", f"{bare_ms:.0f}", f"{1e6 / cpu_ms:.0f}")
        table.add_row(str(runs_of_number[0].clients), f"{typical.tokens_per_s:.0f}", *cpu, gaps)
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
        gaps = p50_and_p99_ms(typical.gaps_s)
        row = (
            number,
            runs_of_number[0].clients,
            f"{typical.tokens_per_s:.0f}",
            f"{tokens_per_worker / base_per_worker:.2f}",
            gaps,
        )
        table.add_row(*map(str, row))
    Console().print(table)


@dataclass(frozen=True, slots=True)
class MeshRun:
    """CPU time of one simulated mesh. `start_s` ends when all workers were proven. A worker sends two heartbeats a
    second."""

    start_s: float
    request_ms: float
    placement_us: float
    heartbeat_us: float


def measure_workers(num_workers: int) -> MeshRun:
    """Simulate a mesh of this many workers under a load that a few of them could carry."""
    times = StepTimes(((1, 0.02), (512, 0.1)), ((1, 0.02), (64, 0.03)))
    role = WorkerProfile(times, num_blocks=2048, max_batch_tokens=512, max_num_seqs=64, max_model_len=4096)
    profile = MeshProfile("paced", role, role, overhead_s=0.005, transfer_s=0.003)
    arrivals = trace.steady(_SIMULATED_RATE, _SIMULATED_S, trace.LengthMix(256, 64, 0.0, 4096), seed=0)
    settings = replace(RouterSettings(model="simulated"), max_concurrent_requests=10_000)
    began_s, started_s, proven_s = time.process_time(), 0.0, 0.0
    placement_us = heartbeat_us = 0.0

    def watch(mesh: SimulatedMesh, _: Observed) -> asyncio.Task[None]:
        nonlocal started_s, proven_s, placement_us, heartbeat_us
        started_s = time.process_time()
        placement_us, heartbeat_us = time_placements(mesh), time_heartbeats(mesh)
        proven_s = time.process_time()
        return asyncio.create_task(asyncio.sleep(0))

    num_prefill = num_workers // 2
    with quiet_logs(logging.ERROR):
        simulate(profile, settings, arrivals, (num_prefill, num_workers - num_prefill), watch=watch)
    request_ms = 1000 * (time.process_time() - proven_s) / len(arrivals)
    return MeshRun(started_s - began_s, request_ms, placement_us, heartbeat_us)


def time_placements(mesh: SimulatedMesh) -> float:
    """CPU microseconds of one placement on an idle mesh."""
    ids = tuple(range(3, 253))
    began_s = time.process_time()
    for _ in range(_NUM_PLACEMENTS):
        place(PlacementQuery(len(ids), len(ids) + 64, PrefixChain(ids, "bench")), mesh.router.mesh.snapshot())
    return 1e6 * (time.process_time() - began_s) / _NUM_PLACEMENTS


def time_heartbeats(mesh: SimulatedMesh) -> float:
    """CPU microseconds of one heartbeat of a worker that has nothing new to say."""
    workers = list(mesh.workers)
    began_s = time.process_time()
    for number in range(_NUM_HEARTBEATS):
        mesh.report(workers[number % len(workers)])
    return 1e6 * (time.process_time() - began_s) / _NUM_HEARTBEATS


def show_workers(runs: dict[int, list[MeshRun]]) -> None:
    """Print medians by number of workers."""
    table = Table("workers", "CPU s until proven", "CPU ms / request", "CPU µs / placement", "CPU µs / heartbeat")
    for number, of_number in runs.items():
        table.add_row(
            str(number),
            f"{statistics.median(run.start_s for run in of_number):.2f}",
            f"{statistics.median(run.request_ms for run in of_number):.2f}",
            f"{statistics.median(run.placement_us for run in of_number):.0f}",
            f"{statistics.median(run.heartbeat_us for run in of_number):.0f}",
        )
    Console().print(table)


async def measure_scaling(replicas: list[int], tokens: int) -> list[RouterRun]:
    """Measure one mesh per number of decode workers."""
    return [(await measure([_CLIENTS_PER_REPLICA * number], tokens, number))[0] for number in replicas]


def _measure_clients(args: argparse.Namespace) -> None:
    runs: list[list[RouterRun]] = []
    with showing(runs, lambda: show(runs)):
        for _ in range(args.repeats):
            runs.append(run_async(measure(args.clients, args.tokens)))
    if args.json:
        args.json.write_text(json.dumps(_medians(runs)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--replicas", type=int, nargs="+", help="measure scaling over these numbers of decode workers")
    parser.add_argument("--workers", type=int, nargs="+", help="simulate meshes of these numbers of workers")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the medians there")
    args = parser.parse_args()
    if args.workers:
        meshes: dict[int, list[MeshRun]] = {}
        with showing(meshes, lambda: show_workers(meshes)):
            for number in args.workers:
                meshes[number] = [measure_workers(number) for _ in range(args.repeats)]
    elif args.replicas:
        scaling: list[list[RouterRun]] = []
        with showing(scaling, lambda: show_scaling(scaling, args.replicas)):
            for _ in range(args.repeats):
                scaling.append(run_async(measure_scaling(args.replicas, args.tokens)))
    else:
        _measure_clients(args)


if __name__ == "__main__":
    run_program(main)
