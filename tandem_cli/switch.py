"""`tandem switch`: gives a worker another role."""

import argparse
import time

import tandem
from tandem_cli.connection import add_connection_arguments, open_client
from tandem_cli.parser import CommandParser

_TIMEOUT_S = 10.0
_LOOK_S = 0.3


def add_arguments(parser: CommandParser) -> None:
    parser.add_argument("worker", metavar="WORKER", help="name of a worker, as `tandem workers` shows it")
    about = "the role to serve in from now on; the role that it has takes a switch back that is under way"
    parser.add_argument("role", choices=("prefill", "decode"), help=about)
    about = "seconds to wait until it serves in this role; 0: do not wait (300)"
    parser.add_argument("--wait", type=float, default=300.0, metavar="SECONDS", help=about)
    add_connection_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Ask the worker, and wait until the router sends it requests in its role. Raises TandemError."""
    with open_client(args) as client:
        client.switch_role(args.worker, args.role, timeout=_TIMEOUT_S)
        deadline_s = time.monotonic() + args.wait
        while args.wait and not _serves(client, args.worker, args.role):
            if time.monotonic() > deadline_s:
                raise tandem.DeadlineExceeded(
                    f"{args.worker} does not serve as {args.role} after {args.wait:g} s; see: tandem workers"
                )
            time.sleep(_LOOK_S)
    return 0


def _serves(client: tandem.Client, worker_id: str, role: str) -> bool:
    workers = client.workers(timeout=_TIMEOUT_S)
    return any(worker.worker_id == worker_id and worker.role == role and worker.serving for worker in workers)
