"""Latency of HTTP requests beside thousands of connections that never send a whole request.

    python -m bench.connections [--idle 2000] [--dripping 1000] [--requests 300] [--rounds 5]

One client sends short requests, one after another, to a gateway before a paced mesh. A round measures them without the
crowd (bench.crowd) and with it, in turn, so that a slow spell of the machine does not count for one side only. The
gateway has the first core to itself, the crowd the last; router, workers and client share the second.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import httpx2
from rich.console import Console
from rich.table import Table

import tandem
from bench.paced_mesh import paced_mesh, service
from bench.processes import on_cores
from mesh.interrupts import run_async, run_program, showing
from tandem_cli.load_test.endpoints import PACE_ENV
from tandem_cli.load_test.figures import p50_and_p99_ms

_BODY = {"prompt": [1, 2, 3, 4], "max_tokens": 2, "ignore_eos": True}
_MAX_REQUESTS = 8
_NUM_WARM_UP = 20
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Round:
    """Latencies in seconds, of requests without the crowd and beside it."""

    calm_s: list[float]
    crowded_s: list[float]

    @property
    def ratio(self) -> float:
        return statistics.median(self.crowded_s) / statistics.median(self.calm_s)


async def measure(num_idle: int, num_dripping: int, num_requests: int, rounds: list[Round], num_rounds: int) -> None:
    """Start a mesh with a gateway, and add `num_rounds` to `rounds`."""
    cores = sorted(os.sched_getaffinity(0))
    gateway_core, other_core, crowd_core = cores[0], [*cores, cores[0]][1], cores[-1]
    async with AsyncExitStack() as stack:
        _, router = await stack.enter_async_context(paced_mesh(other_core, other_core, _MAX_REQUESTS, ()))
        http = service(gateway_core, "gateway", "--router", router, "--port", "0")
        _, ready = await stack.enter_async_context(http)
        os.sched_setaffinity(0, {other_core})
        async with tandem.AsyncClient(router) as direct:
            await direct.wait_ready()
        http_client = httpx2.AsyncClient(base_url=f"http://{ready['address']}", timeout=_TIMEOUT_S)
        client = await stack.enter_async_context(http_client)
        await _latencies(client, _NUM_WARM_UP)
        port = ready["address"].rpartition(":")[2]
        for _ in range(num_rounds):
            calm_s = await _latencies(client, num_requests)
            async with _crowd(crowd_core, port, num_idle, num_dripping):
                rounds.append(Round(calm_s, await _latencies(client, num_requests)))


@asynccontextmanager
async def _crowd(core: int, port: str, num_idle: int, num_dripping: int) -> AsyncIterator[None]:
    """Keep the crowd connected while the block runs."""
    process = await asyncio.create_subprocess_exec(
        *on_cores({core}, sys.executable, "-m", "bench.crowd", port, str(num_idle), str(num_dripping)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            is_connected = bool(await process.stdout.readline())
        if not is_connected:
            raise SystemExit("the crowd did not connect; is ulimit -n high enough?")
        yield
    finally:
        process.stdin.close()
        await process.wait()


async def _latencies(client: httpx2.AsyncClient, num_requests: int) -> list[float]:
    latencies_s = []
    for _ in range(num_requests):
        begun_s = time.monotonic()
        response = await client.post("/v1/completions", json=_BODY)
        latencies_s.append(time.monotonic() - begun_s)
        if response.status_code != 200:
            raise SystemExit(f"the gateway replied {response.status_code}: {response.text}")
    return latencies_s


def show(rounds: Sequence[Round], connections: str) -> None:
    """Print each round, and the medians over all rounds."""
    table = Table("round", "calm p50 / p99 ms", "crowded p50 / p99 ms", "ratio of p50")
    for number, measured in enumerate(rounds, 1):
        table.add_row(
            str(number),
            p50_and_p99_ms(measured.calm_s, 2),
            p50_and_p99_ms(measured.crowded_s, 2),
            f"{measured.ratio:.2f}",
        )
    Console(width=100).print(table)
    calm_ms, crowded_ms = (
        1000 * statistics.median(statistics.median(values) for values in sides)
        for sides in ([each.calm_s for each in rounds], [each.crowded_s for each in rounds])
    )
    ratio = statistics.median(each.ratio for each in rounds)
    sys.stdout.write(f"median request: {calm_ms:.2f} ms, {crowded_ms:.2f} ms beside {connections}\n")
    sys.stdout.write(f"ratio, median of the rounds: {ratio:.2f}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--idle", type=int, default=2000)
    parser.add_argument("--dripping", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=300, help="requests a round, without the crowd and with it")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--step-ms", type=float, default=1.0, help="time of a paced engine step")
    args = parser.parse_args()
    os.environ[PACE_ENV] = f"{args.step_ms},0"
    rounds: list[Round] = []
    with showing(rounds, lambda: show(rounds, f"{args.idle:,} idle and {args.dripping:,} dripping connections")):
        run_async(measure(args.idle, args.dripping, args.requests, rounds, args.rounds))


if __name__ == "__main__":
    run_program(main)
