"""The highest rate of requests within latency targets, for Tandem and its peers.

    python -m bench.peers.goodput --quantize int8 --arms tandem tandem-colocated vllm --rates 2 4 6 8 10 12

Requests (512 tokens in, 64 out, by default) arrive at random (Poisson), with the same requests and times for every arm.
An answer is good if its first token comes within 2 s, and the others take at most 60 ms each on average, unless other
targets are set. Goodput is the highest rate at which nine in ten answers are good. An arm that misses the target at two
rates in a row is not measured at higher rates. Figures are medians over the rounds. Arms are written as in
bench.peers.arms.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

import tandem
from bench.peers.arms import Arm, Setup, Stream, add_common_flags, in_turn, send_through, setup_of, started, write_rows
from bench.peers.process import PeerFailed
from mesh.interrupts import run_async, run_program
from tandem_cli.load_test.figures import Failed, Slo, figures, goodput
from tandem_cli.load_test.jobs import Job, Lengths, random_jobs
from tandem_cli.load_test.load_generator import LoadGenerator, OnToken, TokenCounts, as_failure, poisson_arrivals

_VOCAB_SIZE = 32000
Figures = dict[str, float]
Runs = dict[tuple[Arm, float], list[Figures]]


class Load(NamedTuple):
    """The requests, for how many seconds they arrive at each rate, and when an answer is good."""

    lengths: Lengths
    seconds: float
    slo: Slo


async def run_rate(stream: Stream, rate: float, load: Load, seed: str) -> Figures:
    """Run one open loop. docs/benchmarking.md defines the figures."""
    send = send_through(stream)

    async def target(job: Job, on_token: OnToken) -> TokenCounts:
        prompt = list(job.token_ids or ())
        try:
            return TokenCounts(await send(prompt, job.max_tokens, on_token), len(prompt))
        except tandem.TandemError as error:
            raise as_failure(error) from error
        except PeerFailed as error:
            raise Failed(str(error)) from error

    jobs = random_jobs(load.lengths, max(1, round(rate * load.seconds)), seed)
    run = await LoadGenerator(target).open_loop(jobs, poisson_arrivals(rate, len(jobs), seed))
    return figures(run, load.slo)


async def measure(arm: Arm, setup: Setup, rates: Sequence[float], load: Load, repeat: int) -> dict[float, Figures]:
    """Start an arm and measure it at all rates, until it misses the target at two rates in a row."""
    figures_by_rate: dict[float, Figures] = {}
    num_missed = 0
    async with started(arm, setup) as stream:
        for rate in rates:
            figures_by_rate[rate] = await run_rate(stream, rate, load, f"{repeat}/{rate}")
            share = figures_by_rate[rate]["slo_share"]
            print(f"  {rate:g} requests/s: {share:.0%} good", file=sys.stderr, flush=True)
            num_missed = num_missed + 1 if share < load.slo.share else 0
            if num_missed == 2:
                break
    return figures_by_rate


def print_table(runs: Runs, slo: Slo) -> None:
    """Print one row per arm and rate, then the goodput of each arm, from the median share at each rate."""
    table = Table(title=f"TTFT <= {slo.ttft_ms:g} ms, TPOT <= {slo.tpot_ms:g} ms; medians")
    table.add_column("arm")
    for column in ("requests/s", "good", "TTFT p50 / p90 ms", "TPOT p50 / p90 ms", "output tokens/s"):
        table.add_column(column, justify="right")
    points: dict[str, list[tuple[float, float]]] = {}
    for (arm, rate), rounds in runs.items():
        middle = {
            name: statistics.median(figures_of_round.get(name, 0.0) for figures_of_round in rounds)
            for name in rounds[0]
        }
        points.setdefault(arm.label, []).append((rate, middle["slo_share"]))
        times = (f"{middle[f'{name}_p50_ms']:.0f} / {middle[f'{name}_p90_ms']:.0f}" for name in ("ttft", "tpot"))
        table.add_row(
            arm.label, f"{rate:g}", f"{middle['slo_share']:.0%}", *times, f"{middle['output_tokens_per_s']:.0f}"
        )
    console = Console(width=120)
    console.print(table)
    for label, points_of_arm in points.items():
        best = goodput(points_of_arm, slo.share)
        console.print(f"goodput of {label}: {'none' if best is None else f'{best:g} requests/s'}")


async def compare(setup: Setup, options: argparse.Namespace) -> None:
    """Measure all arms in turn, `options.repeats` times, and print the table after each round."""
    runs: Runs = {}
    lengths = Lengths(options.input_tokens, options.output_tokens, _VOCAB_SIZE)
    load = Load(lengths, options.seconds, Slo(ttft_ms=options.ttft_ms, tpot_ms=options.tpot_ms))

    async def once(arm: Arm, repeat: int) -> None:
        for rate, figures_at_rate in (await measure(arm, setup, options.rates, load, repeat)).items():
            runs.setdefault((arm, rate), []).append(figures_at_rate)

    async for _ in in_turn(options.arms, options.repeats, once):
        print_table(runs, load.slo)
        rows = [{"arm": arm.label, "rate": rate, "rounds": rounds} for (arm, rate), rounds in runs.items()]
        write_rows(options.json, setup, rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.peers.goodput", description=__doc__.split("\n\n")[0])
    add_common_flags(parser, ("tandem", "tandem-colocated", "openvino:512", "vllm"))
    parser.add_argument("--rates", type=float, nargs="+", default=[2, 4, 6, 8, 10, 12])
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds of arrivals at each rate")
    parser.add_argument("--input-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--ttft-ms", type=float, default=Slo().ttft_ms)
    parser.add_argument("--tpot-ms", type=float, default=Slo().tpot_ms)
    options = parser.parse_args()
    sizes = (options.seconds, options.input_tokens, options.output_tokens, options.ttft_ms, options.tpot_ms)
    if min(*options.rates, *sizes) <= 0:
        parser.error("rates, seconds, tokens and targets must be more than 0")
    run_async(compare(setup_of(options), options))


if __name__ == "__main__":
    run_program(main)
