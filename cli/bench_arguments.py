"""The arguments of `tandem bench`, and the plan they make."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.endpoints import OpenAIServer
from bench.plan import Kind, Plan
from bench.presets import PRESETS
from cli.connection import add_connection_arguments
from mesh.domain.errors import ConfigurationError
from mesh.settings import load_settings, setting

_DEFAULTS = Plan()
# Options that are fields of the plan, and of its parts, under these names.
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
    """Credentials come from the environment only, where other users cannot see them."""

    openai_api_key: str | None = setting(None, "credential for the server", env=("OPENAI_API_KEY",), secret=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments. Those of the plan have no defaults here, so that a preset's hold."""
    parser.add_argument("--preset", choices=PRESETS, metavar="NAME", help=f"one of: {', '.join(PRESETS)}")
    parser.add_argument("--list-presets", action="store_true", help="say what each preset is, and end")
    _add_servers(parser)
    _add_loads(parser)
    _add_targets(parser)
    results = parser.add_argument_group("results")
    results.add_argument("--json", metavar="FILE", help="write everything, down to each token's time")
    results.add_argument("--plots", metavar="DIR", help="draw plots; needs the extra: pip install tandem-serve[bench]")
    about = "measure nothing: show a file that --json wrote, and draw its plots (into --plots, default: here)"
    results.add_argument("--plot-from", metavar="FILE", help=about)


def _add_servers(parser: argparse.ArgumentParser) -> None:
    servers = parser.add_argument_group("what is measured (default: the mesh at --address)")
    about = "start a mesh of its own with these flags of tandem up; with a preset: these besides its own"
    servers.add_argument("--up", metavar="FLAGS", help=about)
    servers.add_argument("--openai", metavar="URL", help="an OpenAI-compatible server (env OPENAI_API_KEY)")
    servers.add_argument("--model", metavar="NAME", help="served model (default: the only one)")
    about = "send random prompts as words, for servers that take no token ids"
    servers.add_argument("--text-prompts", action="store_true", help=about)
    about = "random token ids are below this (default for --openai: 1000; a mesh says it itself)"
    servers.add_argument("--vocab-size", type=int, default=OpenAIServer.vocab_size, metavar="N", help=about)
    add_connection_arguments(parser)


def _add_loads(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    loads = group.add_mutually_exclusive_group()
    about = f"closed loop: requests in flight (default {' '.join(f'{value:g}' for value in _DEFAULTS.values)})"
    loads.add_argument("--concurrency", type=int, nargs="+", metavar="N", help=about)
    about = "open loop: requests per second, Poisson arrivals"
    loads.add_argument("--rate", type=float, nargs="+", metavar="R", help=about)
    loads.add_argument("--trace", metavar="FILE", help="open loop: JSON lines with arrival_s")
    loads.add_argument("--threads", type=int, nargs="+", metavar="N", help="threads that wait for whole answers")
    loads.add_argument("--burst", type=int, nargs="+", metavar="N", help="long prompts at once, into steady streams")
    group.add_argument("--streams", type=int, metavar="K", help=f"steady streams ({_DEFAULTS.burst.num_streams})")
    about = f"how long a steady stream goes on before the next one ({_DEFAULTS.burst.stream_tokens})"
    group.add_argument("--stream-tokens", type=int, metavar="N", help=about)
    about = f"length of a burst's prompts ({_DEFAULTS.burst.tokens})"
    group.add_argument("--burst-tokens", type=int, metavar="N", help=about)
    about = f"seconds before and after the burst ({_DEFAULTS.burst.lead_s:g})"
    group.add_argument("--burst-lead", type=float, metavar="S", help=about)
    about = f"lengths of random prompts ({_DEFAULTS.input_tokens[0]})"
    group.add_argument("--input-tokens", type=int, nargs="+", metavar="N", help=about)
    about = f"length of answers ({_DEFAULTS.output_tokens}); for --data: the most, where a line gives none"
    group.add_argument("--output-tokens", type=int, metavar="N", help=about)
    about = "your own requests: JSON lines with prompt, messages or token_ids, and max_tokens"
    group.add_argument("--data", metavar="FILE", help=about)
    about = "requests of a run (default: all of --data; two for each client, one if over 8; 30 s of a rate)"
    group.add_argument("--num-requests", type=int, metavar="N", help=about)
    group.add_argument("--repeats", type=int, metavar="N", help=f"runs of each point ({_DEFAULTS.repeats})")
    group.add_argument("--warmup", type=int, metavar="N", help=f"requests before the first run ({_DEFAULTS.warmup})")
    group.add_argument("--seed", type=int, metavar="N", help=f"for prompts and arrivals ({_DEFAULTS.seed})")


def _add_targets(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("goodput and price")
    slo = _DEFAULTS.slo
    group.add_argument("--slo-ttft-ms", type=float, metavar="MS", help=f"time to first token ({slo.ttft_ms:g})")
    group.add_argument("--slo-tpot-ms", type=float, metavar="MS", help=f"time per token after it ({slo.tpot_ms:g})")
    group.add_argument("--slo-share", type=float, metavar="S", help=f"share of requests in both ({slo.share:g})")
    group.add_argument("--price-per-hour", type=float, metavar="USD", help="what the machine costs")


def given_plan(args: argparse.Namespace) -> Plan:
    """The preset's plan, or the default one, with what was given. Raises ConfigurationError."""
    plan = PRESETS[args.preset].plan if args.preset else _DEFAULTS
    if args.trace and args.data:
        raise ConfigurationError("a trace has its own requests: give --trace or --data")
    changes = _load_of(args) | _given(args, {name: name for name in _OF_PLAN})
    changes["slo"] = replace(plan.slo, **_given(args, _OF_SLO))
    changes["burst"] = replace(plan.burst, **_given(args, _OF_BURST))
    return replace(plan, **changes)


def _load_of(args: argparse.Namespace) -> dict[str, Any]:
    if args.trace:
        return {"kind": Kind.TRACE, "values": (), "data": args.trace}
    for kind in (Kind.CONCURRENCY, Kind.RATE, Kind.THREADS, Kind.BURST):
        values: Sequence[float] | None = getattr(args, kind)
        if values is not None:
            return {"kind": kind, "values": tuple(values)}
    return {}


def _given(args: argparse.Namespace, names: dict[str, str]) -> dict[str, Any]:
    """The options that were given, under the names of the fields they fill."""
    found = {field: getattr(args, option) for option, field in names.items()}
    return {
        field: tuple(value) if isinstance(value, list) else value for field, value in found.items() if value is not None
    }


def openai_server(args: argparse.Namespace) -> OpenAIServer:
    """The server that `--openai` names. Raises ConfigurationError."""
    if not args.model:
        raise ConfigurationError("--openai needs --model: the name that the server knows")
    if not args.openai.startswith(("http://", "https://")):
        raise ConfigurationError(f"--openai must be a URL such as http://127.0.0.1:8000, got {args.openai!r}")
    key = load_settings(OpenAISettings, [], prog="bench").values.openai_api_key
    return OpenAIServer(args.openai, args.model, key, args.vocab_size, args.text_prompts)
