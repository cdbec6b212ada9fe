"""`tandem bench`: how fast a mesh is, or any OpenAI-compatible server."""

import argparse
import asyncio
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from rich.console import Console

from bench.endpoints import Opener, mesh_endpoint, openai_endpoint, own_endpoint
from bench.jobs import Lengths, read_jobs
from bench.machine import describe_machine, num_cores
from bench.plan import Arm, Plan
from bench.presets import PRESETS
from bench.records import Outcome, RunFailed
from bench.report import Report
from bench.sweep import Sweep
from bench.tables import show
from cli import bench_arguments
from cli.bench_progress import Progress
from cli.connection import connection_settings
from cli.tables import wide_console
from mesh.domain.errors import ConfigurationError
from tandem.sync import ClientOptions

NAME = "bench"
ABOUT = "measure speed under load: latency, throughput, goodput and price, as a table, JSON and plots"

add_arguments = bench_arguments.add_arguments


def run(args: argparse.Namespace) -> int:
    """Measure, or read a file of results; then show. Returns 1 if no request succeeded."""
    if args.list_presets:
        for name, preset in PRESETS.items():
            sys.stdout.write(f"{name:16}{preset.about}\n")
        return 0
    if args.plots or args.plot_from:
        _prepare_plots(Path(args.plots or "."))
    if args.json and not os.access(Path(args.json).absolute().parent, os.W_OK):
        raise ConfigurationError(f"cannot write {args.json}")
    try:
        report = Report.load(Path(args.plot_from)) if args.plot_from else _measure(args)
    except RunFailed as error:
        sys.stderr.write(f"tandem: {error}\n")
        return 1
    show(report, wide_console())
    if args.plots or args.plot_from:
        _draw(report, Path(args.plots or "."))
    succeeded = any(run.of(Outcome.OK) for point in report.points for run in point.runs)
    return 0 if succeeded else 1


def _measure(args: argparse.Namespace) -> Report:
    plan = bench_arguments.given_plan(args)
    if plan.data:
        read_jobs(Path(plan.data), Lengths())  # errors come before anything is started
    report = Report(_settings(args, plan), describe_machine(), plan.slo, plan.price_per_hour)
    arms = _arms(args, report)
    with Progress(plan, len(arms), Console(stderr=True)) as progress:
        asyncio.run(Sweep(plan, arms, report, progress).run(lambda: _save(args, report)))
    return report


def _settings(args: argparse.Namespace, plan: Plan) -> dict[str, object]:
    """The plan as it holds, whatever came from presets, flags or defaults."""
    return {"preset": args.preset, **asdict(plan)}


def _save(args: argparse.Namespace, report: Report) -> None:
    """After each round, because a long benchmark may be cut short."""
    if args.json:
        report.save(Path(args.json))


def _arms(args: argparse.Namespace, report: Report) -> Mapping[str, Opener]:
    """What to measure, by name."""
    named = [name for name in ("address", "openai", "up") if getattr(args, name) is not None]
    if len(named) > 1:
        raise ConfigurationError(f"give one of {', '.join(f'--{name}' for name in named)}")
    if args.openai:
        return {"server": partial(openai_endpoint, bench_arguments.openai_server(args))}
    if args.up is None and (args.address or not args.preset):
        settings = connection_settings(args)
        options: ClientOptions = {"api_key": settings.api_key, "tls": settings.wanted_tls}
        return {"mesh": partial(mesh_endpoint, settings.address, args.model, options)}
    return _own_arms(args, report)


def _own_arms(args: argparse.Namespace, report: Report) -> Mapping[str, Opener]:
    given = tuple(shlex.split(args.up or ""))
    arms: tuple[Arm, ...] = (Arm("mesh"),)
    if args.preset:
        preset, cores = PRESETS[args.preset], num_cores()
        arms = preset.arms_on(cores)
        if preset.needs_pace(cores):
            report.notes.append(
                f"workers compute nothing here and keep a pace ({preset.pace}: ms for a step, and for each token of"
                f" it): this machine has {cores} cores, and engines need {preset.min_cores}"
            )
    return {arm.name: partial(own_endpoint, replace(arm, up=(*arm.up, *given))) for arm in arms}


def _prepare_plots(folder: Path) -> None:
    """Fail before anything is measured."""
    try:
        import matplotlib  # noqa: F401

        folder.mkdir(parents=True, exist_ok=True)
    except ImportError as error:
        raise ConfigurationError("plots need the extra: pip install 'tandem-serve[bench]'") from error
    except OSError as error:
        raise ConfigurationError(f"cannot make the folder {folder}: {error.strerror}") from error


def _draw(report: Report, folder: Path) -> None:
    from bench.plots import draw  # needs an extra

    for path in draw(report, folder):
        sys.stderr.write(f"plot: {path}\n")
