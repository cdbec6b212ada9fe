"""`tandem models`: what is served."""

import argparse

from rich.table import Table

from cli.connection import add_connection_arguments, open_client
from cli.tables import wide_console

NAME = "models"
ABOUT = "list the served models and their limits"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_connection_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print the table."""
    with open_client(args) as client:
        models = client.models(timeout=10)
    table = Table("model", "ready", "input tokens", "total tokens", "vocabulary", "chat", box=None, pad_edge=False)
    for model in models:
        table.add_row(
            model.name,
            "yes" if model.ready else "no",
            f"<= {model.max_input_tokens}",
            f"<= {model.max_total_tokens}",
            str(model.vocab_size),
            "yes" if model.has_chat_template else "no",
        )
    wide_console().print(table)
    return 0
