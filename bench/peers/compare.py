"""Compares Tandem with other CPU engines: the same weights, load and cores, in one interleaved run.

    python -m bench.peers.install openvino vllm      # once: each engine gets its own environment
    python -m bench.peers.compare --shape 135m --quantize int8 --arms tandem tandem-colocated openvino vllm

Each round starts every arm in turn, alone on the machine, and runs bench.closed_loop for
each number of clients. The table has medians of the rounds, and the throughput of Tandem relative to the best peer.
With `--check`, the arms' greedy tokens are compared with those of transformers instead, to see that all run one model.
bench.peers.arms describes how to write arms; docs/benchmarking-peers.md describes the settings of each engine.
"""

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from bench.closed_loop import Measured, Workload, median_run, run_closed_loop
from bench.peers.arms import (
    Arm,
    Setup,
    add_common_flags,
    arm_cpu_s,
    in_turn,
    parse_arm,
    send_through,
    setup_of,
    started,
    write_rows,
)
from mesh.interrupts import run_async, run_program
from tandem_cli.load_test.figures import percentile

_PROMPTS = Workload(num_clients=6, requests_per_client=1, input_tokens=48, output_tokens=24, seed=1)
Answers = list[list[int]]


@dataclass(frozen=True, slots=True)
class Run:
    """One closed loop, and the CPU time that all processes of the arm used."""

    measured: Measured
    cpu_s: float

    @property
    def cpu_ms_per_token(self) -> float:
        """CPU milliseconds per generated token, prefill included. Other load on the machine hardly affects it."""
        return 1000 * self.cpu_s / self.measured.num_tokens


Runs = dict[tuple[Arm, int], list[Run]]


