"""`tandem stop`: stops a mesh that runs on this machine, as Ctrl-C in its terminal does."""

import argparse
import contextlib
import os
import signal
import sys
import time

from mesh.domain.errors import ConfigurationError
from tandem_cli.parser import CommandParser
from tandem_cli.running import RunningMesh, find_mesh, running_meshes

_INTERVAL_S = 0.1


def add_arguments(parser: CommandParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument("mesh", nargs="?", help="its process id, address, port or model (default: the only one)")
    which.add_argument("--all", action="store_true", help="stop all meshes of this user on this machine")
    parser.add_argument(
        "--timeout", type=float, metavar="SECONDS", help="how long to wait for the end (default: until it has come)"
    )


def run(args: argparse.Namespace) -> int:
    """Ask, and wait. Running answers may end first, as long as the services' grace_s allows. Returns 1 if a mesh still
    runs after the timeout.
    """
    meshes = running_meshes() if args.all else [find_mesh(args.mesh)]
    if not meshes:
        raise ConfigurationError("no mesh of this user runs on this machine")
    for mesh in meshes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(mesh.pid, signal.SIGTERM)
            os.kill(mesh.pid, signal.SIGCONT)  # one that Ctrl-Z has suspended would not see it
        sys.stderr.write(f"stopping {mesh.pid} ({' '.join(mesh.models)})\n")
    late = _wait(meshes, None if args.timeout is None else time.monotonic() + args.timeout)
    for mesh in late:
        sys.stderr.write(f"tandem: {mesh.pid} has not ended after {args.timeout:g} s\n")
    return 1 if late else 0


def _wait(meshes: list[RunningMesh], deadline_s: float | None) -> list[RunningMesh]:
    """Wait until all have ended. Returns those that run at the deadline, in seconds of the monotonic clock."""
    while running := [mesh for mesh in meshes if mesh.is_running]:
        if deadline_s is not None and time.monotonic() >= deadline_s:
            return running
        time.sleep(_INTERVAL_S)
    return []
