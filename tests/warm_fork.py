"""`python -m tests.warm_fork MODULE FLAGS...` is `python -m MODULE FLAGS...` in a fork of a process that has imported
what the services import (warm.py). The mesh that a `tandem up` starts has such a fork as its fork server.
"""

import atexit
import fcntl
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping

import setproctitle

import decode_worker.service  # noqa: F401
import gateway.app
import gateway.handler.server  # noqa: F401
import prefill_worker.service  # noqa: F401
import rank_worker.remote_rank
import rank_worker.shared_rank  # noqa: F401
import router.model_router  # noqa: F401
import tandem_cli.main
import tandem_cli.up  # noqa: F401
import tests.warm_workers  # noqa: F401
from mesh.fork_server import __main__ as fork_server
from mesh.fork_server import client
from tests.warm import FD_NAME, FD_NUMBERS, fork_by

_DEGREES = ("--tensor-parallel", "--pipeline-parallel")
_WITH_RANKS = ("prefill_worker", "decode_worker", "tests.component.ranks.ranks_leader")
_MAX_ENVIRON_BYTES = 1 << 18
_NEW_FDS = 1000  # above all numbers that a parent may ask for


class WaitingFork:
    """A fork of this process, made while it has one thread, that waits to become the fork server of a mesh. Like
    subprocess.Popen.
    """

    def __init__(self, pid: int, control: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._control = control

    def serve(self, socket_fd: int, environ: Mapping[str, str]) -> None:
        socket.send_fds(self._control, [json.dumps(dict(environ)).encode()], [socket_fd])

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Let it end, if it serves nobody, and return its status."""
        self._control.close()
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


def main() -> None:
    module = sys.argv.pop(1)
    setproctitle.setproctitle(" ".join((sys.executable, "-m", module, *sys.argv[1:])))
    _number_files()
    if module == "tandem_cli":
        _run_with_fork_server(module)
    else:
        if module in _WITH_RANKS:
            _start_ranks_as_forks()
        _run(module)


def _run(module: str) -> None:
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _number_files() -> None:
    """Give the files that the parent passes on the numbers that they have there."""
    numbers = [int(number) for number in os.environ.pop(FD_NUMBERS, "").split()]
    received = [int(os.environ.pop(FD_NAME.format(place))) for place in range(len(numbers))]
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, _NEW_FDS) for fd in received]
    for fd in received:
        os.close(fd)
    for fd, number in zip(moved, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)


def _start_ranks_as_forks() -> None:
    """Give this worker a fork server of its own, which ends with it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        ours.close()
        _serve_forks(theirs.detach())
        sys.exit()
    theirs.close()
    fork_by(ours)
    atexit.register(lambda: (ours.close(), os.waitpid(pid, 0)))


def _run_with_fork_server(module: str) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        ours.close()
        return _become_fork_server(theirs)
    theirs.close()
    waiting, execute = WaitingFork(pid, ours), client.execute

    def start(socket_fd: int, environ: Mapping[str, str]) -> WaitingFork | subprocess.Popen[bytes]:
        if not _fits(environ):
            return execute(socket_fd, environ)
        waiting.serve(socket_fd, environ)
        return waiting

    client.execute = start
    try:
        _run(module)
    finally:
        waiting.wait()
    return None


def _fits(environ: Mapping[str, str]) -> bool:
    """True if no variable differs that libraries may have read when they were imported."""
    changed = (name for name, value in environ.items() if os.environ.get(name) != value)
    return all(name.startswith("TANDEM_") or name == "PYTHONPATH" for name in changed)


def _become_fork_server(control: socket.socket) -> None:
    """Run `python -m mesh.fork_server` when the parent asks for it; end if it never does."""
    setproctitle.setproctitle(f"{sys.executable} -m mesh.fork_server")
    message, fds, _, _ = socket.recv_fds(control, _MAX_ENVIRON_BYTES, 1)
    control.close()
    if not message:
        return
    os.environ.clear()
    os.environ.update(json.loads(message))
    _serve_forks(fds[0])


def _serve_forks(socket_fd: int) -> None:
    setproctitle.setproctitle(f"{sys.executable} -m mesh.fork_server")
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):
        os.dup2(null, number)
    os.close(null)
    sys.argv[1:] = [str(socket_fd)]
    fork_server.Forked = _Forked  # type: ignore[misc]
    fork_server.main()


class _Forked(fork_server.Forked):
    """A fork of a mesh's fork server: a worker, or a program of a worker's own fork server."""

    def run(self) -> None:
        if self.module in _WITH_RANKS and any(flag.startswith(_DEGREES) for flag in self._flags):
            _start_ranks_as_forks()
        super().run()


if __name__ == "__main__":
    main()
