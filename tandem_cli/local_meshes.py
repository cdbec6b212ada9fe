"""Meshes that run on this machine, and the commands for them: `tandem ps`, `stop` and `logs`.

`tandem up` writes a small file for its mesh at the start and removes it at the end. The files are in the user's runtime
folder, or cache folder where there is none. A file is stale if its process has ended, or if its process id belongs to
another process by now. Homes may be shared by machines and containers, so only files of this host count.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil
from rich.table import Table
from rich.text import Text

from mesh.atomic_file import write_atomically
from mesh.domain.errors import ConfigurationError
from mesh.interrupts import accept_signal
from mesh.settings import suggestion
from tandem_cli.local_mesh.service_log import read_log_line
from tandem_cli.parser import Command, CommandParser, not_negative, whole
from tandem_cli.terminal import FittingTable, print_json, wide_console

_UNITS = ((86400, "d"), (3600, "h"), (60, "min"))
_STOP_POLL_S = 0.1
_LOG_POLL_S = 0.3


def _add_ps_arguments(parser: CommandParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")


def _list(args: argparse.Namespace) -> int:
    meshes = running_meshes()
    if args.json:
        print_json({"meshes": [asdict(mesh) for mesh in meshes]})
        return 0
    if not meshes:
        sys.stderr.write("no mesh runs here; start one with: tandem up\n")
        return 0
    table = Table("pid", "models", "address", "http", "for", "logs", box=None, pad_edge=False)
    for mesh in meshes:
        cells = (
            " ".join(mesh.models),
            mesh.address or "starting",
            mesh.http,
            _describe_time(time.time() - mesh.since_s),
        )
        table.add_row(str(mesh.pid), *map(Text, cells), Text(mesh.log_dir))
    wide_console().print(FittingTable(table))
    return 0


def _describe_time(seconds: float) -> str:
    """A length of time in its largest unit."""
    length, unit = next(((length, unit) for length, unit in _UNITS if seconds >= length), (1, "s"))
    return f"{max(0, seconds) / length:.0f} {unit}"


def _add_stop_arguments(parser: CommandParser) -> None:
    which = parser.add_mutually_exclusive_group()
    about = "process id, address, port or model of the mesh (default: the only one)"
    which.add_argument("mesh", nargs="?", metavar="MESH", help=about)
    which.add_argument("--all", action="store_true", help="stop all meshes of this user on this machine")
    parser.add_argument(
        "--timeout", type=not_negative, metavar="SECONDS", help="how long to wait for the end (default: without limit)"
    )


def _stop(args: argparse.Namespace) -> int:
    """Ask, and wait. Running answers may end first, as long as the services' grace_s allows. Returns 1 if a mesh still
    runs after the timeout.
    """
    meshes = running_meshes() if args.all else [find_mesh(args.mesh, "tandem stop")]
    if not meshes:
        raise ConfigurationError("no mesh of this user runs on this machine")
    for mesh in meshes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(mesh.pid, signal.SIGTERM)
            os.kill(mesh.pid, signal.SIGCONT)  # one that Ctrl-Z has suspended would not see it
        sys.stderr.write(f"stopping {mesh.pid} ({' '.join(mesh.models)})\n")
    late = _wait_ended(meshes, None if args.timeout is None else time.monotonic() + args.timeout)
    for mesh in late:
        sys.stderr.write(f"tandem: {mesh.pid} has not ended after {args.timeout:g} s\n")
    return 1 if late else 0


def _wait_ended(meshes: "list[RunningMesh]", deadline_s: float | None) -> "list[RunningMesh]":
    """Wait until all have ended. Returns those that run at the deadline, in seconds of the monotonic clock."""
    while running := [mesh for mesh in meshes if mesh.is_running]:
        if deadline_s is not None and time.monotonic() >= deadline_s:
            return running
        time.sleep(_STOP_POLL_S)
    return []


def _add_logs_arguments(parser: CommandParser) -> None:
    about = "name of a service, such as decode-0 (default: all)"
    parser.add_argument("service", nargs="*", metavar="SERVICE", help=about)
    parser.add_argument("--mesh", help="process id, address, port or model of the mesh (default: the only one)")
    parser.add_argument("-n", "--lines", type=whole, default=20, metavar="N", help="lines of each service (20)")
    parser.add_argument(
        "-f", "--follow", action="store_true", help="keep showing new lines until Ctrl-C or the mesh's end"
    )


def _show_logs(args: argparse.Namespace) -> int:
    """Print lines in the order of their times, each with the name of its service."""
    mesh = find_mesh(args.mesh, "tandem logs --mesh")
    folder = Path(mesh.log_dir)
    files = {path: _LogFile(path) for path in _log_paths(folder, args.service)}
    last = [line for file in files.values() for line in deque(file.new_lines(), maxlen=args.lines)]
    _print_lines(last, files.values())
    goes_on = args.follow
    try:
        while goes_on:
            time.sleep(_LOG_POLL_S)
            goes_on = mesh.is_running  # asked before the lines are read, so that the last ones are among them
            if not args.service:
                files |= {path: _LogFile(path) for path in _log_paths(folder, ()) if path not in files}
            _print_lines([line for file in files.values() for line in file.new_lines()], files.values())
    except KeyboardInterrupt:
        accept_signal()
    return 0


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a service's log. `time` is as the service wrote it, and sorts as text; empty for a library's line."""

    time: str
    service: str
    text: str


class _LogFile:
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
                entry = read_log_line(line)
                self._time = entry.time or self._time
                yield Line(self._time, self.service, entry.text)


