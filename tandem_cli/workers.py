"""`tandem workers`, `drain`, `undrain` and `switch`: shows the workers of a mesh, and changes what they do."""

import argparse
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

import tandem
from mesh.domain.errors import ConfigurationError
from mesh.interrupts import accept_signal
from tandem_cli.connection import add_connection_arguments, open_client
from tandem_cli.models import traffic_table
from tandem_cli.parser import Command, CommandParser
from tandem_cli.terminal import FittingTable, optional_cell, print_json, strip_controls, wide_console

_COLUMNS = ("role", "worker", "state", "pid", "address", "running", "waiting", "free blocks", "seen")
_TIMEOUT_S = 10.0
_MAX_INTERVAL_S = 86_400
_STATE_STYLES = {
    "ready": "green",
    "draining": "yellow",
    "switching": "yellow",
    "stalled": "red",
    "lost": "red",
    "stopped": "dim",
}
_SWITCH_POLL_S = 0.3
_WITHOUT = {
    "prefill": "decode workers compute prompts beside their answers",
    "decode": "new requests wait for the router's no_worker_timeout_s, and fail unless one is back by then",
}
_NO_ANSWER = (tandem.ConnectionFailed, tandem.DeadlineExceeded)
"""Errors of a router that restarts."""


@dataclass(frozen=True, slots=True)
class TimedMesh:
    """The mesh at one point in time, in seconds of the monotonic clock. With an `error` nothing newer is known."""

    at_s: float
    mesh: tandem.Mesh
    error: str = ""


def _add_workers_arguments(parser: CommandParser) -> None:
    add_connection_arguments(parser)
    parser.add_argument("--watch", action="store_true", help="refresh the table until Ctrl-C")
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="time between updates (1)")
    about = "print one JSON object instead of the table; with --watch, a line for each update"
    parser.add_argument("--json", action="store_true", help=about)


def _show(args: argparse.Namespace) -> int:
    """Print the tables or JSON, once or until interrupted."""
    if not 0 <= args.interval <= _MAX_INTERVAL_S:
        raise ConfigurationError(f"--interval must be in [0, {_MAX_INTERVAL_S}], got {args.interval:g}")
    show = _show_json if args.json else _watch if args.watch else _show_tables
    with open_client(args) as client:
        try:
            show(_snapshots(client, args.interval if args.watch else None))
        except KeyboardInterrupt:
            if not args.watch:
                raise
            accept_signal()
    return 0


def render(now: TimedMesh, before: TimedMesh | None) -> Group:
    """The tables of workers and of traffic. With the snapshot `before`, workers have their speeds."""
    workers = now.mesh.workers
    speeds = tokens_per_s(before, now) if before else {}
    optional_columns: tuple[tuple[str, bool, Callable[[tandem.Worker], RenderableType]], ...] = (
        ("tokens/s", before is not None, lambda worker: optional_cell(speeds.get(worker.incarnation), ".0f")),
        ("ranks", any(worker.degrees != "1x1" for worker in workers), lambda worker: worker.degrees),
        ("accepted", any(worker.speculative != "none" for worker in workers), _accepted),
        ("adapters", any(worker.adapters for worker in workers), _adapters),
    )
    more_columns = {name: cell for name, is_shown, cell in optional_columns if is_shown}
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in (*_COLUMNS, *more_columns):
        table.add_column(name, overflow="fold")
    for worker in workers:
        table.add_row(
            worker.role,
            Text(strip_controls(worker.worker_id)),
            Text(worker.state, _STATE_STYLES.get(worker.state, "")),
            str(worker.pid),
            Text(strip_controls(worker.address)),
            str(worker.load.num_running),
            str(worker.load.num_waiting),
            f"{worker.load.free_blocks}/{worker.num_blocks}",
            f"{worker.last_seen_s:.1f} s",
            *(cell(worker) for cell in more_columns.values()),
        )
    failing = [worker for worker in workers if worker.canary_error and not worker.serving]
    errors = [Text(f"{worker.worker_id} gets no requests: {worker.canary_error}", "red") for worker in failing]
    advice = [Text(advice_text(advice), "yellow") for advice in now.mesh.advice]
    if now.error:
        errors.append(Text(f"no newer state: {strip_controls(now.error)}", "red"))
    counts = f"{now.mesh.active_requests} active, {now.mesh.queued_requests} queued"
    parts: list[RenderableType] = [FittingTable(table), *errors, *advice]
    if now.mesh.traffic:
        parts += [Text(), FittingTable(traffic_table(now.mesh)), Text()]
    return Group(*parts, Text(counts, "dim"))


def advice_text(advice: tandem.Advice) -> str:
    """A sentence that says what to do, and why."""
    subject = f"a {advice.role} worker" if advice.action == "add" else f"one of the {advice.role} workers"
    return f"{advice.action} {subject}: {strip_controls(advice.reason)}"


def tokens_per_s(before: TimedMesh, now: TimedMesh) -> Mapping[str, float]:
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
    """The share of drafted tokens that speculative decoding accepted; empty without drafts."""
    load = worker.load
    return f"{load.accepted_tokens / load.drafted_tokens:.0%} of {load.drafted_tokens}" if load.drafted_tokens else ""


