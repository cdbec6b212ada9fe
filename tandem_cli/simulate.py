"""`tandem simulate`: a trace of requests through the real router and modelled workers, in virtual time.

The workers' times come from a profile: measured from a running mesh (`--measure`), or the best case that `tandem plan`
computes for a model on a device. The router is imported only to simulate.
"""

import argparse
import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import MofNCompleteColumn, TimeRemainingColumn

from mesh.domain.errors import ConfigurationError
from mesh.interrupts import run_async
from mesh.logs import quiet_logs
from mesh.settings import as_flags, load_settings
from router.settings import RouterSettings
from tandem_cli.connection import add_connection_arguments, open_async_client
from tandem_cli.load_test.figures import Record, RunFailed, Slo, count_errors
from tandem_cli.parser import CommandParser, count, given, not_negative, output_file, positive, whole
from tandem_cli.plan import MODEL_HELP, add_device, add_precision, capacity_of, require_context
from tandem_cli.simulate_tables import show_errors, show_figures, show_hours, show_sweep
from tandem_cli.simulation import trace
from tandem_cli.simulation.figures import Figures, by_hour, figures
from tandem_cli.simulation.measure import MeshMeter
from tandem_cli.simulation.observed import Observed
from tandem_cli.simulation.profile import MeshProfile, best_case
from tandem_cli.simulation.scaling_rules import ScaleLimits
from tandem_cli.terminal import error_console, progress_bar, wide_console

if TYPE_CHECKING:
    from tandem_cli.simulation.run import Watch

_ROUTER_SETTINGS = (
    "max_concurrent_requests",
    "max_queued_requests",
    "ttft_target_s",
    "prefill_threshold",
    "prefill_overflow",
    "switch_roles",
    "switch_after_s",
    "switch_pause_s",
)
_MAX_SPLITS = 12
_SLO = Slo()
_LIMITS = ScaleLimits()


def add_arguments(parser: CommandParser) -> None:
    _add_trace(parser)
    _add_profile(parser)
    _add_mesh(parser)
    goals = parser.add_argument_group("goodput and price")
    goals.add_argument(
        "--slo-ttft-ms",
        type=positive,
        default=_SLO.ttft_ms,
        metavar="MS",
        help=f"time to first token ({_SLO.ttft_ms:g})",
    )
    about = f"time per output token after the first ({_SLO.tpot_ms:g})"
    goals.add_argument("--slo-tpot-ms", type=positive, default=_SLO.tpot_ms, metavar="MS", help=about)
    goals.add_argument("--price-per-hour", type=positive, metavar="P", help="price of a worker's machine")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def _add_trace(parser: CommandParser) -> None:
    group = parser.add_argument_group("requests")
    about = "JSON lines with arrival_s, input_tokens and max_tokens, as tandem bench --trace takes them"
    parser.add_argument("trace", nargs="?", type=Path, metavar="TRACE", help=about)
    drawn = group.add_mutually_exclusive_group()
    drawn.add_argument("--rate", type=positive, metavar="R", help="without a trace: Poisson arrivals, R per second")
    about = "without a trace: a day with R requests per second in the mean, 1.6 R at 15:00, 0.4 R at 3:00"
    drawn.add_argument("--day", type=positive, metavar="R", help=about)
    group.add_argument("--duration", type=positive, default=600.0, metavar="S", help="seconds of --rate (600)")
    group.add_argument("--input-tokens", type=count, default=256, metavar="N", help="mean tokens of a prompt (256)")
    group.add_argument("--output-tokens", type=count, default=64, metavar="N", help="mean tokens of an answer (64)")
    about = "spread of the lengths: sigma of their logarithms; 0: all are equal (0)"
    group.add_argument("--spread", type=not_negative, default=0.0, metavar="S", help=about)
    about = (
        "prompts get up to X times as long, at 9:00 or the ends of --duration, and as short, answers the other way (1)"
    )
    group.add_argument("--shift", type=positive, default=1.0, metavar="X", help=about)
    group.add_argument("--seed", type=int, default=0, metavar="N", help="seed of arrivals and lengths (0)")
    group.add_argument(
        "--write-trace", type=output_file, metavar="FILE", help="also write the requests, for tandem bench"
    )


