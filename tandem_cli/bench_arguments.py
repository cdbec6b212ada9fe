"""The command line of `tandem bench`, and the plan that it describes."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mesh.domain.errors import ConfigurationError
from mesh.settings import load_settings, setting
from tandem_cli.connection import add_connection_arguments
from tandem_cli.load_test.endpoints import OpenAIServer
from tandem_cli.load_test.plan import Kind, Plan
from tandem_cli.load_test.presets import PRESETS

_DEFAULTS = Plan()
# Options that set fields of the plan, of its SLO and of its burst: option name to field name.
_OF_PLAN = ("input_tokens", "output_tokens", "num_requests", "repeats", "warmup", "seed", "data", "price_per_hour")
_OF_SLO = {"slo_ttft_ms": "ttft_ms", "slo_tpot_ms": "tpot_ms", "slo_share": "share"}
_OF_BURST = {
    "streams": "num_streams",
    "stream_tokens": "stream_tokens",
    "burst_tokens": "tokens",
    "burst_lead": "lead_s",
}


@dataclass(frozen=True, kw_only=True)
class OpenAISettings:
    """Credentials are read from the environment only: command lines are visible to other users."""

    openai_api_key: str | None = setting(None, "credential for the server", env=("OPENAI_API_KEY",), secret=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments. Plan options default to None, so that a preset's values stay in force."""
    parser.add_argument("--preset", choices=PRESETS, metavar="NAME", help=f"one of: {', '.join(PRESETS)}")
    parser.add_argument("--list-presets", action="store_true", help="describe each preset and exit")
    _add_servers(parser)
    _add_loads(parser)
    _add_targets(parser)
    results = parser.add_argument_group("results")
    results.add_argument(
        "--json", metavar="FILE", help="write all results to FILE, including the arrival time of each token"
    )
    results.add_argument("--plots", metavar="DIR", help="draw plots; needs the extra: pip install tandem-serve[bench]")
    about = (
        "do not measure: show results that --json wrote and draw their plots (into --plots, default: current folder)"
    )
    results.add_argument("--plot-from", metavar="FILE", help=about)


def _add_servers(parser: argparse.ArgumentParser) -> None:
    servers = parser.add_argument_group("target (default: the mesh at --address)")
    about = "start a mesh with these flags of tandem up; with a preset, add them to the preset's flags"
    servers.add_argument("--up", metavar="FLAGS", help=about)
    servers.add_argument("--openai", metavar="URL", help="measure an OpenAI-compatible server (env OPENAI_API_KEY)")
    servers.add_argument("--model", metavar="NAME", help="served model (default: the only one)")
    about = "send random prompts as words, for servers that do not accept token ids"
    servers.add_argument("--text-prompts", action="store_true", help=about)
    about = "upper bound of random token ids (default for --openai: 1000; a mesh reports its own)"
    servers.add_argument("--vocab-size", type=int, default=OpenAIServer.vocab_size, metavar="N", help=about)
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
    group.add_argument("--burst-lead", type=float, metavar="S", help=about)
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


def plan_from(args: argparse.Namespace) -> Plan:
    """The plan of the preset, or the default plan, with the options of `args` applied. Raises ConfigurationError."""
    plan = PRESETS[args.preset].plan if args.preset else _DEFAULTS
    if args.trace and args.data:
        raise ConfigurationError("a trace contains its own requests: use either --trace or --data")
    changes = _load_fields(args) | _plan_fields(args, {name: name for name in _OF_PLAN})
    changes["slo"] = replace(plan.slo, **_plan_fields(args, _OF_SLO))
    changes["burst"] = replace(plan.burst, **_plan_fields(args, _OF_BURST))
    return replace(plan, **changes)


def _load_fields(args: argparse.Namespace) -> dict[str, Any]:
    if args.trace:
        return {"kind": Kind.TRACE, "values": (), "data": args.trace}
    for kind in (Kind.CONCURRENCY, Kind.RATE, Kind.THREADS, Kind.BURST):
        values: Sequence[float] | None = getattr(args, kind)
        if values is not None:
            return {"kind": kind, "values": tuple(values)}
    return {}


def _plan_fields(args: argparse.Namespace, names: dict[str, str]) -> dict[str, Any]:
    """The options that `args` sets, by the name of the field that each of them sets."""
    values = {field: getattr(args, option) for option, field in names.items()}
    return {
        field: tuple(value) if isinstance(value, list) else value
        for field, value in values.items()
        if value is not None
    }


def openai_server(args: argparse.Namespace) -> OpenAIServer:
    """The server at the URL of `--openai`. Raises ConfigurationError for a missing model or a bad URL."""
    if not args.model:
        raise ConfigurationError("--openai needs --model: the name of the model on that server")
    if not args.openai.startswith(("http://", "https://")):
        raise ConfigurationError(f"--openai must be a URL such as http://127.0.0.1:8000, got {args.openai!r}")
    key = load_settings(OpenAISettings, [], prog="bench").values.openai_api_key
    return OpenAIServer(args.openai, args.model, key, args.vocab_size, args.text_prompts)
