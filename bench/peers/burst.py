"""Effect of a burst of long prompts on running streams, for Tandem and its peers.

    python -m bench.peers.burst --quantize int8 --arms tandem tandem-colocated openvino:64 openvino:128 vllm:128

There are four steady streams (256 tokens in, 128 out). When all are halfway, eight prompts of 1,500 tokens (64 out)
arrive. The burst lasts until the last long prompt has its first token. The table has the gaps between tokens of the
steady streams before and during the burst, the longest one and when it ended, in ms after the burst's arrival, and the
TTFT of the long prompts, as medians over the rounds. Arms are written as in bench.peers.arms.
"""

import argparse
import asyncio
import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.closed_loop import Workload
from bench.peers.arms import Arm, Setup, Stream, add_common_flags, in_turn, setup_of, started, write_rows
from mesh.interrupts import run_async, run_program
from tandem_cli.load_test.figures import percentile

_STEADY = Workload(num_clients=4, requests_per_client=1, input_tokens=256, output_tokens=128, seed=2)
_LONG = Workload(num_clients=8, requests_per_client=1, input_tokens=1500, output_tokens=64, seed=3)
Times = list[float]


@dataclass(frozen=True, slots=True)
class Burst:
    """Figures of one run, or medians of several runs."""

    before_p50_ms: float
    before_p99_ms: float
    during_p50_ms: float
    during_p99_ms: float
    longest_ms: float
    longest_at_ms: float
    """The end of the longest gap, after the burst's arrival."""
    long_ttft_s: float
    factor_p99: float


def gaps_ending_in(streams: Sequence[Times], start_s: float, end_s: float) -> list[tuple[float, float]]:
    """Gaps between tokens whose later token arrived in (start_s, end_s], in seconds, each with the later one's time."""
    return [
        (later - earlier, later)
        for times in streams
        for earlier, later in itertools.pairwise(times)
        if start_s < later <= end_s
    ]


def summarise(steady: Sequence[Times], long: Sequence[Times], arrival: float) -> Burst:
    """Figures of a run. `steady` and `long` have the token times of each stream; `arrival` is the start of the
    burst.
    """
    before = [gap for gap, _ in gaps_ending_in(steady, 0.0, arrival)]
    ended = gaps_ending_in(steady, arrival, max(times[0] for times in long))
    during, (longest, longest_end) = [gap for gap, _ in ended], max(ended)
    before_p99, during_p99 = percentile(before, 99), percentile(during, 99)
    return Burst(
        before_p50_ms=1000 * percentile(before, 50),
        before_p99_ms=1000 * before_p99,
        during_p50_ms=1000 * percentile(during, 50),
        during_p99_ms=1000 * during_p99,
        longest_ms=1000 * longest,
        longest_at_ms=1000 * (longest_end - arrival),
        long_ttft_s=statistics.fmean(times[0] - arrival for times in long),
        factor_p99=during_p99 / before_p99,
    )


async def run_burst(stream: Stream) -> Burst:
    """Run the steady streams and one burst."""
    steady: list[Times] = [[] for _ in _STEADY.prompts()]
    long_prompts = list(_LONG.prompts())  # drawn before the burst, which this would delay
    long: list[Times] = [[] for _ in long_prompts]
    halfway = asyncio.Event()

    async def follow(prompt: list[int], max_new_tokens: int, times: Times) -> None:
        async for tokens in stream(prompt, max_new_tokens):
            times += [time.perf_counter()] * len(tokens)
            if all(len(token_times) >= _STEADY.output_tokens // 2 for token_times in steady):
                halfway.set()

    async with asyncio.TaskGroup() as group:
        for prompt, times in zip(_STEADY.prompts(), steady, strict=True):
            group.create_task(follow(prompt, _STEADY.output_tokens, times))
        await halfway.wait()
        arrival = time.perf_counter()
        for prompt, times in zip(long_prompts, long, strict=True):
            group.create_task(follow(prompt, _LONG.output_tokens, times))
    return summarise(steady, long, arrival)


def median_of(runs: Sequence[Burst]) -> Burst:
    """The median of each figure over `runs`."""
    return Burst(**{name: statistics.median(asdict(run)[name] for run in runs) for name in asdict(runs[0])})


def print_table(runs: dict[Arm, list[Burst]], title: str) -> None:
    """Print one row per arm."""
    table = Table(title=title)
    table.add_column("arm")
    columns = ("before p50 / p99 ms", "during p50 / p99 ms", "factor at p99 (min..max)", "longest gap ms, its end")
    for column in (*columns, "long prompts' mean TTFT s"):
        table.add_column(column, justify="right")
    for arm, bursts in runs.items():
        middle, factors = median_of(bursts), [burst.factor_p99 for burst in bursts]
        table.add_row(
            arm.label,
            f"{middle.before_p50_ms:.0f} / {middle.before_p99_ms:.0f}",
            f"{middle.during_p50_ms:.0f} / {middle.during_p99_ms:.0f}",
            f"{middle.factor_p99:.1f} ({min(factors):.1f}..{max(factors):.1f})",
            f"{middle.longest_ms:.0f}, {middle.longest_at_ms:.0f}",
            f"{middle.long_ttft_s:.1f}",
        )
    Console(width=120).print(table)


async def compare(arms: Sequence[Arm], setup: Setup, repeats: int, json_file: Path | None) -> None:
    """Measure all arms in turn, `repeats` times, and print the table after each round."""
    runs: dict[Arm, list[Burst]] = {}

    async def once(arm: Arm, _: int) -> None:
        async with started(arm, setup) as stream:
            runs.setdefault(arm, []).append(await run_burst(stream))

    async for _ in in_turn(arms, repeats, once):
        print_table(runs, f"{setup.shape}, {setup.precision}")
        rows = [{"arm": arm.label, **asdict(median_of(bursts))} for arm, bursts in runs.items()]
        write_rows(json_file, setup, rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.peers.burst", description=__doc__.split("\n\n")[0])
    default = ("tandem", "tandem-colocated", "openvino", "openvino:64", "openvino:128", "vllm", "vllm:128")
    add_common_flags(parser, default)
    options = parser.parse_args()
    setup = setup_of(options)
    run_async(compare(options.arms, setup, options.repeats, options.json))


if __name__ == "__main__":
    run_program(main)
