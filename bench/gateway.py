"""What the HTTP gateway adds to gRPC: CPU time and delay of each token, with many streams and one core for the gateway.

    python -m bench.gateway [--streams 256] [--tokens 64] [--step-ms 100] [--repeats 3]

Router and workers that compute nothing (bench.paced) run as they always do, the gateway alone on the first core,
everything else on the second. The same load goes to the router over gRPC, and through the gateway as server-sent events
of /v1/completions, plain and with log-probs, in turn. CPU times are those of the two processes. A paced worker tells as
a token's log-prob when it was made, so the delay of each token until the load generator has it is known wherever
log-probs are sent.
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
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

import tandem
from bench.load import percentile, together
from bench.paced import PACE_ENV, delay_s
from bench.router import service
from bench.shapes import BUNDLED

_INPUT_TOKENS = 16
_LOGPROB = re.compile(rb'"token_logprobs":\[(-?[\d.e+]+)')


@dataclass(slots=True)
class Seen:
    """What the streams of one arm brought, in seconds."""

    token_s: list[list[float]] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    delays_s: list[float] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Of all streams."""
        return sum(map(len, self.token_s))

    @property
    def gaps_s(self) -> list[float]:
        """Between tokens of a stream."""
        return [after - before for times in self.token_s for before, after in pairwise(times)]


Stream = Callable[[int, int, Seen], Coroutine[Any, Any, None]]
"""`stream(number, tokens, seen)` reads one answer of so many tokens."""


def over_grpc(client: tandem.AsyncClient) -> Stream:
    """Straight to the router."""

    async def stream(number: int, tokens: int, seen: Seen) -> None:
        begun_s, times = time.monotonic(), list[float]()
        async for event in client.stream(token_ids=_prompt(number), max_new_tokens=tokens, ignore_eos=True):
            times.append(time.monotonic())
            if event.token is not None and event.token.logprob is not None:
                seen.delays_s.append(delay_s(event.token.logprob))
        seen.token_s.append(times)
        seen.ttft_s.append(times[0] - begun_s)

    return stream


def over_http(address: str, *, logprobs: bool) -> Stream:
    """Through the gateway, read off a bare socket: a client library would cost more than what is measured."""
    host, _, port = address.rpartition(":")

    async def stream(number: int, tokens: int, seen: Seen) -> None:
        body = {"prompt": _prompt(number), "max_tokens": tokens, "ignore_eos": True, "stream": True}
        raw = json.dumps(body | ({"logprobs": 0} if logprobs else {})).encode()
        begun_s, times = time.monotonic(), list[float]()
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {address}\r\ncontent-length: {len(raw)}\r\n"
        writer.write(f"{head}content-type: application/json\r\nconnection: close\r\n\r\n".encode() + raw)
        async for line in reader:
            if line.startswith(b'data: {"error'):
                raise SystemExit(f"the gateway said {line.decode()}")
            if line.startswith(b"data: {"):
                times.append(time.monotonic())
                if found := _LOGPROB.search(line):
                    seen.delays_s.append(delay_s(float(found[1])))
        writer.close()
        if len(times) != tokens:
            raise SystemExit(f"the gateway sent {len(times)} tokens of {tokens}")
        seen.token_s.append(times)
        seen.ttft_s.append(times[0] - begun_s)

    return stream


