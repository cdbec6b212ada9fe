"""`tandem breakdown`: the time that requests spend in each phase.

The phases are those of `tandem.Timing`, as reported by the router, and `client`: the rest of the time that the client
measured, spent before the router received the request and after its last token (connection, gRPC, client code).
"""

import argparse
import json
import shlex
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

import tandem
from mesh.domain.errors import ConfigurationError
from mesh.interrupts import run_async
from mesh.tasks import together
from tandem_cli.connection import add_connection_arguments, open_async_client
from tandem_cli.load_test.endpoints import own_mesh
from tandem_cli.load_test.figures import RunFailed, percentile
from tandem_cli.load_test.jobs import Job, Lengths, random_jobs
from tandem_cli.parser import CommandParser, count
from tandem_cli.terminal import FittingTable, strip_controls, wide_console

CLIENT = "client"
PERCENTS = (50, 90, 99)
MARKS = {
    CLIENT: ".",
    "prepare": "o",
    "queue": "q",
    "dispatch": "d",
    "prefill": "P",
    "transfer": "t",
    "wait": "w",
    "decode": "D",
    "backoff": "b",
}
"""All phases in order, with the letter that stands for a phase in a bar."""
_BAR_WIDTH = 100
_COLOURS = {"prefill": "cyan", "transfer": "magenta", "wait": "yellow", "decode": "green", "backoff": "red"}


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """A request with an answer. `total_ms` was measured by the client."""

    request_id: str
    total_ms: float
    timing: tandem.Timing

    @property
    def phases_ms(self) -> dict[str, float]:
        """Milliseconds of each phase, in order. They add up to the total."""
        client_ms = max(0.0, self.total_ms - self.timing.total_ms)
        return {CLIENT: client_ms, **self.timing.phases_ms}


@dataclass(frozen=True, slots=True)
class PhaseFigures:
    """One phase over many requests: percentiles in the order of PERCENTS, and its share of the total time."""

    name: str
    percentiles_ms: tuple[float, ...]
    share: float


def add_arguments(parser: CommandParser) -> None:
    add_connection_arguments(parser)
    parser.add_argument("--up", metavar="FLAGS", help='start a mesh to measure: --up="FLAGS of tandem up"')
    parser.add_argument("--model", help="served model (default: the only one)")
    parser.add_argument("--requests", type=count, default=32, metavar="N", help="number of sample requests (32)")
    parser.add_argument("--concurrency", type=count, default=4, metavar="N", help="number of requests in flight (4)")
    about = "tokens of each random prompt (256)"
    parser.add_argument("--input-tokens", type=count, default=256, metavar="N", help=about)
    about = "tokens to generate per request (32)"
    parser.add_argument("--output-tokens", type=count, default=32, metavar="N", help=about)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")


def run(args: argparse.Namespace) -> int:
    """Measure, then print the table or the JSON object on stdout."""
    requests = run_async(_measure(args))
    if args.json:
        sys.stdout.write(json.dumps(describe(requests)) + "\n")
    else:
        show(requests, wide_console())
    return 0


def show(requests: list[TimedRequest], console: Console) -> None:
    """Print a table of all phases, and the median request as a bar."""
    table = Table("phase", box=None, pad_edge=False)
    for name in (*(f"p{percent} ms" for percent in PERCENTS), "share"):
        table.add_column(name, justify="right")
    table.add_column("")
    for row in summarise(requests):
        style = _COLOURS.get(row.name, "bold" if row.name == "total" else "")
        cells = (f"{ms:.1f}" for ms in row.percentiles_ms)
        table.add_row(Text(row.name, style), *cells, f"{100 * row.share:.1f} %", MARKS.get(row.name, ""))
    console.print(FittingTable(table))
    request = median_request(requests)
    console.print(
        f"\nthe median request, {strip_controls(request.request_id)}: "
        f"{request.total_ms:.1f} ms{_describe_timing(request)}"
    )
    line = Text()
    for name, num_cells in bar(request, min(console.width, _BAR_WIDTH)):
        line.append(MARKS[name] * num_cells, _COLOURS.get(name, ""))
    console.print(line)


def _kv_transfer_ms(request: TimedRequest) -> float:
    return sum(attempt.kv_transfer_ms or 0.0 for attempt in request.timing.attempts)


