"""`tandem drain`: takes workers out of service without a stop."""

import argparse

from tandem_cli.connection import add_connection_arguments, open_client
from tandem_cli.parser import CommandParser

_TIMEOUT_S = 10.0


def add_arguments(parser: CommandParser) -> None:
    parser.add_argument("workers", nargs="+", metavar="WORKER", help="names of workers, as `tandem workers` shows them")
    add_connection_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Drain the workers. They finish their sequences; `tandem undrain` takes them back."""
    with open_client(args) as client:
        for worker in args.workers:
            client.drain(worker, timeout=_TIMEOUT_S)
    return 0
