"""`tandem models` and `tandem traffic`: the served models, and the shares of requests that revisions of a model get."""

import argparse
import sys
from dataclasses import asdict

from rich.table import Table
from rich.text import Text

import tandem
from mesh.domain.errors import ConfigurationError
from tandem_cli.connection import add_connection_arguments, open_client
from tandem_cli.parser import Command, CommandParser
from tandem_cli.terminal import FittingTable, print_json, strip_controls, wide_console

_TIMEOUT_S = 10.0
_NOT_IN_NAMES = frozenset("=:,;")


def _add_models_arguments(parser: CommandParser) -> None:
    add_connection_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")


def _list_models(args: argparse.Namespace) -> int:
    with open_client(args) as client:
        models = client.models(timeout=_TIMEOUT_S)
    if args.json:
        print_json({"models": [asdict(model) for model in models]})
        return 0
    table = Table("model", "ready", "input tokens", "total tokens", "vocabulary", "chat", box=None, pad_edge=False)
    has_adapters = any(model.adapters for model in models)
    if has_adapters:
        table.add_column("adapters", overflow="fold")
    for model in models:
        table.add_row(
            Text(strip_controls(model.name)),
            "yes" if model.ready else "no",
            f"<= {model.max_input_tokens}",
            f"<= {model.max_total_tokens}",
            str(model.vocab_size),
            "yes" if model.has_chat_template else "no",
            *((Text(strip_controls(", ".join(model.adapters))),) if has_adapters else ()),
        )
    wide_console().print(FittingTable(table))
    return 0


def _add_traffic_arguments(parser: CommandParser) -> None:
    about = "the name that clients ask for; without one, all shares are shown"
    parser.add_argument("name", nargs="?", default="", metavar="NAME", help=about)
    about = "share of a served model, in proportion to the sum; models that are not named get none; all 0: end the name"
    parser.add_argument("shares", nargs="*", metavar="MODEL=SHARE", help=about)
    add_connection_arguments(parser)


def _share_out(args: argparse.Namespace) -> int:
    """Set the shares of one name, then print those of all names. Raises TandemError, ConfigurationError."""
    if _NOT_IN_NAMES & set(args.name):
        raise ConfigurationError(f"the name comes first, as in tandem traffic chat v1=90 v2=10, got {args.name!r}")
    shares = dict(map(_share, args.shares))
    if len(shares) < len(args.shares):
        raise ConfigurationError(f"{args.name} gets one share of each model, got one twice: {' '.join(args.shares)}")
    with open_client(args) as client:
        if shares:
            client.set_traffic(args.name, shares, timeout=_TIMEOUT_S)
        traffic = client.mesh(timeout=_TIMEOUT_S).traffic
    if shares and not any(shares.values()):
        print(strip_controls(f"{args.name} stands for no revisions any more"))
        return 0
    if not args.name and not traffic:
        print("no name stands for revisions; give one with: tandem traffic NAME MODEL=SHARE ...", file=sys.stderr)
    if args.name and args.name not in traffic:
        raise tandem.ModelNotFound(f"{args.name!r} stands for no revisions")
    for name in [args.name] if args.name else sorted(traffic):
        total = sum(traffic[name].values())
        by_share = sorted(traffic[name].items(), key=lambda item: (-item[1], item[0]))
        parts = (f"{model} {_percent(share / total)}" for model, share in by_share)
        print(strip_controls(f"{name}: {', '.join(parts)}"))
    return 0


def traffic_table(mesh: tandem.Mesh) -> Table:
    """A row for each revision: its share, and the share of recent requests that it began."""
    table = Table("traffic", "revision", "share", "routed", "requests", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in sorted(mesh.traffic):
        shares, routed = mesh.traffic[name], mesh.routed.get(name, tandem.RoutedRequests({}, 0.0))
        total, num_routed = sum(shares.values()), sum(routed.requests.values())
        for model in sorted({*shares, *routed.requests}, key=lambda model: (-shares.get(model, 0.0), model)):
            count = routed.requests.get(model, 0)
            table.add_row(
                Text(strip_controls(name)),
                Text(strip_controls(model)),
                _percent(shares.get(model, 0.0) / total),
                _percent(count / num_routed) if num_routed else "",
                f"{count} in {routed.span_s:.0f} s",
            )
    return table


def _percent(share: float) -> str:
    return f"{100 * share:.4g} %"


def _share(text: str) -> tuple[str, float]:
    """Parse MODEL=SHARE. Raises ConfigurationError."""
    model, _, share = text.rpartition("=")
    try:
        return model, float(share)
    except ValueError:
        raise ConfigurationError(f"shares are given as MODEL=SHARE, such as v2=10, got {text!r}") from None


COMMANDS = {
    "models": Command(_add_models_arguments, _list_models),
    "traffic": Command(_add_traffic_arguments, _share_out),
}
