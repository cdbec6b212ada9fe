"""CPU time and delay that the HTTP gateway adds to each token, with many streams and one core for the gateway.

    python -m bench.gateway [--streams 256] [--tokens 64] [--step-ms 100] [--repeats 3]

The gateway has the first core to itself. Router, paced workers (tandem_cli.load_test.paced) and load generator share
the second. The same load goes to the router over gRPC, and through the gateway as server-sent events of
/v1/completions, without and with log-probs, in turn. CPU times are those of gateway and router. A paced worker encodes
the time of a token in its log-prob, so the delay of each token to the load generator is known if log-probs are sent.
"""

import argparse
import asyncio
import json
import os
import re
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

import tandem
from bench.paced_mesh import paced_mesh, service
from bench.processes import cpu_s
from mesh.interrupts import run_async, run_program, showing
from mesh.tasks import together
from tandem_cli.load_test.endpoints import PACE_ENV
from tandem_cli.load_test.figures import percentile
from tandem_cli.load_test.paced import delay_s

_INPUT_TOKENS = 16
_TIMES = tuple(map(attrgetter, ("ttft_s", "gaps_s", "delays_s")))
_LOGPROB = re.compile(rb'"token_logprobs":\[(-?[\d.e+]+)')


@dataclass(slots=True)
class TokenTimes:
    """Times of the tokens in all streams of one arm, in seconds."""

    token_s: list[list[float]] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    delays_s: list[float] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_s))

    @property
    def gaps_s(self) -> list[float]:
        """Gaps between consecutive tokens of a stream."""
        return [after - before for times in self.token_s for before, after in pairwise(times)]


Stream = Callable[[int, int, TokenTimes], Coroutine[Any, Any, None]]
"""`stream(number, tokens, token_times)` reads one answer of `tokens` tokens."""


def over_grpc(client: tandem.AsyncClient) -> Stream:
    """Streams from the router over gRPC."""

    async def stream(number: int, tokens: int, token_times: TokenTimes) -> None:
        begun_s, times = time.monotonic(), list[float]()
        async for event in client.stream(token_ids=_prompt(number), max_new_tokens=tokens, ignore_eos=True):
            times.append(time.monotonic())
            if event.token is not None and event.token.logprob is not None:
                token_times.delays_s.append(delay_s(event.token.logprob))
        token_times.token_s.append(times)
        token_times.ttft_s.append(times[0] - begun_s)

    return stream


def over_http(address: str, *, logprobs: bool) -> Stream:
    """Streams through the gateway, read from a plain socket, because a client library would dominate the CPU time."""
    host, _, port = address.rpartition(":")

    async def stream(number: int, tokens: int, token_times: TokenTimes) -> None:
        body = {"prompt": _prompt(number), "max_tokens": tokens, "ignore_eos": True, "stream": True}
        raw = json.dumps(body | ({"logprobs": 0} if logprobs else {})).encode()
        begun_s, times = time.monotonic(), list[float]()
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {address}\r\ncontent-length: {len(raw)}\r\n"
        writer.write(f"{head}content-type: application/json\r\nconnection: close\r\n\r\n".encode() + raw)
        async for line in reader:
            if line.startswith(b'data: {"error'):
                raise SystemExit(f"the gateway sent {line.decode()}")
            if line.startswith(b"data: {"):
                times.append(time.monotonic())
                if match := _LOGPROB.search(line):
                    token_times.delays_s.append(delay_s(float(match[1])))
        writer.close()
        if len(times) != tokens:
            raise SystemExit(f"the gateway sent {len(times)} tokens of {tokens}")
        token_times.token_s.append(times)
        token_times.ttft_s.append(times[0] - begun_s)

    return stream


