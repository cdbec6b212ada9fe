"""`python -m tests.warm_program WORDS...`: `python -m tandem_cli WORDS...` in a fork of a process that has imported the
services (warm_start.py). The mesh that it starts has such a fork as its fork server.
"""

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping

import setproctitle

import bench.scale  # noqa: F401
import decode_worker.service  # noqa: F401
import gateway.app  # noqa: F401
import prefill_worker.service  # noqa: F401
import router.model_router  # noqa: F401
import tandem_cli.main
import tandem_cli.up  # noqa: F401
from mesh.fork_server import client

_MAX_ENVIRON_BYTES = 1 << 18


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
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        ours.close()
        return _become_fork_server(theirs)
    theirs.close()
    waiting = WaitingFork(pid, ours)
    execute = client.execute

    def start(socket_fd: int, environ: Mapping[str, str]) -> WaitingFork | subprocess.Popen[bytes]:
        if not _fits(environ):
            return execute(socket_fd, environ)
        waiting.serve(socket_fd, environ)
        return waiting

    client.execute = start
    try:
        runpy.run_module("tandem_cli", run_name="__main__", alter_sys=True)
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
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):
        os.dup2(null, number)
    os.close(null)
    os.environ.clear()
    os.environ.update(json.loads(message))
    sys.argv[1:] = [str(fds[0])]
    runpy.run_module("mesh.fork_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
