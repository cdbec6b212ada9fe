"""Processes that a fork server starts are as those that are executed, and depend on it no longer."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import psutil
import pytest
import pytest_asyncio

from mesh.fork_server.client import ForkedProcess, ForkServer, can_fork, execute
from mesh.process import adopt_orphans
from tests.orphans import disown_orphans
from tests.waiting import LIMIT_S, until

pytestmark = [
    pytest.mark.skipif(not can_fork(), reason="forks are for Linux"),
    pytest.mark.asyncio(loop_scope="module"),
]

PROGRAM = (sys.executable, "-m", "tests.fakes.forked")
LIMIT = 1 << 20


class Forks:
    """A fork server, what it said when it was lost, and its processes."""

    def __init__(self, *programs: tuple[str, ...]) -> None:
        self.lost: list[str] = []
        self.server = ForkServer(programs or [PROGRAM], environment(), self.lost.append)
        self.processes: list[ForkedProcess] = []

    async def close(self) -> None:
        self.server.close()
        for process in self.processes:
            process.send_signal(signal.SIGKILL)
            await ended(process)
        disown_orphans()

    async def ask(self, *flags: str, environ: dict[str, str] | None = None, **fds: int) -> ForkedProcess | None:
        """None if the fork server does not start it."""
        async with asyncio.timeout(LIMIT_S):
            process = await self.server.start((*PROGRAM, *flags), environ or environment(), fds, limit=LIMIT)
        if process is not None:
            self.processes.append(process)
        return process

    async def start(self, *flags: str, **options: Any) -> ForkedProcess:
        process = await self.ask(*flags, **options)
        assert process is not None
        return process


def environment(**added: str) -> dict[str, str]:
    """Without the name of the test's phase, which changes."""
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"} | added


async def read(stream: asyncio.StreamReader | None) -> dict[str, Any]:
    assert stream is not None
    async with asyncio.timeout(LIMIT_S):
        report: dict[str, Any] = json.loads(await stream.readline())
    return report


async def ended(process: ForkedProcess) -> int:
    async with asyncio.timeout(LIMIT_S):
        return await process.wait()


@asynccontextmanager
async def forking(*programs: tuple[str, ...]) -> AsyncIterator[Forks]:
    forks = Forks(*programs)
    try:
        yield forks
    finally:
        await forks.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def forks() -> AsyncIterator[Forks]:
    """One for all tests that leave it as it was."""
    async with forking() as started:
        yield started


async def test_a_fork_is_as_an_executed_program(forks: Forks) -> None:
    environ = environment(TANDEM_MODEL="a model")
    executed = await asyncio.create_subprocess_exec(
        *(*PROGRAM, "status", "--a flag"), stdin=-1, stdout=-1, stderr=-1, env=environ, start_new_session=True
    )
    forked = await forks.start("status", "--a flag", environ=environ)
    expected, got = await read(executed.stdout), await read(forked.stdout)
    assert got["about"] == expected["about"]
    assert got["about"]["parent"] == os.getpid()
    assert got["own"]["command"] == expected["own"]["command"]
    assert got["own"]["sum"] == expected["own"]["sum"]
    assert (await executed.wait(), await ended(forked)) == (3, 3)


@pytest.mark.parametrize(("ending", "status"), [("status", 3), ("signal", -9), ("error", 1)])
async def test_the_end_of_a_fork_is_seen(forks: Forks, ending: str, status: int) -> None:
    process = await forks.start(ending)
    assert await ended(process) == status
    error = (await process.stderr.read()).decode()
    assert error.endswith("ValueError: as asked\n") if ending == "error" else not error
    process.send_signal(signal.SIGTERM)  # to nobody
    assert not psutil.pid_exists(process.pid)


async def test_forks_share_neither_random_numbers_nor_files(forks: Forks) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"a secret")
    first = await read((await forks.start(TANDEM_EXTRA_FD=reading)).stdout)
    second = await read((await forks.start()).stdout)
    os.close(reading)
    os.close(writing)
    assert (first["own"]["extra"], second["own"]["extra"]) == ("a secret", "")
    assert not set(first["own"]["random"]) & set(second["own"]["random"])
    pipes = [{file for file in report["own"]["files"] if not file.startswith("/")} for report in (first, second)]
    assert [len(each) for each in pipes] == [4, 3]
    assert not pipes[0] & pipes[1]


