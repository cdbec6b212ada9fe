"""`tandem optimize`: tries ways to serve a model with the user's prompts, and writes down the best one."""

import argparse
from pathlib import Path

from mesh.domain.errors import ConfigurationError
from tandem_cli.parser import CommandParser


def add_arguments(parser: CommandParser) -> None:
    about = "model folder, name of a bundled model, or any other source of `tandem up`"
    parser.add_argument("model", metavar="MODEL", help=about)
    about = "your prompts: JSON lines with prompt, messages or token_ids; they may have reference and max_tokens"
    parser.add_argument("--data", type=Path, required=True, metavar="FILE", help=about)
    about = "the folder to write: what `tandem up OUT` serves, and the report; an interrupted run continues in it"
    parser.add_argument("--out", type=Path, required=True, metavar="OUT", help=about)
    about = "TOML file with candidates and limits; auto: what fits this machine and the model (auto)"
    parser.add_argument("--recipe", default="auto", metavar="FILE", help=about)
    about = "Python file with a function judge(line, answer) that returns 0 to 1"
    parser.add_argument("--judge", type=Path, metavar="FILE", help=about)
    limits = parser.add_argument_group("limits")
    about = "limit on the time to first token that 99 %% of the requests must keep, such as 500ms"
    limits.add_argument("--slo-ttft", type=_duration, metavar="TIME", help=about)
    about = "limit on the time between tokens that 99 %% of them must keep, such as 60ms"
    limits.add_argument("--slo-itl", type=_duration, metavar="TIME", help=about)
    about = "share of the quality that may be lost beside the unquantised model, such as 1%% (1%%)"
    limits.add_argument("--max-quality-loss", type=_share, metavar="SHARE", help=about)
    load = parser.add_argument_group("load")
    load.add_argument("--concurrency", type=int, metavar="N", help="requests in flight (8)")
    load.add_argument("--output-tokens", type=int, metavar="N", help="limit for lines without max_tokens (128)")
    load.add_argument("--max-prompts", type=int, metavar="N", help="lines of the file to judge by (256)")
    about = "a smaller model with the same tokenizer, to try as draft model"
    load.add_argument("--draft-model", metavar="MODEL", help=about)
    about = "price of this machine, to compute prices of tokens"
    parser.add_argument("--price-per-hour", type=float, metavar="USD", help=about)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(args: argparse.Namespace) -> int:
    from tandem_cli.optimization.command import optimize

    return optimize(args)


def _duration(text: str) -> float:
    from tandem_cli.optimization.recipe import duration_ms

    try:
        return duration_ms(text)
    except ConfigurationError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _share(text: str) -> float:
    number, is_percent = text.removesuffix("%"), text.endswith("%")
    try:
        return float(number) / (100 if is_percent else 1)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a share such as 1% or 0.01, got {text!r}") from None
