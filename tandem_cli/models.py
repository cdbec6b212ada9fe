"""`tandem models`: lists the served models."""

import argparse

from rich.table import Table
from rich.text import Text

from tandem_cli.connection import add_connection_arguments, open_client
from tandem_cli.parser import CommandParser
from tandem_cli.terminal import FittingTable, strip_controls, wide_console


def add_arguments(parser: CommandParser) -> None:
    add_connection_arguments(parser)


def run(args: argparse.Namespace) -> int:
    with open_client(args) as client:
        models = client.models(timeout=10)
    table = Table("model", "ready", "input tokens", "total tokens", "vocabulary", "chat", box=None, pad_edge=False)
    for model in models:
        table.add_row(
            Text(strip_controls(model.name)),
            "yes" if model.ready else "no",
            f"<= {model.max_input_tokens}",
            f"<= {model.max_total_tokens}",
            str(model.vocab_size),
            "yes" if model.has_chat_template else "no",
        )
    wide_console().print(FittingTable(table))
    return 0
