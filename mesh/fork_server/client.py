"""A fork server seen by the process that uses it, and the processes that it has forked."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mesh.process import adopt_orphans

_FREE_PREFIX = "TANDEM_"
"""Variables that processes of one fork server may have of their own: no library reads them when it is imported."""

_ANSWER_S = 60.0
_MAX_ANSWER_BYTES = 4096


def can_fork() -> bool:
    """True on Linux 5.3 or newer."""
    if sys.platform != "linux":
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


class ForkServer:
    """Starts programs `python -m MODULE` as forks of one process that has imported their modules. `close` it.

    `start` makes this process the parent of all its orphaned descendants. `on_lost(text)` is called if the fork server
    ends by itself; what it has forked lives on.
    """

    def __init__(
        self, programs: Iterable[Sequence[str]], environ: Mapping[str, str], on_lost: Callable[[str], None]
    ) -> None:
        self._modules = tuple(dict.fromkeys(filter(None, map(_module, programs))))
        self._environ = _fixed(environ)
        self._folder = os.stat(".")
        self._on_lost = on_lost
        self._is_ended = False
        self._turn = asyncio.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        # Not in its command line, where whoever looks for a service would find it.
        self._socket.send(json.dumps(self._modules).encode())
        with theirs:
            self._process = execute(theirs.fileno(), self._environ)
        self.pid = self._process.pid

    async def start(
        self, command: Sequence[str], environ: Mapping[str, str], fds: Mapping[str, int], *, limit: int
    ) -> "ForkedProcess | None":
        """Start `command` in a session of its own, with pipes as stdio and lines of up to `limit` bytes. It inherits
        the files `fds`, whose numbers it finds in variables of these names.

        Returns None if the command must be executed instead: its module, its environment or the working folder differ
        from the fork server's, or the fork server has ended. Raises OSError if the system cannot start a process.
        """
        async with self._turn:
            if not self._fits(command, environ):
                return None
            adopt_orphans()
            own_environ = {name: value for name, value in environ.items() if name not in self._environ}
            request = {"module": command[2], "flags": command[3:], "environ": own_environ, "fd_names": list(fds)}
            with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
                stdio = [_pipe(theirs, ours, is_input=number == 0) for number in range(3)]
                try:
                    sent = [their_end for their_end, _ in stdio]
                    answer = await self._ask(request, [*sent, *fds.values()])
                except OSError:
                    self._lose()
                    return None
                except asyncio.CancelledError:
                    self._lose()  # it would answer the next request with the process of this one
                    raise
                if "error" in answer:
                    raise OSError(answer["error"])
                process = ForkedProcess(answer["pid"], stdio[0][1])
                ours.pop_all()
                await process.connect(stdio[1][1], stdio[2][1], limit)
                return process

    def end(self) -> None:
        """Kill the fork server. A call of `start` that waits for it returns None."""
        self._is_ended = True
        self._process.kill()

    def close(self) -> None:
        self.end()
        self._process.wait()
        self._socket.close()

    def _fits(self, command: Sequence[str], environ: Mapping[str, str]) -> bool:
        return (
            not self._is_ended
            and _module(command) in self._modules
            and _fixed(environ) == self._environ
            and os.path.samestat(os.stat("."), self._folder)
        )

    async def _ask(self, request: Mapping[str, object], fds: Sequence[int]) -> dict[str, Any]:
        """Send a request with files. Raises OSError if the fork server has ended or does not answer."""
        loop = asyncio.get_running_loop()
        socket.send_fds(self._socket, [json.dumps(request).encode()], fds)
        async with asyncio.timeout(_ANSWER_S):
            answer = await loop.sock_recv(self._socket, _MAX_ANSWER_BYTES)
        if not answer:
            raise ConnectionResetError
        return json.loads(answer)

    def _lose(self) -> None:
        if not self._is_ended:
            self.end()
            self._on_lost("the fork server has ended: from now on services start without it, which takes longer")


class ForkedProcess:
    """A process that a fork server has started. Its methods are those of asyncio.subprocess.Process."""

    stdout: asyncio.StreamReader
    stderr: asyncio.StreamReader

    def __init__(self, pid: int, stdin_fd: int) -> None:
        """Takes `stdin_fd`, the writing end of its standard input, and closes it when the process exits."""
        self.pid = pid
        self.returncode: int | None = None
        self._stdin_fd = stdin_fd
        self._loop = asyncio.get_running_loop()
        self._exited = asyncio.Event()
        self._pidfd = os.pidfd_open(pid)
        self._loop.add_reader(self._pidfd, self._on_exit)

    async def connect(self, stdout_fd: int, stderr_fd: int, limit: int) -> None:
        """Read its output from these files."""
        self.stdout, self.stderr = await _reader(stdout_fd, limit), await _reader(stderr_fd, limit)

    async def wait(self) -> int:
        """Wait for the exit and return the status: that of the program, or -N after signal N."""
        await self._exited.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has exited."""
        if self.returncode is None:
            signal.pidfd_send_signal(self._pidfd, number)

    def _on_exit(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self._pidfd)
        os.close(self._stdin_fd)
        self._exited.set()


def execute(socket_fd: int, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start the fork server, which inherits the socket."""
    return subprocess.Popen(
        [sys.executable, "-m", "mesh.fork_server", str(socket_fd)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=(socket_fd,),
        env=environ,
        start_new_session=True,
    )


async def _reader(fd: int, limit: int) -> asyncio.StreamReader:
    """Reads the file `fd`, and closes it at its end."""
    reader = asyncio.StreamReader(limit=limit)
    pipe = os.fdopen(fd, "rb", buffering=0)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    return reader


def _pipe(theirs: contextlib.ExitStack, ours: contextlib.ExitStack, *, is_input: bool) -> tuple[int, int]:
    """Their end and our end of a pipe, which the stacks will close. They read from it if `is_input`."""
    reading, writing = os.pipe()
    their_end, our_end = (reading, writing) if is_input else (writing, reading)
    theirs.callback(os.close, their_end)
    ours.callback(os.close, our_end)
    return their_end, our_end


def _module(command: Sequence[str]) -> str | None:
    """The module that `command` runs, if it is "python -m MODULE FLAGS" with this Python."""
    return command[2] if tuple(command[:2]) == (sys.executable, "-m") else None


def _fixed(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that all processes of one fork server share: libraries may read them when they are imported."""
    return {name: value for name, value in environ.items() if not name.startswith(_FREE_PREFIX)}