def _add_profile(parser: CommandParser) -> None:
    group = parser.add_argument_group("workers' times (default: the best case of --model on --device)")
    source = group.add_mutually_exclusive_group()
    source.add_argument("--profile", type=Path, metavar="FILE", help="a measured profile")
    about = "measure the idle mesh at --address, write its profile to FILE, and simulate nothing"
    source.add_argument("--measure", type=output_file, metavar="FILE", help=about)
    source.add_argument("--model", default="tandem-small", help=MODEL_HELP)
    add_connection_arguments(parser)
    add_precision(group)
    about = "bandwidth of the links that carry KV (10)"
    group.add_argument("--link-gbit-per-s", type=positive, default=10.0, metavar="G", help=about)
    add_device(parser)


def _add_mesh(parser: CommandParser) -> None:
    group = parser.add_argument_group("mesh")
    group.add_argument("--prefill", type=whole, metavar="N", help="prefill workers (1)")
    group.add_argument("--decode", type=count, metavar="N", help="decode workers (1)")
    group.add_argument("--sweep", type=count, metavar="N", help="N workers, divided between the roles in every way")
    for field in fields(RouterSettings):
        if field.name in _ROUTER_SETTINGS:
            parser.add_setting(field, group=group)
    rule = parser.add_argument_group("scaling")
    by = rule.add_mutually_exclusive_group()
    about = "scale both roles by the rules of deploy/kubernetes; --prefill and --decode are the workers at the start"
    by.add_argument("--scale-rule", action="store_const", const="kubernetes", help=about)
    about = "scale both roles by the router's own advice instead"
    by.add_argument("--scale-by-advice", action="store_const", const="advice", dest="scale_rule", help=about)
    about = f"fewest workers of each role ({_LIMITS.min_workers}, or --max-workers if that is less)"
    rule.add_argument("--min-workers", type=count, metavar="N", help=about)
    about = f"most workers of each role ({_LIMITS.max_workers})"
    rule.add_argument("--max-workers", type=count, default=_LIMITS.max_workers, metavar="N", help=about)
    about = f"seconds from the decision for a worker until it serves ({_LIMITS.start_s:g})"
    rule.add_argument("--worker-start", type=positive, default=_LIMITS.start_s, metavar="S", help=about)
    about = f"seconds that a worker may drain ({_LIMITS.drain_s:g})"
    rule.add_argument("--worker-drain", type=positive, default=_LIMITS.drain_s, metavar="S", help=about)


def run(args: argparse.Namespace) -> int:
    """Simulate, or measure a profile; print the figures on stdout."""
    if args.measure is not None:
        try:
            profile = run_async(_measure(args))
        except RunFailed as error:
            sys.stderr.write(f"tandem: {error}\n")
            return 1
        profile.save(args.measure)
        sys.stderr.write(f"{profile.about}: {args.measure}\n")
        return 0
    changes = (
        ("--sweep", args.sweep),
        ("a rule that scales", args.scale_rule),
        ("--switch-roles", _settings(args).switch_roles),
    )
    if len(names := [name for name, is_given in changes if is_given]) > 1:
        raise ConfigurationError(f"use either {' or '.join(names)}")
    workers = (1 if args.prefill is None else args.prefill, 1 if args.decode is None else args.decode)
    if args.sweep is not None and (args.prefill, args.decode) != (None, None):
        raise ConfigurationError("--sweep divides its workers between the roles: leave out --prefill and --decode")
    if args.min_workers is None:
        args.min_workers = min(_LIMITS.min_workers, args.max_workers)
    if args.scale_rule and args.min_workers > args.max_workers:
        raise ConfigurationError(f"--min-workers {args.min_workers} is more than --max-workers {args.max_workers}")
    profile = _profile(args)
    arrivals = _arrivals(args, profile)
    if args.write_trace is not None:
        trace.write(args.write_trace, arrivals)
    result = _sweep(args, profile, arrivals) if args.sweep is not None else _run_once(args, profile, arrivals, workers)
    if args.json:
        sys.stdout.write(json.dumps({"profile": asdict(profile), "num_requests": len(arrivals), **result}) + "\n")
    return 0


async def _measure(args: argparse.Namespace) -> MeshProfile:
    async with open_async_client(args) as client:
        return await MeshMeter(client, await client.model("")).profile()


def _profile(args: argparse.Namespace) -> MeshProfile:
    if args.profile is not None:
        return MeshProfile.load(args.profile)
    capacity, device, config = capacity_of(args)
    about = f"best case: {args.model} on {device.name}"
    return best_case(capacity, about, config.max_model_len, args.link_gbit_per_s)


