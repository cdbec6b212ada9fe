"""`python -m mesh.fork_server SOCKET_FD`: imports modules once, and forks a process for each request.

    import a module ─▶ import the next ─▶ ... ─▶ wait
          └── after each: a request has come ─▶ fork ─▶ answer with the process id ─▶ let the process run

A forked process runs its module as `python -m` does, and shares the memory of all that was imported before. Its parent
ends at once, so that it becomes a child of the client (client.py), which waits for it and signals it; the end of the
fork server does not matter to it once it runs. If the fork server ends before its answer, the client does not know the
process, so that nobody would end it: it dies instead of running. The fork server ends when the client does.

A fork copies one thread only, and no thread may run that could hold a lock at that moment. So nothing is started here:
no thread, no event loop, no gRPC channel, no parallel region of torch or numba, no CUDA. Importing starts none of
these; if an import starts a thread nevertheless, the fork server ends, and services start without it.
"""

import atexit
import errno
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import time
from collections import deque
from contextlib import suppress
from importlib.util import find_spec
from io import RawIOBase

import setproctitle

from mesh.interrupts import end_at_ctrl_c

_MAX_REQUEST_BYTES = 1 << 18
_MAX_FDS = 16
_STDIO = 3
_POLL_S = 0.0005
_RELEASE = b"!"


class Forked:
    """The request that a forked process has to fulfil, and the files that came with it: its stdio, then those that
    `fd_names` names.
    """

    def __init__(self, message: bytes, fds: list[int]) -> None:
        request = json.loads(message)
        self.module: str = request["module"]
        self._flags: list[str] = request["flags"]
        self._environ: dict[str, str] = request["environ"]
        self._fd_names: list[str] = request["fd_names"]
        self._fds = fds

    def close(self) -> None:
        """For the fork server, which has no use for the files."""
        for fd in self._fds:
            os.close(fd)

    def run(self) -> None:
        """Turn this process into that of the service, and run it."""
        for target, fd in enumerate(self._fds[:_STDIO]):
            os.dup2(fd, target)
            os.close(fd)
        os.environ.update(self._environ)
        os.environ.update(zip(self._fd_names, map(str, self._fds[_STDIO:]), strict=True))
        _reseed()
        gc.enable()
        sys.argv[1:] = self._flags
        title = " ".join((sys.executable, "-m", self.module, *self._flags))
        setproctitle.setproctitle(title.encode(errors="backslashreplace").decode())  # paths may be no UTF-8
        _name_process()
        end_at_ctrl_c()  # as the packages of programs do that are imported in their own process
        runpy.run_module(self.module, run_name="__main__", alter_sys=True)


def serve(client: socket.socket) -> Forked | None:
    """Import the modules that the first message lists, and fork until the client is gone. Returns None then; in each
    forked process, what to run.
    """
    waiting, imported = deque(json.loads(client.recv(_MAX_REQUEST_BYTES))), set[str]()
    while True:
        is_asked = bool(select.select([client], [], [], 0)[0])
        if waiting and not is_asked:
            _import(waiting.popleft(), imported)
            continue
        try:
            message, fds, _, _ = socket.recv_fds(client, _MAX_REQUEST_BYTES, _MAX_FDS)
        except ConnectionResetError:  # the client has gone without having read the last answer
            return None
        if not message:
            return None
        forked = Forked(message, fds)
        _import(forked.module, imported)
        gc.freeze()  # or the first garbage collection of each process would write to all pages
        if _start(forked, client):
            return forked


def _start(forked: Forked, client: socket.socket) -> bool:
    """Fork, answer with the process id, and let the process run. Returns True in the new process, once it may run."""
    reading, writing = os.pipe()
    with open(reading, "rb", buffering=0) as released, open(writing, "wb", buffering=0) as releasing:
        try:
            pid = _fork()
        except OSError as error:
            answer: dict[str, object] = {"error": error.strerror}
        else:
            if pid == 0:
                releasing.close()
                _await(released)
                return True
            answer = {"pid": pid}
        forked.close()
        with suppress(BrokenPipeError):  # the client is gone, which `recv` will say, or the process is
            client.send(json.dumps(answer).encode())
            releasing.write(_RELEASE)
    return False


def _await(released: RawIOBase) -> None:
    """Return once the fork server has answered. If it has ended instead, so does this process, as if killed with it."""
    if released.read(1) != _RELEASE:
        os.kill(os.getpid(), signal.SIGKILL)


def _import(module: str, imported: set[str]) -> None:
    """Import what `python -m MODULE` would run, once."""
    if module in imported:
        return
    imported.add(module)
    spec = find_spec(module)
    is_package = spec is not None and spec.submodule_search_locations is not None
    name = f"{module}.__main__" if is_package else module
    importlib.import_module(name)
    del sys.modules[name]  # runpy runs it again, as `__main__`
    if _has_threads():
        sys.exit(f"{module} starts a thread when it is imported, so services cannot be forked")


def _has_threads() -> bool:
    """True if there are threads that a fork would lack. OpenBLAS ends its own before a fork, so this makes one."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return len(os.listdir("/proc/self/task")) > 1


def _fork() -> int:
    """As os.fork, but the new process leads a session and is a child of the nearest subreaper. Raises OSError."""
    reading, writing = os.pipe()
    with open(reading) as answer, open(writing, "w") as answering:
        parent = os.fork()
        if parent == 0:
            _leave_parent()
            os.setsid()
            answering.write(str(os.getpid()))
            return 0
        answering.close()
        os.waitpid(parent, 0)
        pid = answer.read()
    if not pid:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return int(pid)


def _leave_parent() -> None:
    """Fork and end. Returns in the new process, once it has its new parent."""
    parent = os.getpid()
    try:
        if os.fork():
            os._exit(0)
    except OSError:
        os._exit(1)
    while os.getppid() == parent:
        time.sleep(_POLL_S)


def _reseed() -> None:
    """Give this process random numbers of its own. `random` does so by itself; uuid, secrets and ssl ask the system."""
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()


def _name_process() -> None:
    """Call it python, as the system does; setproctitle calls it by the command line."""
    setproctitle.setthreadtitle(os.path.basename(sys.executable))


def _run(forked: Forked, status: list[int]) -> None:
    try:
        forked.run()
    except SystemExit as end:
        if isinstance(end.code, int):
            status.append(end.code)
        raise


def _end(status: list[int]) -> None:
    """End a process that has its exit status. Python would take all modules apart first, which copies the memory that
    forks share: a third of a second of each.
    """
    if status:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status[0])


def main() -> None:
    status: list[int] = []
    atexit.register(_end, status)  # the first one is called last
    setproctitle.getproctitle()  # it must find the command line before the environment changes
    _name_process()
    gc.disable()
    with socket.socket(fileno=int(sys.argv[1])) as client:
        forked = serve(client)
    if forked is not None:
        _run(forked, status)


if __name__ == "__main__":
    main()
