"""`tandem ps`: lists the meshes that run on this machine."""

import argparse
import sys
import time

from rich.table import Table
from rich.text import Text

from tandem_cli.parser import CommandParser
from tandem_cli.running import running_meshes
from tandem_cli.terminal import FittingTable, wide_console

_UNITS = ((86400, "d"), (3600, "h"), (60, "min"))


def add_arguments(parser: CommandParser) -> None:
    """There are none."""


def run(args: argparse.Namespace) -> int:
    meshes = running_meshes()
    if not meshes:
        sys.stderr.write("no mesh runs here; start one with: tandem up\n")
        return 0
    table = Table("pid", "models", "address", "http", "for", "logs", box=None, pad_edge=False)
    for mesh in meshes:
        cells = (" ".join(mesh.models), mesh.address or "starting", mesh.http, _describe(time.time() - mesh.since_s))
        table.add_row(str(mesh.pid), *map(Text, cells), Text(mesh.log_dir))
    wide_console().print(FittingTable(table))
    return 0


def _describe(seconds: float) -> str:
    """A length of time in its largest unit."""
    length, unit = next(((length, unit) for length, unit in _UNITS if seconds >= length), (1, "s"))
    return f"{max(0, seconds) / length:.0f} {unit}"
