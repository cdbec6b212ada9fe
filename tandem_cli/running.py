"""Meshes that run on this machine: a small file for each, which `tandem up` writes at its start and removes at its end.

The files are in the user's runtime folder, or cache folder where there is none. A file is stale if its process has
ended, or if its process id belongs to another process by now. Homes may be shared by machines and containers, so only
files of this host count.
"""

import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from mesh.domain.errors import ConfigurationError
from mesh.whole_file import write_whole


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
        addresses = [*self.address.split(","), self.http.removeprefix("http://")]
        ports = [address.rpartition(":")[2] for address in addresses]
        return name in (str(self.pid), *filter(None, (*addresses, *ports)), *self.models)


class Registration:
    """The file of the mesh that this process runs."""

    def __init__(self, mesh: RunningMesh) -> None:
        self._mesh = mesh
        self._path = _folder() / f"{_prefix()}{mesh.pid}.json"

    def write(self) -> None:
        """Write the file. Raises OSError."""
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(self._path, json.dumps(asdict(self._mesh)).encode())

    def ready(self, address: str, http: str) -> None:
        """Add the addresses, once the mesh serves. A full disk is no reason to stop it."""
        self._mesh = replace(self._mesh, address=address, http=f"http://{http}" if http else "")
        with suppress(OSError):
            self.write()

    def remove(self) -> None:
        with suppress(OSError):
            self._path.unlink(missing_ok=True)


@contextmanager
def registered(mesh: RunningMesh, on_failure: Callable[[str], object]) -> Iterator[Registration]:
    """Register the mesh while the block runs. `on_failure` gets a message if its file cannot be written."""
    registration = Registration(mesh)
    try:
        registration.write()
    except OSError as error:
        on_failure(f"`tandem ps` will not list this mesh: {error}")
    try:
        yield registration
    finally:
        registration.remove()


def running_meshes() -> list[RunningMesh]:
    """All meshes of this user on this machine, oldest first. Removes stale files."""
    meshes = []
    names = re.compile(re.escape(_prefix()) + r"[0-9]+\.json")  # the prefix may begin another host's name
    for path in filter(lambda path: names.fullmatch(path.name), _folder().glob("*.json")):
        mesh = _read(path)
        if mesh is not None and mesh.is_running:
            meshes.append(mesh)
        else:
            with suppress(OSError):
                path.unlink(missing_ok=True)
    return sorted(meshes, key=lambda mesh: mesh.since_s)


def find_mesh(name: str | None) -> RunningMesh:
    """The mesh that `name` means, or the only one. Raises ConfigurationError."""
    meshes = running_meshes()
    if not meshes:
        raise ConfigurationError("no mesh of this user runs on this machine")
    matching = meshes if name is None else [mesh for mesh in meshes if mesh.is_called(name)]
    if len(matching) == 1:
        return matching[0]
    listed = ", ".join(f"{mesh.pid} ({' '.join(mesh.models)} at {mesh.address or 'no address yet'})" for mesh in meshes)
    if not matching:
        raise ConfigurationError(f"no mesh is called {name!r}; there are {listed}")
    raise ConfigurationError(f"several meshes run here: name one by its process id: {listed}")


def _read(path: Path) -> RunningMesh | None:
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