def _arrivals(args: argparse.Namespace, profile: MeshProfile) -> list[trace.Arrival]:
    if args.trace is not None:
        if args.rate is not None or args.day is not None:
            raise ConfigurationError("a trace has its own arrivals: leave out --rate and --day")
        return trace.read(args.trace)
    max_total = profile.decode.max_model_len
    require_context(args, max_total)
    mix = trace.LengthMix(args.input_tokens, args.output_tokens, args.spread, max_total, args.shift)
    if args.day is not None:
        return trace.day(args.day, mix, args.seed)
    if args.rate is None:
        raise ConfigurationError("say which requests come: a TRACE, --rate or --day")
    return trace.steady(args.rate, args.duration, mix, args.seed)


def _run_once(
    args: argparse.Namespace, profile: MeshProfile, arrivals: Sequence[trace.Arrival], workers: tuple[int, int]
) -> dict[str, object]:
    watch, settings = None, _settings(args)
    if settings.switch_roles:
        from tandem_cli.simulation.switching import switching

        watch = switching(settings, args.worker_drain)
    elif args.scale_rule:
        from tandem_cli.simulation.autoscaler import scaling

        limits = ScaleLimits(args.min_workers, args.max_workers, args.worker_start, args.worker_drain)
        watch = scaling(limits, args.scale_rule)
    slo, console = _slo(args), wide_console()
    with _showing(len(arrivals)) as progress:
        observed = _observe(args, profile, arrivals, workers, progress, watch)
    measured = figures(observed, slo, args.price_per_hour)
    hours, errors = by_hour(observed, slo), count_errors(observed.records)
    if not args.json:
        show_figures(measured, profile.about, console)
        show_errors(errors, console)
        if args.scale_rule or settings.switch_roles:
            show_hours(hours, console)
    return {"figures": measured, "hours": hours, "errors": errors}


def _sweep(args: argparse.Namespace, profile: MeshProfile, arrivals: Sequence[trace.Arrival]) -> dict[str, object]:
    """Every split of the workers, or some of many."""
    step = -(-args.sweep // _MAX_SPLITS)
    splits = [(num_prefill, args.sweep - num_prefill) for num_prefill in range(0, args.sweep, step)]
    rows: list[Figures] = []
    with _showing(len(splits) * len(arrivals)) as progress:
        for num_prefill, num_decode in splits:
            observed = _observe(args, profile, arrivals, (num_prefill, num_decode), progress)
            measured = figures(observed, _slo(args), args.price_per_hour)
            rows.append({"prefill": num_prefill, "decode": num_decode, **measured})
    best = best_split(rows)
    if not args.json:
        show_sweep(rows, best, profile.about, wide_console())
    return {"splits": rows, "best": {role: best[role] for role in ("prefill", "decode")}}


def best_split(rows: Sequence[Figures]) -> Figures:
    """Return the split with most good requests. Of equal ones, those that answer at all come first; then the shortest
    p99 of TTFT decides.
    """
    return max(rows, key=lambda row: (round(row["slo_share"], 3), row["num_ok"] > 0, -row["ttft_p99_ms"]))


def _observe(
    args: argparse.Namespace,
    profile: MeshProfile,
    arrivals: Sequence[trace.Arrival],
    num_workers: tuple[int, int],
    on_done: Callable[[Record], None],
    watch: "Watch | None" = None,
) -> Observed:
    from tandem_cli.simulation.run import simulate

    # Workers cost as much after the last request of a drawn load.
    min_duration_s = trace.DAY_S if args.day is not None else 0.0 if args.rate is None else args.duration
    with quiet_logs(logging.ERROR):  # failures of modelled workers are part of the figures
        return simulate(
            profile,
            _settings(args),
            arrivals,
            num_workers,
            min_duration_s=min_duration_s,
            watch=watch,
            on_done=on_done,
        )


def _settings(args: argparse.Namespace) -> RouterSettings:
    flags = as_flags(model="simulated", **given(args, _ROUTER_SETTINGS))
    return load_settings(RouterSettings, flags, prog="simulate").values


@contextmanager
def _showing(total: int) -> Iterator[Callable[[Record], None]]:
    """Show on standard error how many requests have ended."""
    with progress_bar(error_console(), MofNCompleteColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task("requests", total=total)
        yield lambda _: bar.advance(task)


def _slo(args: argparse.Namespace) -> Slo:
    return replace(_SLO, ttft_ms=args.slo_ttft_ms, tpot_ms=args.slo_tpot_ms)