@dataclass(frozen=True, slots=True)
class Load:
    """The load, which is sent with each number of clients."""

    clients: tuple[int, ...]
    input_tokens: int
    output_tokens: int

    def workload(self, num_clients: int) -> Workload:
        """A closed loop with two requests per client, and at least eight: one takes less than a second."""
        return Workload(num_clients, max(2, 8 // num_clients), self.input_tokens, self.output_tokens)


@dataclass(frozen=True, slots=True)
class Row:
    """One arm at one number of clients: medians over the rounds, and the range of its throughput."""

    arm: str
    clients: int
    tokens_per_s: float
    min_tokens_per_s: float
    max_tokens_per_s: float
    ttft_p50_ms: float
    token_ms: float
    gap_p99_ms: float
    cpu_ms_per_token: float
    rounds: int


def summarise(arm: Arm, clients: int, runs: Sequence[Run]) -> Row:
    """A row of the table. Latencies are those of the run with the median throughput."""
    middle = median_run([run.measured for run in runs])
    rates = [run.measured.tokens_per_s for run in runs]
    return Row(
        arm=arm.label,
        clients=clients,
        tokens_per_s=statistics.median(rates),
        min_tokens_per_s=min(rates),
        max_tokens_per_s=max(rates),
        ttft_p50_ms=1000 * percentile(middle.ttft_s, 50),
        token_ms=1000 * statistics.fmean(middle.gaps_s),
        gap_p99_ms=1000 * percentile(middle.gaps_s, 99),
        cpu_ms_per_token=statistics.median(run.cpu_ms_per_token for run in runs),
        rounds=len(runs),
    )


def best_ratios(rows: Sequence[Row], tandem_arms: frozenset[str]) -> dict[tuple[str, int], tuple[float, str]]:
    """Throughput relative to the best peer, and the name of that peer, by Tandem arm and number of clients."""
    ratios = {}
    for row in rows:
        peers = [peer for peer in rows if peer.clients == row.clients and peer.arm not in tandem_arms]
        if row.arm in tandem_arms and peers:
            best = max(peers, key=lambda peer: peer.tokens_per_s)
            ratios[row.arm, row.clients] = (row.tokens_per_s / best.tokens_per_s, best.arm)
    return ratios


def print_table(rows: Sequence[Row], tandem_arms: frozenset[str], title: str) -> None:
    """Print the rows by number of clients, then the ratios."""
    table = Table(title=title)
    columns = ("clients", "arm", "tokens/s (min..max)", "TTFT p50 ms", "ms per token", "gap p99 ms", "CPU ms per token")
    for column in columns:
        table.add_column(column, justify="left" if column == "arm" else "right")
    for row in sorted(rows, key=lambda row: row.clients):
        table.add_row(
            str(row.clients),
            row.arm,
            f"{row.tokens_per_s:.1f} ({row.min_tokens_per_s:.1f}..{row.max_tokens_per_s:.1f})",
            f"{row.ttft_p50_ms:.0f}",
            f"{row.token_ms:.1f}",
            f"{row.gap_p99_ms:.1f}",
            f"{row.cpu_ms_per_token:.1f}",
        )
    console = Console(width=120)
    console.print(table)
    for (arm, clients), (ratio, best) in best_ratios(rows, tandem_arms).items():
        console.print(f"{arm} at {clients} clients: {ratio:.2f} of the best peer ({best})")


async def measure(arm: Arm, setup: Setup, load: Load) -> Mapping[int, Run]:
    """Start an arm and run one closed loop per number of clients."""
    runs: dict[int, Run] = {}
    async with started(arm, setup) as stream:
        for clients in load.clients:
            cpu_before = arm_cpu_s()
            measured = await run_closed_loop(load.workload(clients), send_through(stream))
            runs[clients] = Run(measured, arm_cpu_s() - cpu_before)
            print(f"  {clients} clients: {measured.tokens_per_s:.1f} tokens/s", file=sys.stderr, flush=True)
    return runs


async def compare(arms: Sequence[Arm], setup: Setup, load: Load, options: argparse.Namespace) -> None:
    """Measure all arms in turn, `options.repeats` times, and print the table after each round."""
    runs: Runs = {}
    title = f"{setup.shape}, {options.quantize}, {load.input_tokens} tokens in, {load.output_tokens} out"
    tandem_arms = frozenset(arm.label for arm in arms if arm.is_tandem)

    async def once(arm: Arm, _: int) -> None:
        for clients, run in (await measure(arm, setup, load)).items():
            runs.setdefault((arm, clients), []).append(run)

    async for _ in in_turn(arms, options.repeats, once):
        rows = [summarise(arm, clients, of_arm) for (arm, clients), of_arm in runs.items()]
        print_table(rows, tandem_arms, title)
        ratios = [
            {"arm": arm, "clients": clients, "ratio": ratio, "best_peer": best}
            for (arm, clients), (ratio, best) in best_ratios(rows, tandem_arms).items()
        ]
        tokens = {"input_tokens": load.input_tokens, "output_tokens": load.output_tokens}
        write_rows(options.json, setup, [asdict(row) for row in rows], **tokens, ratios=ratios)


async def answers(arm: Arm, setup: Setup) -> Answers:
    """The tokens of each answer. Requests run one at a time, so that batching has no effect."""
    all_tokens: Answers = []
    async with started(arm, setup) as stream:
        for prompt in _PROMPTS.prompts():
            tokens: list[int] = []
            async for new in stream(prompt, _PROMPTS.output_tokens):
                tokens += new
            all_tokens.append(tokens)
    return all_tokens


def count_agreement(reference: Answers, candidate: Answers) -> tuple[int, int]:
    """The number of equal answers, and the total number of tokens before the first difference in each answer."""
    num_equal = sum(a == b for a, b in zip(reference, candidate, strict=True))
    num_tokens = 0
    for a, b in zip(reference, candidate, strict=True):
        num_tokens += next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
    return num_equal, num_tokens


async def print_agreement(arms: Sequence[Arm], setup: Setup) -> None:
    """Print one row per arm."""
    reference = await answers(parse_arm("transformers"), setup)
    table = Table("arm", "same answers", "same tokens up to the first that differs", title="against transformers")
    total = sum(len(tokens) for tokens in reference)
    for arm in arms:
        num_equal, tokens = count_agreement(reference, await answers(arm, setup))
        table.add_row(arm.label, f"{num_equal} of {len(reference)}", f"{tokens} of {total}")
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.peers.compare", description=__doc__.split("\n\n")[0])
    add_common_flags(parser, ("tandem", "tandem-colocated", "openvino", "vllm"))
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--input-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument(
        "--check", action="store_true", help="compare greedy tokens with those of transformers instead of speed"
    )
    options = parser.parse_args()
    setup = setup_of(options)
    if options.check:
        run_async(print_agreement(options.arms, setup))
    else:
        load = Load(tuple(options.clients), options.input_tokens, options.output_tokens)
        run_async(compare(options.arms, setup, load, options))


if __name__ == "__main__":
    run_program(main)