def _log_paths(folder: Path, services: Sequence[str]) -> list[Path]:
    """The logs of these services, or of all. Raises ConfigurationError."""
    paths = {path.stem: path for path in sorted(folder.glob("*.log"))}
    for service in services:
        if service not in paths:
            hint = suggestion(service, paths) or f"; there are {', '.join(paths)}"
            raise ConfigurationError(f"{folder} has no log of {service}{hint}")
    return [paths[service] for service in services or paths]


def _print_lines(lines: Sequence[Line], files: Collection[_LogFile]) -> None:
    width = max((len(file.service) for file in files), default=0)
    for line in sorted(lines, key=lambda line: line.time):
        sys.stdout.write(f"{line.service:{width}} {line.time[11:19]} {line.text}\n")
    sys.stdout.flush()


@dataclass(frozen=True, slots=True)
class RunningMesh:
    """A mesh and the `tandem up` that runs it. `address` and `http` are empty until the mesh is ready; `http` stays
    empty without a gateway. `since_s` is in seconds of the epoch.
    """

    pid: int
    process_start: str
    since_s: float
    models: tuple[str, ...]
    log_dir: str
    address: str = ""
    http: str = ""

    @classmethod
    def of_process(cls, pid: int, models: tuple[str, ...], log_dir: Path) -> "RunningMesh":
        """The mesh that process `pid` starts now."""
        return cls(pid, _process_start(pid) or "", time.time(), models, str(log_dir.absolute()))

    @property
    def is_running(self) -> bool:
        return _process_start(self.pid) == self.process_start

    def is_called(self, name: str) -> bool:
        """Whether `name` means this mesh: its process id, an address, a port of these, or a model."""
        addresses = [*self.address.split(","), self.http.rpartition("//")[2]]
        ports = [address.rpartition(":")[2] for address in addresses]
        return name in (str(self.pid), *filter(None, (*addresses, *ports)), *self.models)


def write_mesh(mesh: RunningMesh) -> None:
    """Write the file of a mesh. Raises OSError."""
    path = _path_of(mesh)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(path, json.dumps(asdict(mesh)).encode())


@contextmanager
def registered(mesh: RunningMesh, on_failure: Callable[[str], object]) -> Iterator[Callable[[str, str], None]]:
    """Keep the mesh's file while the block runs. Yields a function that adds the addresses once the mesh serves.
    `on_failure` gets a message if the file cannot be written.
    """

    def add_addresses(address: str, http: str) -> None:
        with suppress(OSError):  # a full disk is no reason to stop the mesh
            write_mesh(replace(mesh, address=address, http=http))

    try:
        write_mesh(mesh)
    except OSError as error:
        on_failure(f"`tandem ps` will not list this mesh: {error}")
    try:
        yield add_addresses
    finally:
        with suppress(OSError):
            _path_of(mesh).unlink(missing_ok=True)


def running_meshes() -> list[RunningMesh]:
    """All meshes of this user on this machine, oldest first. Removes stale files."""
    meshes = []
    names = re.compile(re.escape(_prefix()) + r"[0-9]+\.json")  # the prefix may begin another host's name
    for path in filter(lambda path: names.fullmatch(path.name), _folder().glob("*.json")):
        mesh = _read_mesh(path)
        if mesh is not None and mesh.is_running:
            meshes.append(mesh)
        else:
            with suppress(OSError):
                path.unlink(missing_ok=True)
    return sorted(meshes, key=lambda mesh: mesh.since_s)


def find_mesh(name: str | None, command: str) -> RunningMesh:
    """The mesh that `name` means, or the only one. `command` is followed by the name. Raises ConfigurationError."""
    meshes = running_meshes()
    if not meshes:
        raise ConfigurationError("no mesh of this user runs on this machine")
    matching = meshes if name is None else [mesh for mesh in meshes if mesh.is_called(name)]
    if len(matching) == 1:
        return matching[0]
    listed = ", ".join(f"{mesh.pid} ({' '.join(mesh.models)} at {mesh.address or 'no address yet'})" for mesh in meshes)
    if not matching:
        raise ConfigurationError(f"no mesh is called {name!r}; there are {listed}")
    raise ConfigurationError(
        f"several meshes run here; name one by its process id, as in `{command} {meshes[0].pid}`; `tandem ps` lists "
        f"them, too: {listed}"
    )


def _read_mesh(path: Path) -> RunningMesh | None:
    """The mesh of a file; None if it is not readable, or was written by another version."""
    try:
        content = json.loads(path.read_text())
        return RunningMesh(**content | {"models": tuple(content["models"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _folder() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # also without a home
    return Path(runtime or cache, "tandem", "meshes")


def _path_of(mesh: RunningMesh) -> Path:
    return _folder() / f"{_prefix()}{mesh.pid}.json"


def _prefix() -> str:
    return f"{socket.gethostname()}-"


def _process_start(pid: int) -> str | None:
    """A mark that no other process with this id has had or will have; None if the process has ended."""
    try:
        if sys.platform == "linux":
            # Ticks since the machine started: unlike psutil's figure, they do not move with the clock.
            state, *fields = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
            return None if state == "Z" else fields[18]
        return str(psutil.Process(pid).create_time())
    except (OSError, psutil.Error):
        return None


COMMANDS = {
    "ps": Command(_add_ps_arguments, _list),
    "stop": Command(_add_stop_arguments, _stop),
    "logs": Command(_add_logs_arguments, _show_logs),
}
