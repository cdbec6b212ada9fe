"""`tandem breakdown`: where the time of requests goes, phase by phase."""

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
from bench.breakdown import MARKS, PERCENTS, Sample, bar, median_sample, steps_of, summarise
from cli.connection import add_connection_arguments, open_async_client
from cli.own_mesh import own_mesh
from cli.tables import wide_console
from mesh.domain.errors import ConfigurationError

NAME = "breakdown"
ABOUT = "send sample requests and show where their time goes: queue, prefill, transfer, decode, ..."

_BAR_WIDTH = 100
_COLOURS = {"prefill": "cyan", "transfer": "magenta", "wait": "yellow", "decode": "green", "backoff": "red"}
_FIRST_PLAIN_ID = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_connection_arguments(parser)
    parser.add_argument("--up", metavar="FLAGS", help='measure a mesh of its own: --up="FLAGS of tandem up"')
    parser.add_argument("--model", help="served model (default: the only one)")
    parser.add_argument("--requests", type=int, default=32, metavar="N", help="sample requests (32)")
    parser.add_argument("--concurrency", type=int, default=4, metavar="N", help="requests in flight (4)")
    parser.add_argument("--input-tokens", type=int, default=256, metavar="N", help="random tokens of a prompt (256)")
    parser.add_argument("--output-tokens", type=int, default=32, metavar="N", help="tokens to generate (32)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")


def run(args: argparse.Namespace) -> int:
    """Measure, and print on stdout."""
    for name in ("requests", "concurrency", "input_tokens", "output_tokens"):
        if getattr(args, name) < 1:
            raise ConfigurationError(f"--{name.replace('_', '-')} must be >= 1, got {getattr(args, name)}")
    samples = asyncio.run(_measure(args))
    if args.json:
        sys.stdout.write(json.dumps(describe(samples)) + "\n")
    else:
        show(samples, wide_console())
    return 0


def show(samples: list[Sample], console: Console) -> None:
    """The table, and the bar of one request."""
    table = Table("phase", box=None, pad_edge=False)
    for name in (*(f"p{percent} ms" for percent in PERCENTS), "share"):
        table.add_column(name, justify="right")
    table.add_column("")
    for row in summarise(samples):
        style = _COLOURS.get(row.name, "bold" if row.name == "total" else "")
        cells = (f"{ms:.1f}" for ms in row.percentiles_ms)
        table.add_row(Text(row.name, style), *cells, f"{100 * row.share:.1f} %", MARKS.get(row.name, ""))
    console.print(table)
    sample = median_sample(samples)
    console.print(f"\nthe median request, {sample.request_id}: {sample.total_ms:.1f} ms{_facts(sample)}")
    line = Text()
    for name, count in bar(sample, _BAR_WIDTH):
        line.append(MARKS[name] * count, _COLOURS.get(name, ""))
    console.print(line)


def _facts(sample: Sample) -> str:
    attempts = sample.timing.attempts
    sent_ms = sum(attempt.kv_transfer_ms or 0.0 for attempt in attempts)
    replays = f", {len(attempts)} attempts" if len(attempts) > 1 else ""
    seen_ms = sample.phases_ms["transfer"]
    transfer = f", KV on its way for {sent_ms:.1f} ms, {seen_ms:.1f} of them after it" if sent_ms else ""
    first = f", first token after {sample.timing.first_token_ms:.1f} ms"
    return first + transfer + replays


def describe(samples: list[Sample]) -> dict[str, Any]:
    """The figures for machines."""
    return {
        "phases": {
            row.name: {
                **{f"p{percent}_ms": ms for percent, ms in zip(PERCENTS, row.percentiles_ms, strict=True)},
                "share": row.share,
            }
            for row in summarise(samples)
        },
        "requests": [
            {
                "request_id": sample.request_id,
                "total_ms": sample.total_ms,
                "first_token_ms": sample.timing.first_token_ms,
                "attempts": len(sample.timing.attempts),
                "steps": steps_of(sample),
            }
            for sample in samples
        ],
    }


async def _measure(args: argparse.Namespace) -> list[Sample]:
    async with _client(args) as client:
        model = await client.model(args.model or "", timeout=10)
        rng = random.Random(0)
        prompts = [
            [rng.randrange(_FIRST_PLAIN_ID, model.vocab_size) for _ in range(args.input_tokens)]
            for _ in range(args.requests)
        ]
        waiting = iter(prompts)
        samples: list[Sample] = []

        async def ask_on() -> None:
            for prompt in waiting:
                samples.append(await _ask(client, prompt, args))

        await asyncio.gather(*(ask_on() for _ in range(args.concurrency)))
    return samples


async def _ask(client: tandem.AsyncClient, prompt: list[int], args: argparse.Namespace) -> Sample:
    begun_s = time.perf_counter()
    result = await client.generate(
        token_ids=prompt, model=args.model, max_new_tokens=args.output_tokens, ignore_eos=True
    )
    total_ms = 1000 * (time.perf_counter() - begun_s)
    if result.timing is None:
        raise ConfigurationError("this router does not say where the time went: it is older than this command")
    return Sample(result.request_id, total_ms, result.timing)


@asynccontextmanager
async def _client(args: argparse.Namespace) -> AsyncIterator[tandem.AsyncClient]:
    if args.up is None:
        async with open_async_client(args) as client:
            yield client
        return
    async with own_mesh(shlex.split(args.up)) as address, tandem.AsyncClient(address) as client:
        yield client
