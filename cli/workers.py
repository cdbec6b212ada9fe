"""`tandem workers`: who serves, and how busy."""

import argparse
import time
from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

import tandem
from cli.connection import add_connection_arguments, open_client
from cli.tables import wide_console

NAME = "workers"
ABOUT = "show the workers and their load"

_COLUMNS = ("role", "worker", "state", "pid", "address", "running", "waiting", "free blocks", "seen")
_STATE_STYLES = {"ready": "green", "draining": "yellow", "stalled": "red", "lost": "red"}


@dataclass(frozen=True, slots=True)
class Sample:
    """The mesh at one moment of monotonic time."""

    at_s: float
    mesh: tandem.Mesh


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_connection_arguments(parser)
    parser.add_argument("--watch", action="store_true", help="keep the table up to date until Ctrl-C")
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="time between updates (1)")


def run(args: argparse.Namespace) -> int:
    """Print the table, once or until interrupted."""
    console = wide_console()
    with open_client(args) as client:
        first = _sample(client)
        if not args.watch:
            console.print(render(first, None))
            return 0
        try:
            _watch(client, first, console, args.interval)
        except KeyboardInterrupt:
            return 0
    return 0


def render(now: Sample, before: Sample | None) -> Group:
    """The table; with an earlier sample it has speeds."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in (*_COLUMNS, *(("tokens/s",) if before else ())):
        table.add_column(name, overflow="fold")
    guesses = any(worker.speculative != "none" for worker in now.mesh.workers)
    if guesses:
        table.add_column("accepted", overflow="fold")
    speeds = tokens_per_s(before, now) if before else {}
    for worker in now.mesh.workers:
        table.add_row(
            worker.role,
            worker.worker_id,
            Text(worker.state, _STATE_STYLES.get(worker.state, "")),
            str(worker.pid),
            worker.address,
            str(worker.load.num_running),
            str(worker.load.num_waiting),
            f"{worker.load.free_blocks}/{worker.num_blocks}",
            f"{worker.last_seen_s:.1f} s",
            *((_speed(speeds.get(worker.incarnation)),) if before else ()),
            *((_accepted(worker),) if guesses else ()),
        )
    counts = f"{now.mesh.active_requests} active, {now.mesh.queued_requests} queued"
    return Group(table, Text(counts, "dim"))


def tokens_per_s(before: Sample, now: Sample) -> Mapping[str, float]:
    """Tokens generated (decode) and computed (prefill) per second, by incarnation."""
    earlier = {worker.incarnation: _num_tokens(worker) for worker in before.mesh.workers}
    elapsed_s = max(now.at_s - before.at_s, 1e-9)
    return {
        worker.incarnation: (_num_tokens(worker) - earlier[worker.incarnation]) / elapsed_s
        for worker in now.mesh.workers
        if worker.incarnation in earlier
    }


def _num_tokens(worker: tandem.Worker) -> int:
    return worker.load.computed_tokens if worker.role == "prefill" else worker.load.generated_tokens


def _accepted(worker: tandem.Worker) -> str:
    """Of the tokens guessed by speculative decoding."""
    load = worker.load
    return f"{load.accepted_tokens / load.drafted_tokens:.0%} of {load.drafted_tokens}" if load.drafted_tokens else ""


def _speed(tokens_per_second: float | None) -> str:
    return "" if tokens_per_second is None else f"{tokens_per_second:.0f}"


def _sample(client: tandem.Client) -> Sample:
    return Sample(time.monotonic(), client.mesh(timeout=10))


def _watch(client: tandem.Client, first: Sample, console: Console, interval_s: float) -> None:
    before = first
    with Live(render(first, None), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(interval_s)
            now = _sample(client)
            live.update(render(now, before), refresh=True)
            before = now
