"""A real mesh, started as users start it: `tandem up`, in processes of its own."""

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

import tandem
from tests.waiting import LIMIT_S
from tests.warm import warm_processes

START_S = 200.0
STOP_S = 90.0
RESTART_S = 240.0  # a busy machine takes a minute for two workers of two ranks


@dataclass
class MeshProcess:
    """A running `tandem up` and its services."""

    process: Process
    address: str
    log_dir: Path
    http: str = ""

    def pids(self, module: str) -> list[int]:
        """Process ids of the services started as `python -m MODULE`, oldest first."""
        return sorted(child.pid for child in self.children() if module in command_line(child))

    def children(self) -> list[psutil.Process]:
        """All processes below `tandem up`."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def signal(self, module: str, number: signal.Signals, index: int = 0) -> int:
        """Send a signal to one service; returns its process id."""
        pid = self.pids(module)[index]
        os.kill(pid, number)
        return pid


def is_alive(process: psutil.Process) -> bool:
    """True if the process runs. A zombie does not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def command_line(process: psutil.Process) -> list[str]:
    """Empty for a process that has just died."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def ends_of_logs(log_dir: Path) -> str:
    """The last lines of each log, below its name."""
    logs = sorted(log_dir.glob("*.log"))
    return "\n".join(line for log in logs for line in (f"{log.name}:", *log.read_text().splitlines()[-10:]))


@asynccontextmanager
async def started(
    model: Path | str, log_dir: Path, *flags: str, prefix: Sequence[str] = (), start_s: float = START_S
) -> AsyncIterator[MeshProcess]:
    """Start a mesh on a free port, and kill its processes at the end. `prefix` is a command that runs another.

    AssertionError if it is not ready within `start_s`, with all that it and its services have said.
    """
    words = ["up", "--model", str(model), "--port", "0", "--no-http", "--log-dir", str(log_dir), *flags]
    with warm_processes():
        command = (*prefix, sys.executable, "-m", "tandem_cli", *words)
        process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    stderr = asyncio.create_task(process.stderr.read())
    line = ""
    try:
        with contextlib.suppress(TimeoutError):
            line = (await asyncio.wait_for(process.stdout.readline(), start_s)).decode()
        if not line.startswith("ready "):
            with contextlib.suppress(ProcessLookupError):  # it may have ended by itself: what it said is shown
                process.kill()
            said = f"stderr: {(await stderr).decode()}; logs: {ends_of_logs(log_dir)}"
            raise AssertionError(f"no ready line within {start_s:g} s, but {line!r}; {said}")
        http = ""
        if any(flag.startswith("--http-port") for flag in flags):
            http = (await process.stdout.readline()).decode().split()[1]
        yield MeshProcess(process, line.split()[1], log_dir, http)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await stderr


@asynccontextmanager
async def mesh(
    model: Path | str, log_dir: Path, *flags: str, prefix: Sequence[str] = (), start_s: float = START_S
) -> AsyncIterator[MeshProcess]:
    """Start a mesh on a free port; stop it as Ctrl-C does and check that nothing is left."""
    async with started(model, log_dir, *flags, prefix=prefix, start_s=start_s) as running:
        yield running
        children = running.children()
        running.process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(running.process.wait(), STOP_S) == 0
        assert [child for child in children if is_alive(child)] == []


async def wait_serving(client: tandem.AsyncClient, role: str, without: int = 0, *, at_least: int = 1) -> None:
    """Return once so many processes besides `without` serve in the role."""
    workers: list[tandem.Worker] = []
    try:
        async with asyncio.timeout(RESTART_S):
            while True:
                workers = await client.workers()
                if sum(w.role == role and w.serving and w.pid != without for w in workers) >= at_least:
                    return
                await asyncio.sleep(0.2)
    except TimeoutError:
        raise TimeoutError(f"not {at_least} {role} workers that serve within {RESTART_S:g} s, but {workers}") from None


async def pools_are_whole(client: tandem.AsyncClient, within_s: float = LIMIT_S) -> None:
    """Return once every worker has all its blocks free and nothing to do; AssertionError if that takes too long."""
    deadline = asyncio.get_running_loop().time() + within_s
    while True:
        busy = [
            worker
            for worker in await client.workers()
            if worker.state not in ("lost", "stopped", "switching")
            and (worker.load.free_blocks != worker.num_blocks or worker.load.num_running or worker.load.num_waiting)
        ]
        if not busy:
            return
        assert asyncio.get_running_loop().time() < deadline, f"not at rest within {within_s:g} s: {busy}"
        await asyncio.sleep(0.2)
