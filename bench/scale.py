"""A router, its registry and Redis, with up to a thousand modelled workers and tens of thousands of streams over gRPC.

    python -m bench.scale [--workers 10 100 1000] [--streams 100 1000 10000] [--routers 2 --redis]

Workers are modelled (bench.modelled_workers): their registrations, heartbeats, links and calls are real, and they
compute nothing. Streams are opened once and stay open, and get tokens at a rate that workers set, so that the cost of
an open stream and that of a token can be told apart. Routers have the first core, all other processes the others.

A row is measured over `--seconds`, once all its streams have had a token: CPU time and memory (PSS) of routers and of
Redis, messages a second, and how long a router takes to answer a small call meanwhile. With several routers the figures
are those of all together. Memory grows with streams in modelled workers and clients, too, which are on this machine.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import grpc
from rich.console import Console
from rich.table import Table

from bench.modelled_mesh import Memory, Mesh, MeshFailed, Shape, running
from mesh.interrupts import run_async, run_program, showing
from tandem.v1 import generation_pb2, generation_pb2_grpc
from tandem_cli.load_test.figures import p50_and_p99_ms

_PROBE_INTERVAL_S = 0.1
_PROBE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of one number of streams."""

    num_workers: int
    num_streams: int
    tokens_per_s: float
    heartbeats_per_s: float
    router_cpu: float
    redis_cpu: float
    memory: Memory
    redis_commands_per_s: float
    probes_s: list[float]
    num_failed: int
    join_cpu_s: float
    open_cpu_s: float = 0.0
    first_token_s: float = 0.0


async def measure(shape: Shape, streams: Sequence[int], seconds: float) -> list[Row]:
    """Start a mesh, and measure it with these numbers of streams, the smaller first. Raises MeshFailed."""
    rows: list[Row] = []
    async with running(shape) as mesh:
        num_open = 0
        for num_streams in sorted({0, *streams}):
            before = await mesh.read()
            await mesh.hold(num_streams)
            held = await mesh.read()
            row = await _measure_row(mesh, num_streams, seconds)
            if rows:
                num_opened = num_streams - num_open
                # While streams are opened, the router does what it did before them; that is not their cost.
                background_s = rows[-1].router_cpu * (held.at_s - before.at_s)
                open_cpu_s = (held.router_cpu_s - before.router_cpu_s - background_s) / num_opened
                first_token_s = (held.first_token_s - before.first_token_s) / num_opened
                row = replace(row, open_cpu_s=open_cpu_s, first_token_s=first_token_s)
            rows.append(row)
            num_open = num_streams
            show_row(rows[-1], rows[0])
    return rows


async def _measure_row(mesh: Mesh, num_streams: int, seconds: float) -> Row:
    probing = asyncio.create_task(_probe(mesh.addresses[0], seconds))
    begun = await mesh.read()
    probes_s = await probing
    ended = await mesh.read()
    length_s = ended.at_s - begun.at_s
    return Row(
        mesh.shape.num_workers,
        num_streams,
        tokens_per_s=(ended.tokens - begun.tokens) / length_s,
        heartbeats_per_s=(ended.heartbeats - begun.heartbeats) / length_s,
        router_cpu=(ended.router_cpu_s - begun.router_cpu_s) / length_s,
        redis_cpu=(ended.redis_cpu_s - begun.redis_cpu_s) / length_s,
        memory=mesh.memory(),
        redis_commands_per_s=(ended.redis_commands - begun.redis_commands) / length_s,
        probes_s=probes_s,
        num_failed=mesh.num_failed,
        join_cpu_s=mesh.join_cpu_s,
    )


async def _probe(address: str, seconds: float) -> list[float]:
    """Ask the router a small thing again and again; returns how long each answer took."""
    took_s, until_s = list[float](), time.monotonic() + seconds
    async with grpc.aio.insecure_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        while time.monotonic() < until_s:
            begun_s = time.monotonic()
            await stub.GetModel(generation_pb2.GetModelRequest(), timeout=_PROBE_TIMEOUT_S)
            took_s.append(time.monotonic() - begun_s)
            await asyncio.sleep(_PROBE_INTERVAL_S)
    return took_s


_COLUMNS = (
    "workers",
    "CPU s to join",
    "streams",
    "CPU ms to open one",
    "first token s",
    "tokens/s",
    "heartbeats/s",
    "router CPU %",
    "router MB",
    "KB / stream: router, workers, clients",
    "Redis CPU %",
    "Redis MB",
    "Redis commands/s",
    "answer p50 / p99 ms",
    "failed",
)


def cells(row: Row, idle: Row) -> list[str]:
    """The cells of a row; `idle` is that without streams."""
    memory, before = row.memory, idle.memory
    grown = (memory.routers - before.routers, memory.workers - before.workers, memory.clients - before.clients)
    return [
        f"{row.num_workers:,}",
        "" if row.num_streams else f"{row.join_cpu_s:.2f}",
        f"{row.num_streams:,}",
        f"{1000 * row.open_cpu_s:.2f}" if row.num_streams else "",
        f"{row.first_token_s:.2f}" if row.num_streams else "",
        f"{row.tokens_per_s:,.0f}",
        f"{row.heartbeats_per_s:,.0f}",
        f"{100 * row.router_cpu:.0f}",
        f"{memory.routers / 1e6:,.0f}",
        ", ".join(f"{size / 1e3 / row.num_streams:.0f}" for size in grown) if row.num_streams else "",
        f"{100 * row.redis_cpu:.0f}",
        f"{memory.redis / 1e6:,.0f}",
        f"{row.redis_commands_per_s:,.0f}",
        p50_and_p99_ms(row.probes_s),
        str(row.num_failed),
    ]


def show_row(row: Row, idle: Row) -> None:
    """Print a row at once: a long run that is interrupted has shown something."""
    named = zip(_COLUMNS, cells(row, idle), strict=True)
    sys.stderr.write(", ".join(f"{name} {cell}" for name, cell in named if cell) + "\n")


def show(runs: Sequence[Sequence[Row]]) -> None:
    """Print all rows as a table."""
    table = Table(*_COLUMNS)
    for rows in runs:
        for row in rows:
            table.add_row(*cells(row, rows[0]))
    Console(width=200).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--streams", type=int, nargs="*", default=[100, 1000, 10_000])
    parser.add_argument("--routers", type=int, default=1, help="more than one need --redis")
    parser.add_argument("--redis", action="store_true", help="registry and permits in Redis, not in the router")
    parser.add_argument("--tokens-per-s", type=float, default=4.0, help="of each decode worker and router")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each row")
    args = parser.parse_args()
    if args.routers > 1 and not args.redis:
        parser.error("several routers find their workers through Redis: add --redis")
    shapes = [Shape(number, args.routers, args.redis, args.tokens_per_s) for number in args.workers]
    runs: list[list[Row]] = []
    try:
        with showing(runs, lambda: show(runs)):
            for shape in shapes:
                runs.append(run_async(measure(shape, args.streams, args.seconds)))
    except MeshFailed as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    run_program(main)
