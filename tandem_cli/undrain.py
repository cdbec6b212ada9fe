"""`tandem undrain`: takes drained workers back into service."""

import argparse

from tandem_cli.connection import open_client
from tandem_cli.drain import add_arguments as add_arguments

_TIMEOUT_S = 10.0


def run(args: argparse.Namespace) -> int:
    with open_client(args) as client:
        for worker in args.workers:
            client.undrain(worker, timeout=_TIMEOUT_S)
    return 0