def _prompt(number: int) -> list[int]:
    """One of its own, so that no prefix is shared."""
    return [number % 250, number // 250, *range(1, _INPUT_TOKENS - 1)]


@dataclass(frozen=True, slots=True)
class Measured:
    """One arm of one round. CPU in seconds."""

    arm: str
    duration_s: float
    seen: Seen
    gateway_cpu_s: float
    router_cpu_s: float

    def ms_per_1000(self, cpu_s: float) -> float:
        """CPU milliseconds for each 1,000 tokens."""
        return 1e6 * cpu_s / self.seen.num_tokens


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


class Rounds:
    """All arms against one mesh, in turn."""

    def __init__(self, arms: dict[str, Stream], gateway: psutil.Process, router: psutil.Process) -> None:
        self._arms = arms
        self._gateway = gateway
        self._router = router

    async def run(self, num_streams: int, tokens: int, repeats: int) -> list[Measured]:
        """A short round that is not counted, then `repeats`."""
        for stream in self._arms.values():
            await self._arm("", stream, num_streams, 4)
        return [
            await self._arm(name, stream, num_streams, tokens)
            for _ in range(repeats)
            for name, stream in self._arms.items()
        ]

    async def _arm(self, name: str, stream: Stream, num_streams: int, tokens: int) -> Measured:
        seen, before = Seen(), (_cpu_s(self._gateway), _cpu_s(self._router))
        begun_s = time.monotonic()
        await together(stream(number, tokens, seen) for number in range(num_streams))
        duration_s = time.monotonic() - begun_s
        gateway_s, router_s = _cpu_s(self._gateway) - before[0], _cpu_s(self._router) - before[1]
        return Measured(name, duration_s, seen, gateway_s, router_s)


async def measure(num_streams: int, tokens: int, repeats: int) -> list[Measured]:
    """One mesh with a gateway, all arms."""
    own_core, other_core = [*sorted(os.sched_getaffinity(0)) * 2][:2]
    seats, model = str(2 * num_streams), ("--model", str(BUNDLED))  # those of the arm before may not be free yet
    async with AsyncExitStack() as stack:
        caps = ("--max-concurrent-requests", seats, "--max-queued-requests", seats)
        expected = ("--expect-prefill", "1", "--expect-decode", "1")
        router = service(other_core, "router", *model, "--port", "0", "--registry-port", "0", *caps, *expected)
        router_pid, said = await stack.enter_async_context(router)
        joined = (*model, "--registry-address", said["registry_address"])
        await stack.enter_async_context(service(other_core, "bench.paced prefill", *joined))
        room = ("--max-batch-total-tokens", str(2 * (tokens + 4 * _INPUT_TOKENS) * num_streams))
        seated = ("--max-rolling-batch-size", seats, *room, "--max-step-tokens", str(4 * num_streams))
        await stack.enter_async_context(service(other_core, "bench.paced decode", *joined, *seated))
        http = service(own_core, "gateway", "--router", said["address"], "--port", "0")
        gateway_pid, heard = await stack.enter_async_context(http)
        os.sched_setaffinity(0, {other_core})
        client = await stack.enter_async_context(tandem.AsyncClient(said["address"]))
        await client.wait_ready()
        arms = {
            "gRPC": over_grpc(client),
            "HTTP": over_http(heard["address"], logprobs=False),
            "HTTP, log-probs": over_http(heard["address"], logprobs=True),
        }
        rounds = Rounds(arms, psutil.Process(gateway_pid), psutil.Process(router_pid))
        return await rounds.run(num_streams, tokens, repeats)


def show(measured: Sequence[Measured]) -> None:
    """Medians by arm, and what the gateway adds to the delay of a token."""
    columns = ("tokens/s", "TTFT p50 / p99 ms", "gap p50 / p99 ms", "delay of a token p50 / p99 ms")
    table = Table("way", *columns, "gateway, CPU ms / 1,000 tokens", "router, CPU ms / 1,000 tokens")
    arms = {name: [each for each in measured if each.arm == name] for name in dict.fromkeys(m.arm for m in measured)}
    for name, runs in arms.items():
        figures = (
            f"{_median([run.seen.num_tokens / run.duration_s for run in runs]):.0f}",
            *(_both([pick(run.seen) for run in runs]) for pick in (_ttfts, _gaps, _delays)),
            f"{_median([run.ms_per_1000(run.gateway_cpu_s) for run in runs]):.0f}",
            f"{_median([run.ms_per_1000(run.router_cpu_s) for run in runs]):.0f}",
        )
        table.add_row(name, *figures)
    Console(width=150).print(table)
    grpc, http = ([percentile(run.seen.delays_s, 50) for run in arms[name]] for name in ("gRPC", "HTTP, log-probs"))
    sys.stdout.write(f"the gateway adds {1000 * (_median(http) - _median(grpc)):.1f} ms to the median token\n")


def _ttfts(seen: Seen) -> list[float]:
    return seen.ttft_s


def _gaps(seen: Seen) -> list[float]:
    return seen.gaps_s


def _delays(seen: Seen) -> list[float]:
    return seen.delays_s


def _both(runs: Sequence[list[float]]) -> str:
    if not all(runs):
        return "-"
    return " / ".join(f"{1000 * _median([percentile(values, p) for values in runs]):.1f}" for p in (50, 99))


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--step-ms", type=float, default=100.0)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    os.environ[PACE_ENV] = f"{args.step_ms},0"
    show(asyncio.run(measure(args.streams, args.tokens, args.repeats)))


if __name__ == "__main__":
    main()
