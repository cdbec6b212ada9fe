"""Starts programs of this repository as forks of one process that has imported what they import: 2 to 4 s less of CPU
time for each mesh, and 2 for each rank.

Programs find all else as they do when they are executed. Those whose environment differs are executed, as are all that
tests start by other means: each program and each way to start a mesh has such a test.
"""

import atexit
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from mesh.fork_server import client
from mesh.process import adopt_orphans
from tests.orphans import disown_orphans

FD_NAME, FD_NUMBERS = "TANDEM_WARM_FD_{}", "TANDEM_WARM_FDS"
PROGRAM = "tests.warm_fork"
_FREE_PREFIXES = ("TANDEM_", "PYTEST_CURRENT_TEST")
_MAX_FDS = 13  # besides stdio
_MAX_ANSWER_BYTES = 4096
_Popen = subprocess.Popen


class WarmPopen(_Popen[Any]):
    """subprocess.Popen whose `python -m MODULE` is a fork. The process leads a session of its own."""

    def _execute_child(self, args: Any, executable: Any, *others: Any) -> None:
        preexec_fn, _, pass_fds, cwd, environ, _, _, shell, *pipes = others
        pipes = pipes[:6]
        child_ends = [pipes[0], pipes[3], pipes[5]]
        is_plain = executable is None and preexec_fn is None and cwd is None and not shell
        if not (is_plain and client.can_fork() and len(pass_fds) <= _MAX_FDS and _is_program(args)):
            return super()._execute_child(args, executable, *others)
        pid = _server().fork(args[2:], os.environ if environ is None else environ, child_ends, pass_fds)
        if pid is None:
            return super()._execute_child(args, executable, *others)
        self.pid, self._child_created = pid, True
        self._close_pipe_fds(*pipes)
        return None


class _Server:
    """A process that forks, at the other end of a socket."""

    def __init__(self, channel: socket.socket) -> None:
        self._environ = _fixed(os.environ)
        self._folder = os.stat(".")
        self._socket = channel
        self._turn = threading.Lock()
        channel.send(json.dumps([PROGRAM]).encode())

    def fork(
        self, words: Sequence[str], environ: Mapping[str, str], stdio: Sequence[int], pass_fds: Sequence[int]
    ) -> int | None:
        """Start `python -m WORDS...` and return its process id, or None if it must be executed. Of `stdio`, -1 stands
        for this process's own.
        """
        if _fixed(environ) != self._environ or not os.path.samestat(os.stat("."), self._folder):
            return None
        names = [FD_NAME.format(place) for place in range(len(pass_fds))]
        own = {name: value for name, value in environ.items() if name not in self._environ}
        request = {
            "module": PROGRAM,
            "flags": [str(word) for word in words],
            "environ": own | {FD_NUMBERS: " ".join(map(str, pass_fds))},
            "fd_names": names,
        }
        files = [number if fd == -1 else fd for number, fd in enumerate(stdio)]
        with self._turn:
            adopt_orphans()
            try:
                socket.send_fds(self._socket, [json.dumps(request).encode()], [*files, *pass_fds])
                answer = json.loads(self._socket.recv(_MAX_ANSWER_BYTES))
            except BaseException:  # as a test's time limit: its answer would be taken for that to the next request
                _servers.remove(self)
                self._socket.close()
                raise
            finally:
                disown_orphans()
        return int(answer["pid"])


def _is_program(command: Sequence[str]) -> bool:
    return tuple(command[:2]) == (sys.executable, "-m") and command[2] != "mesh.fork_server"


def _fixed(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that libraries may read when they are imported."""
    return {name: value for name, value in environ.items() if not name.startswith(_FREE_PREFIXES)}


_servers: list[_Server] = []


def fork_by(channel: socket.socket) -> None:
    """Let this process start its programs by the fork server at the other end of `channel`."""
    _servers[:] = [_Server(channel)]
    subprocess.Popen = WarmPopen  # type: ignore[misc]


def _server() -> _Server:
    if not _servers:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = client.execute(theirs.fileno(), _fixed(os.environ))
        _servers.append(_Server(ours))
        atexit.register(_end, process, ours)
    return _servers[0]


def _end(process: subprocess.Popen[bytes], channel: socket.socket) -> None:
    process.kill()
    process.wait()
    channel.close()


@contextmanager
def warm_processes() -> Iterator[None]:
    """While it is open, programs that this process starts are forks."""
    subprocess.Popen = WarmPopen  # type: ignore[misc]
    try:
        yield
    finally:
        subprocess.Popen = _Popen  # type: ignore[misc]


@pytest.fixture(scope="module", autouse=True)
def forks() -> Iterator[None]:
    """For all tests of a module that imports this."""
    with warm_processes():
        yield