def _describe_timing(request: TimedRequest) -> str:
    attempts = request.timing.attempts
    sent_ms = _kv_transfer_ms(request)
    replays = f", {len(attempts)} attempts" if len(attempts) > 1 else ""
    seen_ms = request.phases_ms["transfer"]
    transfer = f", KV transfer {sent_ms:.1f} ms, {seen_ms:.1f} ms of it after prefill" if sent_ms else ""
    first = f", first token after {request.timing.first_token_ms:.1f} ms"
    return first + transfer + replays


def describe(requests: list[TimedRequest]) -> dict[str, object]:
    """The figures that `--json` prints."""
    return {
        "phases": {
            row.name: {
                **{f"p{percent}_ms": ms for percent, ms in zip(PERCENTS, row.percentiles_ms, strict=True)},
                "share": row.share,
            }
            for row in summarise(requests)
        },
        "requests": [
            {
                "request_id": request.request_id,
                "total_ms": request.total_ms,
                "first_token_ms": request.timing.first_token_ms,
                "kv_transfer_ms": _kv_transfer_ms(request),
                "attempts": len(request.timing.attempts),
                "steps": steps_of(request),
            }
            for request in requests
        ],
    }


async def _measure(args: argparse.Namespace) -> list[TimedRequest]:
    async with _client(args) as client:
        model = await client.model(args.model or "", timeout=10)
        lengths = Lengths(args.input_tokens, args.output_tokens, model.vocab_size)
        unsent = iter(random_jobs(lengths, args.requests, seed=0))
        requests: list[TimedRequest] = []

        async def send_next() -> None:
            for job in unsent:
                requests.append(await _send(client, job, args.model))

        await together(send_next() for _ in range(args.concurrency))
    return requests


async def _send(client: tandem.AsyncClient, job: Job, model: str | None) -> TimedRequest:
    started_s = time.perf_counter()
    result = await client.generate(token_ids=job.token_ids, model=model, max_new_tokens=job.max_tokens, ignore_eos=True)
    total_ms = 1000 * (time.perf_counter() - started_s)
    if result.timing is None:
        raise ConfigurationError("this router reports no timing: it is older than this command")
    return TimedRequest(result.request_id, total_ms, result.timing)


@asynccontextmanager
async def _client(args: argparse.Namespace) -> AsyncIterator[tandem.AsyncClient]:
    if args.up is None:
        async with open_async_client(args) as client:
            yield client
        return
    try:
        async with own_mesh(shlex.split(args.up)) as address, tandem.AsyncClient(address) as client:
            yield client
    except RunFailed as error:
        raise ConfigurationError(str(error)) from error


def summarise(requests: Sequence[TimedRequest]) -> list[PhaseFigures]:
    """One row per phase, and a row `total` for complete requests."""
    columns = {name: [request.phases_ms[name] for request in requests] for name in MARKS}
    columns["total"] = [sum(request.phases_ms.values()) for request in requests]
    total_ms = sum(columns["total"]) or 1.0
    return [
        PhaseFigures(name, tuple(percentile(values, percent) for percent in PERCENTS), sum(values) / total_ms)
        for name, values in columns.items()
    ]


def median_request(requests: Sequence[TimedRequest]) -> TimedRequest:
    """The request with the median time."""
    ordered = sorted(requests, key=lambda request: request.total_ms)
    return ordered[len(ordered) // 2]


def steps_of(request: TimedRequest) -> list[tuple[str, float]]:
    """Phases of a request with their milliseconds, attempt by attempt. Phases of zero length are omitted."""
    steps = [(CLIENT, request.phases_ms[CLIENT]), ("prepare", request.timing.prepare_ms)]
    for attempt in request.timing.attempts:
        steps += [(name, getattr(attempt, f"{name}_ms")) for name in tandem.models.ATTEMPT_PHASES]
    return [(name, length_ms) for name, length_ms in steps if length_ms > 0]


def bar(request: TimedRequest, width: int) -> list[tuple[str, int]]:
    """A request as a bar of `width` characters: phases in order, each with its number of characters.

    Boundaries are rounded independently, so that errors do not add up. Phases shorter than half a character may vanish.
    """
    steps = steps_of(request)
    scale = width / (sum(length_ms for _, length_ms in steps) or 1.0)
    cells: list[tuple[str, int]] = []
    at_ms, drawn = 0.0, 0
    for name, length_ms in steps:
        at_ms += length_ms
        stop = round(at_ms * scale)
        cells.append((name, stop - drawn))
        drawn = stop
    return [(name, count) for name, count in cells if count]
