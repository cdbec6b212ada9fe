"""`tandem bench`: a load test of a mesh, or of any OpenAI-compatible server."""

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

from mesh.domain.errors import ConfigurationError
from tandem.sync import ClientOptions
from tandem_cli import bench_arguments
from tandem_cli.bench_progress import Progress
from tandem_cli.connection import connection_settings
from tandem_cli.load_test.endpoints import Opener, mesh_endpoint, openai_endpoint, own_endpoint
from tandem_cli.load_test.jobs import Lengths, read_jobs
from tandem_cli.load_test.machine import describe_machine, num_cores
from tandem_cli.load_test.plan import Arm, Plan
from tandem_cli.load_test.presets import PRESETS
from tandem_cli.load_test.records import Outcome, RunFailed
from tandem_cli.load_test.report import Report
from tandem_cli.load_test.sweep import Sweep
from tandem_cli.load_test.tables import show
from tandem_cli.tables import wide_console

_INTERRUPTED = 130
NAME = "bench"
ABOUT = "measure speed under load: latency, throughput, goodput and price, as a table, JSON and plots"

add_arguments = bench_arguments.add_arguments


def run(args: argparse.Namespace) -> int:
    """Measure or load results from a file, then show them. Returns 1 if no request succeeded."""
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
    if report.is_interrupted:
        return _INTERRUPTED
    succeeded = any(run.of(Outcome.OK) for point in report.points for run in point.runs)
    return 0 if succeeded else 1


def _measure(args: argparse.Namespace) -> Report:
    plan = bench_arguments.plan_from(args)
    if plan.data:
        read_jobs(Path(plan.data), Lengths())  # reports a bad file before anything is started
    report = Report(_settings(args, plan), describe_machine(), plan.slo, plan.price_per_hour)
    arms = _arms(args, report)
    try:
        with Progress(plan, len(arms), Console(stderr=True)) as progress:
            asyncio.run(Sweep(plan, arms, report, progress).run(lambda: _save(args, report)))
    except KeyboardInterrupt:
        if not report.points:
            raise
        report.notes.append("interrupted: only the runs that were complete by then are shown")
        report.is_interrupted = True
        _save(args, report)
    return report


def _settings(args: argparse.Namespace, plan: Plan) -> dict[str, object]:
    """The effective plan, after presets, flags and defaults are applied."""
    return {"preset": args.preset, **asdict(plan)}


def _save(args: argparse.Namespace, report: Report) -> None:
    """Save the results so far. Called after each round, because a long benchmark may be interrupted."""
    if args.json:
        report.save(Path(args.json))


def _arms(args: argparse.Namespace, report: Report) -> Mapping[str, Opener]:
    """The endpoints to measure, by name. Raises ConfigurationError if several flags name one."""
    targets = [name for name in ("address", "openai", "up") if getattr(args, name) is not None]
    if len(targets) > 1:
        raise ConfigurationError(f"use only one of {', '.join(f'--{name}' for name in targets)}")
    if args.openai:
        return {"server": partial(openai_endpoint, bench_arguments.openai_server(args))}
    if args.up is None and (args.address or not args.preset):
        settings = connection_settings(args)
        options: ClientOptions = {"api_key": settings.api_key, "tls": settings.client_tls}
        return {"mesh": partial(mesh_endpoint, settings.address, args.model, options)}
    return _preset_arms(args, report)


def _preset_arms(args: argparse.Namespace, report: Report) -> Mapping[str, Opener]:
    extra_flags = tuple(shlex.split(args.up or ""))
    arms: tuple[Arm, ...] = (Arm("mesh"),)
    if args.preset:
        preset, cores = PRESETS[args.preset], num_cores()
        arms = preset.arms_on(cores)
        if preset.needs_pace(cores):
            report.notes.append(
                f"workers simulate the model at a fixed pace ({preset.pace}: ms per step, ms per token in it):"
                f" this machine has {cores} cores, and real engines need {preset.min_cores}"
            )
    return {arm.name: partial(own_endpoint, replace(arm, up=(*arm.up, *extra_flags))) for arm in arms}


def _prepare_plots(folder: Path) -> None:
    """Create the folder. Raises ConfigurationError before anything is measured."""
    try:
        import matplotlib  # noqa: F401

        folder.mkdir(parents=True, exist_ok=True)
    except ImportError as error:
        raise ConfigurationError("plots need the extra: pip install 'tandem-serve[bench]'") from error
    except OSError as error:
        raise ConfigurationError(f"cannot create the folder {folder}: {error.strerror}") from error


def _draw(report: Report, folder: Path) -> None:
    from tandem_cli.load_test.plots import draw  # needs the extra `bench`

    for path in draw(report, folder):
        sys.stderr.write(f"plot: {path}\n")
