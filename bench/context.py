"""Time to first token and time per token against the length of the context, for Tandem and its peers.

    python -m bench.context [--arms tandem tandem-colocated openvino vllm] [--quantize int8] [--tokens 2048 8192 32768]
                            [--limit-s 900] [--repeats 1] [--json FILE] [--plot FILE.svg]

One request at a time: a prompt of so many random tokens, then `--output-tokens` tokens. Lengths go up; an arm that
needs longer than `--limit-s` for a request is left out from that length on. Shapes have room for 262,144 positions
("135m-long", "0.5b-long"). Arms are written as in bench.peers.arms. `bench.step --context` measures the engine alone.
"""

import argparse
import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.peers.arms import Arm, Setup, Stream, add_common_flags, arm_cpu_s, in_turn, setup_of, started, write_rows
from bench.shapes import LONG, positions_of
from mesh.interrupts import run_async, run_program
from tandem_cli.load_test.figures import percentile

_VOCAB = range(3, 250)
_SPARE_TOKENS = 1024
_HANDOFF_GAPS = 2
"""Gaps after the first token that are not counted: the sequence moves to the decode worker."""


@dataclass(frozen=True, slots=True)
class Point:
    """One request: seconds to its first token, milliseconds of a later one, CPU seconds of all processes."""

    tokens: int
    ttft_s: float
    token_ms: float
    cpu_s: float


Points = dict[tuple[Arm, int], list[Point]]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.context", description=__doc__.split("\n\n")[0])
    add_common_flags(parser, ("tandem", "tandem-colocated", "openvino", "vllm"))
    parser.set_defaults(shape="135m-long", repeats=1)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--output-tokens", type=int, default=16)
    parser.add_argument("--limit-s", type=float, default=900.0)
    parser.add_argument("--plot", type=Path, help="also draw the medians into this file")
    options = parser.parse_args()
    if (most := positions_of(options.shape) - options.output_tokens) < max(options.tokens):
        parser.error(f"--tokens: {options.shape} has room for prompts of {most} tokens; shapes in '{LONG}' have more")
    room = max(options.tokens) + options.output_tokens + _SPARE_TOKENS
    setup = replace(setup_of(options), kv_tokens=-(-room // _SPARE_TOKENS) * _SPARE_TOKENS)
    run_async(compare(options, setup))


async def compare(options: argparse.Namespace, setup: Setup) -> None:
    """Measure all arms in turn, and print the table after each round."""
    points: Points = {}

    async def once(arm: Arm, repeat: int) -> None:
        async with started(arm, setup) as stream:
            for tokens in sorted(options.tokens):
                cpu_s = arm_cpu_s()
                try:
                    async with asyncio.timeout(options.limit_s):
                        ttft_s, token_ms = await request(stream, tokens, options.output_tokens, repeat)
                except TimeoutError:
                    return
                point = Point(tokens, ttft_s, token_ms, arm_cpu_s() - cpu_s)
                points.setdefault((arm, tokens), []).append(point)

    async for _ in in_turn(options.arms, options.repeats, once):
        medians = {arm.label: of_arm for arm in options.arms if (of_arm := medians_of(points, arm))}
        Console(width=140).print(table_of(medians, f"{setup.shape}, {setup.precision}"))
        rows = [{"arm": name, **asdict(point)} for name, of_arm in medians.items() for point in of_arm]
        write_rows(options.json, setup, rows)
        if options.plot:
            draw(medians, f"{setup.shape}, {setup.precision}, {len(setup.cores)} cores", options.plot)


async def request(stream: Stream, num_tokens: int, num_output: int, seed: int) -> tuple[float, float]:
    """Seconds to the first token of a request, and the median milliseconds of a later one."""
    prompt = random.Random(f"{num_tokens} {seed}").choices(_VOCAB, k=num_tokens)
    started_s, times_s = time.perf_counter(), []
    async for tokens in stream(prompt, num_output):
        times_s += [time.perf_counter()] * len(tokens)
    gaps_s = [later - earlier for earlier, later in itertools.pairwise(times_s)]
    return times_s[0] - started_s, 1000 * percentile(gaps_s[_HANDOFF_GAPS:] or gaps_s, 50)


def medians_of(points: Points, arm: Arm) -> list[Point]:
    """One point for each length that the arm has answered, in ascending order."""
    lengths = sorted(tokens for measured, tokens in points if measured == arm)
    return [_median(points[arm, tokens]) for tokens in lengths]


def _median(points: Sequence[Point]) -> Point:
    return Point(**{name: statistics.median(asdict(point)[name] for point in points) for name in asdict(points[0])})


def table_of(medians: Mapping[str, Sequence[Point]], title: str) -> Table:
    """One row for each length and arm."""
    table = Table(title=title)
    for column in ("tokens", "arm", "TTFT s", "prompt tokens/s", "ms per token", "CPU s"):
        table.add_column(column, justify="left" if column == "arm" else "right")
    rows = [(point.tokens, name, point) for name, points in medians.items() for point in points]
    for tokens, name, point in sorted(rows, key=lambda row: row[0]):
        speed = f"{tokens / point.ttft_s:,.0f}"
        table.add_row(f"{tokens:,}", name, f"{point.ttft_s:.2f}", speed, f"{point.token_ms:.1f}", f"{point.cpu_s:.1f}")
    return table


def draw(medians: Mapping[str, Sequence[Point]], title: str, path: Path) -> None:
    """Draw both figures against the length of the context. Needs matplotlib (the extra `bench`)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    figure.suptitle(title)
    panels = (("time to first token, s", "ttft_s"), ("time per token, ms", "token_ms"))
    for axes, (label, name) in zip(figure.subplots(1, 2), panels, strict=True):
        for arm, points in medians.items():
            axes.loglog([p.tokens for p in points], [getattr(p, name) for p in points], marker="o", label=arm)
        axes.set_xlabel("tokens of the prompt")
        axes.set_ylabel(label)
        axes.grid(visible=True, which="both", color="#e5e5e5")
    axes.legend(frameon=False)
    figure.savefig(path)


if __name__ == "__main__":
    run_program(main)