def _adapters(worker: tandem.Worker) -> Text:
    return Text(strip_controls(", ".join(worker.adapters)))


def _snapshots(client: tandem.Client, interval_s: float | None) -> Iterator[TimedMesh]:
    """Yield one snapshot, or one every `interval_s` for ever; the last one, with the error, while no router answers."""
    snapshot = TimedMesh(time.monotonic(), client.mesh(timeout=_TIMEOUT_S))
    yield snapshot
    while interval_s is not None:
        time.sleep(interval_s)
        try:
            snapshot = TimedMesh(time.monotonic(), client.mesh(timeout=_TIMEOUT_S))
        except _NO_ANSWER as error:
            snapshot = replace(snapshot, error=str(error))
        yield snapshot


def _show_json(snapshots: Iterator[TimedMesh]) -> None:
    for snapshot in snapshots:
        if snapshot.error:
            sys.stderr.write(f"tandem: {strip_controls(snapshot.error)}\n")
            continue
        print_json(asdict(snapshot.mesh))


def _show_tables(snapshots: Iterator[TimedMesh]) -> None:
    wide_console().print(render(next(snapshots), None))


def _watch(snapshots: Iterator[TimedMesh]) -> None:
    """Show the tables of one snapshot after the other: in the same place of a terminal, elsewhere below each other."""
    console, before = wide_console(), next(snapshots)
    if not console.is_terminal:
        console.print(render(before, None))
        for now in snapshots:
            console.print(render(now, before))
            before = now
        return
    with Live(render(before, None), console=console, auto_refresh=False) as live:
        for now in snapshots:
            live.update(render(now, before), refresh=True)
            before = now


def _add_names(parser: CommandParser) -> None:
    parser.add_argument("workers", nargs="+", metavar="WORKER", help="names of workers, as `tandem workers` shows them")
    add_connection_arguments(parser)


def _drain(args: argparse.Namespace) -> int:
    """Drain the workers. They finish their sequences; `tandem undrain` takes them back."""
    with open_client(args) as client:
        workers = client.workers(timeout=_TIMEOUT_S)
        for worker in args.workers:
            client.drain(worker, timeout=_TIMEOUT_S)
            print(f"{worker} ends what it has, and gets nothing new until: tandem undrain {worker}")
        for warning in _without_workers(workers, args.workers):
            sys.stderr.write(f"tandem: {strip_controls(warning)}\n")
    return 0


def _without_workers(workers: Sequence[tandem.Worker], drained: Collection[str]) -> list[str]:
    """Warnings of models that have no worker of a role in service any more, now that some were drained."""
    of_drained = dict.fromkeys((worker.model, worker.role) for worker in workers if worker.worker_id in drained)
    left = {(worker.model, worker.role) for worker in workers if worker.serving and worker.worker_id not in drained}
    return [
        f"no other {role} worker{f' of {model}' if model else ''} is in service: {_WITHOUT[role]}"
        for model, role in of_drained
        if (model, role) not in left
    ]


def _undrain(args: argparse.Namespace) -> int:
    with open_client(args) as client:
        for worker in args.workers:
            client.undrain(worker, timeout=_TIMEOUT_S)
            print(f"{worker} is in service again")
    return 0


def _add_switch_arguments(parser: CommandParser) -> None:
    parser.add_argument("worker", metavar="WORKER", help="name of a worker, as `tandem workers` shows it")
    about = "the role to serve in from now on; its present role takes back a switch that is under way"
    parser.add_argument("role", choices=("prefill", "decode"), help=about)
    about = "seconds to wait until it serves in this role; 0: do not wait (300)"
    parser.add_argument("--wait", type=float, default=300.0, metavar="SECONDS", help=about)
    add_connection_arguments(parser)


def _switch(args: argparse.Namespace) -> int:
    """Ask the worker, and wait until the router sends it requests in its role. Raises TandemError."""
    if not 0 <= args.wait <= _MAX_INTERVAL_S:
        raise ConfigurationError(f"--wait must be in [0, {_MAX_INTERVAL_S}], got {args.wait:g}")
    with open_client(args) as client:
        client.switch_role(args.worker, args.role, timeout=_TIMEOUT_S)
        deadline_s = time.monotonic() + args.wait
        while args.wait and not _serves(client, args.worker, args.role):
            if time.monotonic() > deadline_s:
                raise tandem.DeadlineExceeded(
                    f"{args.worker} does not serve as {args.role} after {args.wait:g} s; see: tandem workers"
                )
            time.sleep(_SWITCH_POLL_S)
    return 0


def _serves(client: tandem.Client, worker_id: str, role: str) -> bool:
    workers = client.workers(timeout=_TIMEOUT_S)
    return any(worker.worker_id == worker_id and worker.role == role and worker.serving for worker in workers)


COMMANDS = {
    "workers": Command(_add_workers_arguments, _show),
    "drain": Command(_add_names, _drain),
    "undrain": Command(_add_names, _undrain),
    "switch": Command(_add_switch_arguments, _switch),
}
