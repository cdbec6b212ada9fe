"""`tandem breakdown`: the time that requests spend in each phase."""

import argparse
import asyncio
import json
import random
import shlex
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

import tandem
from mesh.domain.errors import ConfigurationError
from tandem_cli.colours import strip_controls
from tandem_cli.connection import add_connection_arguments, open_async_client
from tandem_cli.load_test.breakdown import MARKS, PERCENTS, TimedRequest, bar, median_request, steps_of, summarise
from tandem_cli.load_test.meshes import own_mesh
from tandem_cli.load_test.records import RunFailed
from tandem_cli.tables import wide_console

NAME = "breakdown"
ABOUT = "send sample requests and show where their time goes: queue, prefill, transfer, decode, ..."

_BAR_WIDTH = 100
_COLOURS = {"prefill": "cyan", "transfer": "magenta", "wait": "yellow", "decode": "green", "backoff": "red"}
_FIRST_PLAIN_ID = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_connection_arguments(parser)
    parser.add_argument("--up", metavar="FLAGS", help='start a mesh to measure: --up="FLAGS of tandem up"')
    parser.add_argument("--model", help="served model (default: the only one)")
    parser.add_argument("--requests", type=int, default=32, metavar="N", help="number of sample requests (32)")
    parser.add_argument("--concurrency", type=int, default=4, metavar="N", help="number of requests in flight (4)")
    parser.add_argument("--input-tokens", type=int, default=256, metavar="N", help="tokens of each random prompt (256)")
    parser.add_argument(
        "--output-tokens", type=int, default=32, metavar="N", help="tokens to generate per request (32)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")


def run(args: argparse.Namespace) -> int:
    """Measure, then print the table or the JSON object on stdout."""
    for name in ("requests", "concurrency", "input_tokens", "output_tokens"):
        if getattr(args, name) < 1:
            raise ConfigurationError(f"--{name.replace('_', '-')} must be >= 1, got {getattr(args, name)}")
    requests = asyncio.run(_measure(args))
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
    console.print(table)
    request = median_request(requests)
    console.print(
        f"\nthe median request, {strip_controls(request.request_id)}: "
        f"{request.total_ms:.1f} ms{_describe_timing(request)}"
    )
    line = Text()
    for name, count in bar(request, _BAR_WIDTH):
        line.append(MARKS[name] * count, _COLOURS.get(name, ""))
    console.print(line)


def _describe_timing(request: TimedRequest) -> str:
    attempts = request.timing.attempts
    sent_ms = sum(attempt.kv_transfer_ms or 0.0 for attempt in attempts)
    replays = f", {len(attempts)} attempts" if len(attempts) > 1 else ""
    seen_ms = request.phases_ms["transfer"]
    transfer = f", KV transfer {sent_ms:.1f} ms, {seen_ms:.1f} ms of it after prefill" if sent_ms else ""
    first = f", first token after {request.timing.first_token_ms:.1f} ms"
    return first + transfer + replays


def describe(requests: list[TimedRequest]) -> dict[str, Any]:
    """The content of `--json`."""
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
                "attempts": len(request.timing.attempts),
                "steps": steps_of(request),
            }
            for request in requests
        ],
    }


async def _measure(args: argparse.Namespace) -> list[TimedRequest]:
    async with _client(args) as client:
        model = await client.model(args.model or "", timeout=10)
        rng = random.Random(0)
        prompts = [
            [rng.randrange(_FIRST_PLAIN_ID, model.vocab_size) for _ in range(args.input_tokens)]
            for _ in range(args.requests)
        ]
        unsent = iter(prompts)
        requests: list[TimedRequest] = []

        async def send_next() -> None:
            for prompt in unsent:
                requests.append(await _send(client, prompt, args))

        await asyncio.gather(*(send_next() for _ in range(args.concurrency)))
    return requests


async def _send(client: tandem.AsyncClient, prompt: list[int], args: argparse.Namespace) -> TimedRequest:
    started_s = time.perf_counter()
    result = await client.generate(
        token_ids=prompt, model=args.model, max_new_tokens=args.output_tokens, ignore_eos=True
    )
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