def _prompt(number: int) -> list[int]:
    """The token ids of prompt `number`. Prompts share no prefix."""
    return [number % 250, number // 250, *range(1, _INPUT_TOKENS - 1)]


@dataclass(frozen=True, slots=True)
class Measured:
    """One arm in one round. CPU times are in seconds."""

    arm: str
    duration_s: float
    token_times: TokenTimes
    gateway_cpu_s: float
    router_cpu_s: float

    def ms_per_1000(self, cpu_s: float) -> float:
        """CPU milliseconds per 1,000 tokens."""
        return 1e6 * cpu_s / self.token_times.num_tokens


class Rounds:
    """Measures all arms on one mesh, in turn."""

    def __init__(self, arms: dict[str, Stream], gateway: psutil.Process, router: psutil.Process) -> None:
        self._arms = arms
        self._gateway = gateway
        self._router = router

    async def run(self, num_streams: int, tokens: int, repeats: int, measured: list[Measured]) -> None:
        """Run a short warm-up round, then `repeats` rounds, each of which is added when all its arms are measured."""
        for stream in self._arms.values():
            await self._arm("", stream, num_streams, 4)
        for _ in range(repeats):
            measured += [await self._arm(name, stream, num_streams, tokens) for name, stream in self._arms.items()]

    async def _arm(self, name: str, stream: Stream, num_streams: int, tokens: int) -> Measured:
        token_times, before = TokenTimes(), (cpu_s(self._gateway), cpu_s(self._router))
        begun_s = time.monotonic()
        await together(stream(number, tokens, token_times) for number in range(num_streams))
        duration_s = time.monotonic() - begun_s
        gateway_s, router_s = cpu_s(self._gateway) - before[0], cpu_s(self._router) - before[1]
        return Measured(name, duration_s, token_times, gateway_s, router_s)


async def measure(num_streams: int, tokens: int, repeats: int, measured: list[Measured]) -> None:
    """Start a mesh with a gateway, measure all arms, and add each complete round to `measured`."""
    gateway_core, other_core = [*sorted(os.sched_getaffinity(0)) * 2][:2]
    max_requests = 2 * num_streams  # slots of the previous arm may not be free yet
    kv_budget = ("--max-batch-total-tokens", str(2 * (tokens + 4 * _INPUT_TOKENS) * num_streams))
    decode_flags = (*kv_budget, "--max-step-tokens", str(4 * num_streams))
    async with AsyncExitStack() as stack:
        mesh = paced_mesh(other_core, other_core, max_requests, decode_flags)
        router_pid, address = await stack.enter_async_context(mesh)
        http = service(gateway_core, "gateway", "--router", address, "--port", "0")
        gateway_pid, gateway_ready = await stack.enter_async_context(http)
        os.sched_setaffinity(0, {other_core})
        client = await stack.enter_async_context(tandem.AsyncClient(address))
        await client.wait_ready()
        arms = {
            "gRPC": over_grpc(client),
            "HTTP": over_http(gateway_ready["address"], logprobs=False),
            "HTTP, log-probs": over_http(gateway_ready["address"], logprobs=True),
        }
        rounds = Rounds(arms, psutil.Process(gateway_pid), psutil.Process(router_pid))
        await rounds.run(num_streams, tokens, repeats, measured)


def show(measured: Sequence[Measured]) -> None:
    """Print medians by arm, and the delay that the gateway adds to a token."""
    columns = ("tokens/s", "TTFT p50 / p99 ms", "gap p50 / p99 ms", "delay of a token p50 / p99 ms")
    table = Table("arm", *columns, "gateway, CPU ms / 1,000 tokens", "router, CPU ms / 1,000 tokens")
    arms = {name: [run for run in measured if run.arm == name] for name in dict.fromkeys(m.arm for m in measured)}
    for name, runs in arms.items():
        figures = (
            f"{_median([run.token_times.num_tokens / run.duration_s for run in runs]):.0f}",
            *(_percentiles([pick(run.token_times) for run in runs]) for pick in _TIMES),
            f"{_median([run.ms_per_1000(run.gateway_cpu_s) for run in runs]):.0f}",
            f"{_median([run.ms_per_1000(run.router_cpu_s) for run in runs]):.0f}",
        )
        table.add_row(name, *figures)
    Console(width=150).print(table)
    grpc, http = (
        [percentile(run.token_times.delays_s, 50) for run in arms[name]] for name in ("gRPC", "HTTP, log-probs")
    )
    sys.stdout.write(f"the gateway adds {1000 * (_median(http) - _median(grpc)):.1f} ms to the median token\n")


def _percentiles(runs: Sequence[list[float]]) -> str:
    if not all(runs):
        return "-"
    return " / ".join(f"{1000 * _median([percentile(values, p) for values in runs]):.1f}" for p in (50, 99))


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--step-ms", type=float, default=100.0)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    os.environ[PACE_ENV] = f"{args.step_ms},0"
    measured: list[Measured] = []
    with showing(measured, lambda: show(measured)):
        run_async(measure(args.streams, args.tokens, args.repeats, measured))


if __name__ == "__main__":
    run_program(main)
