"""`tandem bench`: a load test of a mesh, or of any OpenAI-compatible server."""

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

from checkpoint.source import ModelSource, split_models
from mesh.domain.errors import ConfigurationError, missing_extra
from mesh.interrupts import Terminated, accept_signal, run_async
from mesh.settings import load_settings
from tandem.sync import ClientOptions
from tandem_cli.connection import add_connection_arguments, connection_settings
from tandem_cli.load_test.benchmark import PRESETS, Arm, Benchmark, Case, Kind, degree_arms
from tandem_cli.load_test.endpoints import (
    OpenAISettings,
    Opener,
    mesh_endpoint,
    openai_endpoint,
    own_endpoint,
)
from tandem_cli.load_test.figures import BURST, Outcome, Record, RunFailed
from tandem_cli.load_test.jobs import FIRST_ID, Lengths, read_jobs
from tandem_cli.load_test.report import Report, describe_machine, show
from tandem_cli.load_test.sweep import Sweep, Watcher
from tandem_cli.local_mesh.hardware import available_cores
from tandem_cli.parser import CommandParser, not_negative, output_file
from tandem_cli.terminal import error_console, progress_bar, wide_console

_DEFAULTS = Benchmark()
# Options that set fields of the benchmark, of its SLO and of its burst: option name to field name.
_OF_BENCHMARK = ("input_tokens", "output_tokens", "num_requests", "repeats", "warmup", "seed", "data", "price_per_hour")
_OF_SLO = {"slo_ttft_ms": "ttft_ms", "slo_tpot_ms": "tpot_ms", "slo_share": "share"}
_OF_BURST = {
    "streams": "num_streams",
    "stream_tokens": "stream_tokens",
    "burst_tokens": "tokens",
    "burst_lead": "lead_s",
}
_INTERRUPTED = 130


def add_arguments(parser: CommandParser) -> None:
    """Declare the arguments. Options of the benchmark default to None, so that a preset's values stay in force."""
    parser.add_argument("--preset", choices=PRESETS, metavar="NAME", help=f"one of: {', '.join(PRESETS)}")
    parser.add_argument("--list-presets", action="store_true", help="describe each preset and exit")
    _add_servers(parser)
    _add_loads(parser)
    _add_targets(parser)
    results = parser.add_argument_group("results")
    results.add_argument(
        "--json",
        type=output_file,
        metavar="FILE",
        help="write all results to FILE, including the arrival time of each token",
    )
    results.add_argument("--plots", metavar="DIR", help="draw plots; needs the extra bench")
    about = (
        "do not measure: show results that --json wrote and draw their plots (into --plots, default: current folder)"
    )
    results.add_argument("--plot-from", metavar="FILE", help=about)


def _add_servers(parser: CommandParser) -> None:
    servers = parser.add_argument_group("target (default: the mesh at --address)")
    about = "start a mesh with these flags of tandem up; with a preset, add them to the preset's flags"
    servers.add_argument("--up", metavar="FLAGS", help=about)
    about = "measure an OpenAI-compatible server; its key comes from the variable OPENAI_API_KEY"
    servers.add_argument("--openai", metavar="URL", help=about)
    servers.add_argument("--model", metavar="NAME", help="served model (default: the only one)")
    about = "send random prompts as words, for servers that do not accept token ids"
    servers.add_argument("--text-prompts", action="store_true", help=about)
    about = "upper bound of random token ids (default for --openai: 1000; a mesh reports its own)"
    servers.add_argument("--vocab-size", type=int, default=1000, metavar="N", help=about)
    add_connection_arguments(parser)