async def test_a_cancelled_start_leaves_no_answer_to_the_next() -> None:
    async with forking() as forks:
        os.kill(forks.server.pid, signal.SIGSTOP)
        starting = asyncio.create_task(forks.ask())
        await asyncio.sleep(0)  # it asks
        starting.cancel()
        await asyncio.wait([starting])
        assert starting.cancelled()
        os.kill(forks.server.pid, signal.SIGCONT)
        assert await forks.ask() is None
        assert len(forks.lost) == 1


def ask_for_process(channel: socket.socket, stdin: int, output: int) -> None:
    request = {"module": PROGRAM[2], "flags": [], "environ": {}, "fd_names": []}
    socket.send_fds(channel, [json.dumps(request).encode()], [stdin, output, output])


def leave_unread(channel: socket.socket) -> None:
    """Ask for a process, end it, and close the socket with the answer in it."""
    with open(os.devnull, "r+b") as null:
        ask_for_process(channel, null.fileno(), null.fileno())
    channel.settimeout(LIMIT_S)
    pid = json.loads(channel.recv(4096, socket.MSG_PEEK))["pid"]
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    channel.close()


async def test_a_client_that_goes_before_it_has_read_an_answer_is_no_error() -> None:
    async with forking() as forks:
        adopt_orphans()
        leave_unread(forks.server._socket)
        assert await asyncio.to_thread(forks.server._process.wait, LIMIT_S) == 0


def fill(channel: socket.socket) -> None:
    """Let the next message wait until the other end has read some."""
    with suppress(BlockingIOError):
        while True:
            channel.send(b"{}", socket.MSG_DONTWAIT)


def ask_without_answer() -> tuple[subprocess.Popen[bytes], socket.socket, BinaryIO]:
    """A fork server that is asked for a process and cannot send its answer; what the process says."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        ours.send(json.dumps([PROGRAM[2]]).encode())
        fill(theirs)
        server = execute(theirs.fileno(), environment())
    reading, writing = os.pipe()
    with open(os.devnull, "rb") as null, open(writing, "wb") as output:
        ask_for_process(ours, null.fileno(), output.fileno())
    return server, ours, open(reading, "rb")


def children_but(known: set[psutil.Process]) -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if child not in known]


async def test_a_fork_whose_user_was_not_told_of_it_never_runs() -> None:
    """Nobody would end it."""
    adopt_orphans()
    others = set(psutil.Process().children())
    server, ours, said = ask_without_answer()
    others.add(psutil.Process(server.pid))
    with ours, said:
        await until(lambda: children_but(others))
        (forked,) = children_but(others)
        server.kill()
        server.wait()
        assert await asyncio.to_thread(said.read) == b""
        assert await asyncio.to_thread(forked.wait, LIMIT_S) == -signal.SIGKILL
    disown_orphans()


async def test_a_fork_outlives_the_fork_server() -> None:
    async with forking() as forks:
        process = await forks.start()
        await read(process.stdout)
        os.kill(forks.server.pid, signal.SIGKILL)
        assert await forks.ask() is None
        assert await forks.ask() is None
        assert len(forks.lost) == 1
        process.send_signal(signal.SIGTERM)
        assert await ended(process) == -signal.SIGTERM


async def test_what_a_fork_server_cannot_do_is_left_to_its_user(
    forks: Forks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await forks.ask(environ=environment(OMP_NUM_THREADS="7")) is None  # read when torch was imported
    command = (sys.executable, "-m", "router")
    assert await forks.server.start(command, environment(), {}, limit=LIMIT) is None
    monkeypatch.chdir(tmp_path)
    assert await forks.ask() is None
    monkeypatch.undo()
    assert await forks.ask() is not None
    assert forks.lost == []


async def test_a_thread_that_an_import_starts_ends_the_fork_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "threaded.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    program = (sys.executable, "-m", "threaded")
    async with forking(program) as forks, asyncio.timeout(LIMIT_S):
        assert await forks.server.start(program, environment(), {}, limit=LIMIT) is None
        assert len(forks.lost) == 1


async def test_a_fork_server_that_is_ended_answers_nobody() -> None:
    async with forking() as forks:
        starting = asyncio.create_task(forks.ask())
        await asyncio.sleep(0)  # now it waits for the fork server, which imports
        forks.server.end()
        assert await starting is None
        assert forks.lost == []
