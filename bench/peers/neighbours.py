"""Throughput beside programs that never rest: endless loops on every core of the engine, for each arm in turn.

    python -m bench.peers.neighbours --quantize int8 --arms tandem tandem-colocated openvino --hogs 0 1 3

With one endless loop on each core a fair share of the machine is a half, with three a quarter. Each arm is started once
a round, and measured quiet and beside each number of loops without a pause in between. The table has medians of the
rounds: tokens/s, their share of what the arm reaches alone, and the ratio to the best peer beside the same loops.
"""

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from bench.closed_loop import Workload, run_closed_loop
from bench.peers.arms import Arm, Setup, add_common_flags, in_turn, send_through, setup_of, started, write_rows
from mesh.interrupts import run_async, run_program

_ENDLESS = "while True: pass"


@dataclass(frozen=True, slots=True)
class Case:
    """One figure: an arm, with so many clients, beside so many endless loops on each core."""

    arm: str
    clients: int
    hogs: int


Rates = Mapping[Case, Sequence[float]]
"""Tokens/s of each round."""


@contextlib.contextmanager
def busy(cores: Sequence[int], hogs: int) -> Iterator[None]:
    """Run `hogs` endless loops on each of the cores, at the priority of this process."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for core in [core for core in cores for _ in range(hogs)]:
            processes.append(subprocess.Popen([sys.executable, "-c", _ENDLESS]))
            os.sched_setaffinity(processes[-1].pid, {core})
        yield
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.wait()


def print_table(rates: Rates, peers: frozenset[str], title: str) -> None:
    """One row per arm and number of clients; for each number of loops the throughput, its share, and the ratio."""
    medians = {case: statistics.median(of_case) for case, of_case in rates.items()}
    hogs = sorted({case.hogs for case in medians})
    table = Table(title=title)
    for column in ("clients", "arm", *(f"{count} loops a core" for count in hogs)):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for clients, arm in sorted({(case.clients, case.arm): None for case in medians}):
        table.add_row(str(clients), arm, *(cell(Case(arm, clients, count), medians, peers) for count in hogs))
    Console(width=120).print(table)


def cell(case: Case, medians: Mapping[Case, float], peers: frozenset[str]) -> str:
    """Tokens/s, their share of what the arm reaches alone, and the ratio to the best peer beside the same loops."""
    if case not in medians:
        return ""
    alone = medians.get(Case(case.arm, case.clients, 0))
    cell = f"{medians[case]:.0f}" + (f", {medians[case] / alone:.0%}" if alone and case.hogs else "")
    beside = [medians.get(Case(peer, case.clients, case.hogs), 0.0) for peer in peers]
    return cell if case.arm in peers or not any(beside) else f"{cell}, {medians[case] / max(beside):.2f} x"


async def compare(arms: Sequence[Arm], setup: Setup, options: argparse.Namespace) -> None:
    """Measure all arms in turn, `options.repeats` times, and print the table after each round."""
    rates: dict[Case, list[float]] = {}
    peers = frozenset(arm.label for arm in arms if not arm.is_tandem)

    async def once(arm: Arm, _: int) -> None:
        async with started(arm, setup) as stream:
            for clients in options.clients:
                for hogs in options.hogs:
                    with busy(setup.cores, hogs):
                        workload = Workload(clients, 2, options.input_tokens, options.output_tokens)
                        measured = await run_closed_loop(workload, send_through(stream))
                    rates.setdefault(Case(arm.label, clients, hogs), []).append(measured.tokens_per_s)

    async for _ in in_turn(arms, options.repeats, once):
        print_table(
            rates,
            peers,
            f"{setup.shape}, {setup.precision}: tokens/s beside endless loops, share of the quiet, x best peer",
        )
        rows = [{**asdict(case), "tokens_per_s": of_case} for case, of_case in rates.items()]
        write_rows(options.json, setup, rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.peers.neighbours", description=__doc__.split("\n\n")[0])
    add_common_flags(parser, ("tandem", "tandem-colocated", "openvino", "vllm"))
    parser.add_argument("--hogs", type=int, nargs="+", default=[0, 1, 3], help="endless loops on each core")
    parser.add_argument("--clients", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--input-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=64)
    options = parser.parse_args()
    run_async(compare(options.arms, setup_of(options), options))


if __name__ == "__main__":
    run_program(main)