def _add_loads(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    loads = group.add_mutually_exclusive_group()
    about = (
        f"closed loop: number of requests in flight (default {' '.join(f'{value:g}' for value in _DEFAULTS.values)})"
    )
    loads.add_argument("--concurrency", type=int, nargs="+", metavar="N", help=about)
    about = "open loop: requests per second, Poisson arrivals"
    loads.add_argument("--rate", type=float, nargs="+", metavar="R", help=about)
    loads.add_argument("--trace", metavar="FILE", help="open loop: replay JSON lines that have arrival_s")
    loads.add_argument(
        "--threads", type=int, nargs="+", metavar="N", help="closed loop: threads that wait for complete answers"
    )
    loads.add_argument(
        "--burst", type=int, nargs="+", metavar="N", help="send N long prompts at once beside steady streams"
    )
    group.add_argument(
        "--streams", type=int, metavar="K", help=f"number of steady streams ({_DEFAULTS.burst.num_streams})"
    )
    about = f"tokens of a steady stream before the next one starts ({_DEFAULTS.burst.stream_tokens})"
    group.add_argument("--stream-tokens", type=int, metavar="N", help=about)
    about = f"tokens of each prompt in the burst ({_DEFAULTS.burst.tokens})"
    group.add_argument("--burst-tokens", type=int, metavar="N", help=about)
    about = f"seconds to measure before and after the burst ({_DEFAULTS.burst.lead_s:g})"
    group.add_argument("--burst-lead", type=not_negative, metavar="S", help=about)
    about = f"tokens of a random prompt ({_DEFAULTS.input_tokens[0]})"
    group.add_argument("--input-tokens", type=int, nargs="+", metavar="N", help=about)
    about = f"tokens of an answer ({_DEFAULTS.output_tokens}); with --data: the limit for lines without one"
    group.add_argument("--output-tokens", type=int, metavar="N", help=about)
    about = "send your own requests: JSON lines with prompt, messages or token_ids, and max_tokens"
    group.add_argument("--data", metavar="FILE", help=about)
    about = "requests per run (default: all of --data; two per client, one above 8 clients; 30 s at a rate)"
    group.add_argument("--num-requests", type=int, metavar="N", help=about)
    group.add_argument("--repeats", type=int, metavar="N", help=f"runs per point ({_DEFAULTS.repeats})")
    group.add_argument("--warmup", type=int, metavar="N", help=f"requests before the first run ({_DEFAULTS.warmup})")
    group.add_argument("--seed", type=int, metavar="N", help=f"seed of random prompts and arrivals ({_DEFAULTS.seed})")


def _add_targets(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("goodput and price")
    slo = _DEFAULTS.slo
    group.add_argument(
        "--slo-ttft-ms", type=float, metavar="MS", help=f"target for the time to first token ({slo.ttft_ms:g})"
    )
    group.add_argument(
        "--slo-tpot-ms",
        type=float,
        metavar="MS",
        help=f"target for the time per output token after the first ({slo.tpot_ms:g})",
    )
    group.add_argument(
        "--slo-share", type=float, metavar="S", help=f"share of requests that must meet both targets ({slo.share:g})"
    )
    group.add_argument(
        "--price-per-hour", type=float, metavar="USD", help="price of the machine, to compute prices of tokens"
    )


def run(args: argparse.Namespace) -> int:
    """Measure or load results from a file, then show them. Returns 1 if no request succeeded."""
    if args.list_presets:
        for name, preset in PRESETS.items():
            sys.stdout.write(f"{name:16}{preset.about}\n")
        return 0
    if args.plots or args.plot_from:
        _prepare_plots(Path(args.plots or "."))
    try:
        report = Report.load(Path(args.plot_from)) if args.plot_from else _measure(args)
    except RunFailed as error:
        sys.stderr.write(f"tandem: {error}\n")
        return 1
    show(report, wide_console())
    if args.json and not args.plot_from:
        report.save(args.json)  # with what is known when the last mesh has stopped
    if args.plots or args.plot_from:
        _draw(report, Path(args.plots or "."))
    if report.interrupted_status:
        return report.interrupted_status
    succeeded = any(run.of(Outcome.OK) for point in report.points for run in point.runs)
    return 0 if succeeded else 1


def _measure(args: argparse.Namespace) -> Report:
    benchmark = benchmark_from(args)
    if benchmark.data:
        read_jobs(Path(benchmark.data), Lengths())  # reports a bad file before anything is started
    settings = {"preset": args.preset, **asdict(benchmark)}
    report = Report(settings, describe_machine(), benchmark.slo, benchmark.price_per_hour)
    arms = _arms(args, report)
    try:
        with progress_bar(error_console(), MofNCompleteColumn(), TimeElapsedColumn()) as bar:
            sweep = Sweep(benchmark, arms, report, SweepProgress(benchmark, len(arms), bar))
            run_async(sweep.run(lambda: _save_round(args, report)))
    except (KeyboardInterrupt, SystemExit) as error:
        if not report.points:
            raise
        accept_signal()
        report.notes.append("interrupted: only the runs that were complete by then are shown")
        report.interrupted_status = int(error.args[0]) if isinstance(error, Terminated) else _INTERRUPTED
    return report


def _save_round(args: argparse.Namespace, report: Report) -> None:
    """Save the results so far, because a long benchmark may be killed. Failures are reported at the end only: until
    then the disk may have space again.
    """
    if args.json:
        with suppress(OSError):
            report.save(args.json)


def _arms(args: argparse.Namespace, report: Report) -> Mapping[str, Opener]:
    """The endpoints to measure, by name. Raises ConfigurationError if several flags name one."""
    targets = [name for name in ("address", "openai", "up") if getattr(args, name, None) is not None]
    if len(targets) > 1:
        raise ConfigurationError(f"use only one of {', '.join(f'--{name}' for name in targets)}")
    if args.openai:
        return {"server": _openai_server(args)}
    if args.up is None and ("address" in args or not args.preset):
        settings = connection_settings(args)
        options: ClientOptions = {"api_key": settings.api_key, "tls": settings.client_tls}
        return {"mesh": partial(mesh_endpoint, settings.address, args.model, options)}
    return _preset_arms(args, report)


def _preset_arms(args: argparse.Namespace, report: Report) -> Mapping[str, Opener]:
    extra_flags = tuple(shlex.split(args.up or ""))
    arms: tuple[Arm, ...] = (Arm("mesh"),)
    if args.preset:
        preset, cores = PRESETS[args.preset], len(available_cores())
        arms = preset.arms_on(cores)
        if preset.with_degrees:
            arms += degree_arms(_degrees(extra_flags, cores))
        if preset.needs_pace(cores):
            report.notes.append(
                f"workers simulate the model at a fixed pace ({preset.pace}: ms per step, ms per token in it):"
                f" this machine has {cores} cores, and real engines need {preset.min_cores}"
            )
    return {arm.name: partial(own_endpoint, replace(arm, up=(*arm.up, *extra_flags))) for arm in arms}


def _degrees(up_flags: Sequence[str], cores: int) -> list[int]:
    """The degrees of tensor parallelism to measure. Raises ConfigurationError if none above 1 fits."""
    # The engine is imported for this preset only.
    from tandem_cli.capacity.ranks import fitting_degrees
    from tandem_cli.configuration.up_arguments import models_of
    from tandem_cli.configuration.up_settings import UpSettings
    from tandem_cli.local_mesh.deployment import join_models
    from tandem_cli.main import parse_arguments
    from tandem_cli.model_files.model_folders import find_model

    flags = parse_arguments(["up", *up_flags])
    models = models_of(flags)
    model = [f"--model={join_models(models)}"] if models else []
    settings = load_settings(UpSettings, model, prog="up").values
    if len(split_models(settings.model)) > 1:
        raise ConfigurationError("the preset tensor-parallel measures one model")
    [(_, name)] = split_models(settings.model)
    model_dir = find_model(ModelSource(name, settings.revision, settings.model_cache))
    return fitting_degrees(model_dir, getattr(flags, "quantize", "none"), cores)


def _prepare_plots(folder: Path) -> None:
    """Create the folder. Raises ConfigurationError before anything is measured."""
    try:
        import matplotlib  # noqa: F401

        folder.mkdir(parents=True, exist_ok=True)
    except ImportError as error:
        raise missing_extra("plots need matplotlib", "bench") from error
    except OSError as error:
        raise ConfigurationError(f"cannot create the folder {folder}: {error.strerror}") from error


def _draw(report: Report, folder: Path) -> None:
    from tandem_cli.load_test.plots import draw  # needs the extra `bench`

    for path in draw(report, folder):
        sys.stderr.write(f"plot: {path}\n")


def benchmark_from(args: argparse.Namespace) -> Benchmark:
    """The benchmark of the preset, or the default one, with the options of `args`. Raises ConfigurationError."""
    benchmark = PRESETS[args.preset].benchmark if args.preset else _DEFAULTS
    if args.trace and args.data:
        raise ConfigurationError("a trace contains its own requests: use either --trace or --data")
    changes = _load_fields(args) | _changed_fields(args, {name: name for name in _OF_BENCHMARK})
    changes["slo"] = replace(benchmark.slo, **_changed_fields(args, _OF_SLO))
    changes["burst"] = replace(benchmark.burst, **_changed_fields(args, _OF_BURST))
    return replace(benchmark, **changes)


def _load_fields(args: argparse.Namespace) -> dict[str, Any]:
    if args.trace:
        return {"kind": Kind.TRACE, "values": (), "data": args.trace}
    for kind in (Kind.CONCURRENCY, Kind.RATE, Kind.THREADS, Kind.BURST):
        values: Sequence[float] | None = getattr(args, kind)
        if values is not None:
            return {"kind": kind, "values": tuple(values)}
    return {}


def _changed_fields(args: argparse.Namespace, names: dict[str, str]) -> dict[str, Any]:
    """The options that `args` sets, by the name of the field that each of them sets."""
    values = {field: getattr(args, option) for option, field in names.items()}
    return {
        field: tuple(value) if isinstance(value, list) else value
        for field, value in values.items()
        if value is not None
    }


def _openai_server(args: argparse.Namespace) -> Opener:
    """The server at the URL of `--openai`. Raises ConfigurationError for a missing model or a bad URL."""
    if not args.model:
        raise ConfigurationError("--openai needs --model: the name of the model on that server")
    if not args.openai.startswith(("http://", "https://")):
        raise ConfigurationError(f"--openai must be a URL such as http://127.0.0.1:8000, got {args.openai!r}")
    if args.vocab_size <= FIRST_ID:
        raise ConfigurationError(f"--vocab-size must be > {FIRST_ID}, got {args.vocab_size}")
    key = load_settings(OpenAISettings, [], prog="bench").values.openai_api_key
    options = {"api_key": key, "vocab_size": args.vocab_size, "as_text": args.text_prompts}
    return partial(openai_endpoint, args.openai, args.model, **options)


class SweepProgress(Watcher):
    """Shows the progress of one sweep."""

    def __init__(self, benchmark: Benchmark, num_arms: int, bar: Progress) -> None:
        self._benchmark = benchmark
        self._bar = bar
        total = benchmark.repeats * num_arms * sum(map(benchmark.num_jobs, benchmark.cases()))
        self._task = bar.add_task("", total=total)

    def opening(self, arm: str) -> None:
        self._say(f"{arm}: starting")

    def begins(self, arm: str, case: Case, repeat: int) -> None:
        self._say(f"{arm}: {case.label}, {repeat + 1} of {self._benchmark.repeats}")

    def request_done(self, record: Record) -> None:
        """Advance the bar. Steady streams of a burst do not count, because their number is not known in advance."""
        if not record.group or record.group == BURST:
            self._bar.advance(self._task)

    def _say(self, text: str) -> None:
        if self._bar.console.is_terminal:
            self._bar.update(self._task, description=text)
        else:
            self._bar.console.print(text, soft_wrap=True, highlight=False)
