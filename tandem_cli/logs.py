"""`tandem logs`: shows what the services of a mesh on this machine have logged."""

import argparse
import json
import sys
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mesh.domain.errors import ConfigurationError
from mesh.settings import suggestion
from tandem_cli.parser import CommandParser
from tandem_cli.running import find_mesh
from tandem_cli.service_log import read_log_line

_INTERVAL_S = 0.3


def add_arguments(parser: CommandParser) -> None:
    parser.add_argument("service", nargs="*", help="name of a service, such as decode-0 (default: all)")
    parser.add_argument("--mesh", help="process id, address, port or model of the mesh (default: the only one)")
    parser.add_argument("-n", "--lines", type=int, default=20, metavar="N", help="lines of each service (20)")
    parser.add_argument("-f", "--follow", action="store_true", help="go on with new lines, until Ctrl-C or its end")


def run(args: argparse.Namespace) -> int:
    """Print lines in the order of their times, each with the name of its service."""
    mesh = find_mesh(args.mesh)
    folder = Path(mesh.log_dir)
    files = {path: _File(path) for path in _paths(folder, args.service)}
    last = [line for file in files.values() for line in deque(file.new_lines(), maxlen=max(0, args.lines))]
    _print(last, files.values())
    goes_on = args.follow
    try:
        while goes_on:
            time.sleep(_INTERVAL_S)
            goes_on = mesh.is_running  # asked before the lines are read, so that the last ones are among them
            if not args.service:
                files |= {path: _File(path) for path in _paths(folder, ()) if path not in files}
            _print([line for file in files.values() for line in file.new_lines()], files.values())
    except KeyboardInterrupt:
        return 0
    return 0


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a service's log. `time` is as the service wrote it, and sorts as text; empty for a library's line."""

    time: str
    service: str
    text: str


class _File:
    """A log that may grow."""

    def __init__(self, path: Path) -> None:
        self.service = path.stem
        self._path = path
        self._position = 0
        self._time = ""

    def new_lines(self) -> Iterator[Line]:
        """The complete lines that nobody has read yet. A line without a time has that of the line before it.

        A mesh that ends without a warning removes its logs: then there are none.
        """
        try:
            opened = self._path.open("rb")
        except FileNotFoundError:
            return
        with opened as file:
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._position += len(line)
                self._time = _time_of(line) or self._time
                yield Line(self._time, self.service, read_log_line(line).text)


def _time_of(line: bytes) -> str:
    try:
        return str(json.loads(line)["timestamp"])
    except (ValueError, TypeError, KeyError):
        return ""


def _paths(folder: Path, services: Sequence[str]) -> list[Path]:
    """The logs of these services, or of all. Raises ConfigurationError."""
    paths = {path.stem: path for path in sorted(folder.glob("*.log"))}
    for service in services:
        if service not in paths:
            hint = suggestion(service, paths) or f"; there are {', '.join(paths)}"
            raise ConfigurationError(f"{folder} has no log of {service}{hint}")
    return [paths[service] for service in services or paths]


def _print(lines: Sequence[Line], files: Collection[_File]) -> None:
    width = max((len(file.service) for file in files), default=0)
    for line in sorted(lines, key=lambda line: line.time):
        sys.stdout.write(f"{line.service:{width}} {line.time[11:19]} {line.text}\n")
    sys.stdout.flush()
