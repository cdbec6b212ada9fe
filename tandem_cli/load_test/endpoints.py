"""Opens the endpoint to measure: a running mesh, a mesh that is started with `tandem up`, or another server."""

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

import tandem
from mesh.process import PARENT_ENV
from mesh.settings import setting
from tandem.sync import ClientOptions
from tandem_cli.load_test.benchmark import Arm
from tandem_cli.load_test.figures import RunFailed
from tandem_cli.load_test.load_generator import Target, mesh_target

PACE_ENV = "TANDEM_PACE"
"""The variable with the pace of workers that only simulate a model (paced.py): ms per step, ms per token in it."""
_NUM_LOG_LINES = 8


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An open endpoint. `blocking` creates a synchronous client for threads; None if the endpoint has none."""

    target: Target
    vocab_size: int
    max_total_tokens: int | None = None
    about: dict[str, Any] = field(default_factory=dict)
    as_text: bool = False
    blocking: Callable[[], tandem.Client] | None = None


Opener = Callable[[], AbstractAsyncContextManager[Endpoint]]


@dataclass(frozen=True, kw_only=True)
class OpenAISettings:
    """Credentials are read from the environment only: command lines are visible to other users."""

    openai_api_key: str | None = setting(None, "credential for the server", env=("OPENAI_API_KEY",), secret=True)


@asynccontextmanager
async def mesh_endpoint(address: str, model: str | None, options: ClientOptions) -> AsyncIterator[Endpoint]:
    """A mesh that is already running. The client neither retries nor resumes, so that refusals and broken streams are
    counted.
    """
    options = {**options, "max_retries": 0, "resume_timeout": 0.0}
    async with tandem.AsyncClient(address, **options) as client:
        served = await client.model(model or "")
        workers = [
            {name: getattr(worker, name) for name in ("role", "device", "pid", "tensor_parallel")}
            | {"id": worker.worker_id}
            for worker in await client.workers()
        ]
        yield Endpoint(
            mesh_target(client, model),
            served.vocab_size,
            served.max_total_tokens,
            {"server": f"grpc://{address}", "model": served.name, "workers": workers},
            blocking=lambda: tandem.Client(address, **options),
        )


@asynccontextmanager
async def own_endpoint(arm: Arm) -> AsyncIterator[Endpoint]:
    """A mesh that is started for the measurement and stopped afterwards."""
    async with own_mesh(arm.up, arm.pace) as address, mesh_endpoint(address, None, {}) as endpoint:
        endpoint.about["up"] = list(arm.up)
        if arm.pace:
            endpoint.about["pace"] = arm.pace
        try:
            yield endpoint
        finally:
            for worker in endpoint.about["workers"]:
                worker["memory_bytes"] = memory_of(worker["pid"])


def memory_of(pid: int) -> int | None:
    """Memory of a worker on this machine, its ranks included, in bytes: what it has for itself, and its part of what it
    shares. None if it is gone or another user's.
    """
    try:
        worker = psutil.Process(pid)
        return sum(int(process.memory_full_info().pss) for process in (worker, *worker.children(recursive=True)))
    except psutil.Error:
        return None


@asynccontextmanager
async def openai_endpoint(
    url: str, model: str, *, api_key: str | None = None, vocab_size: int = 1000, as_text: bool = False
) -> AsyncIterator[Endpoint]:
    """An OpenAI-compatible server that is already running."""
    from tandem_cli.load_test.openai_target import OpenAITarget

    async with OpenAITarget(url, model, api_key=api_key) as target:
        yield Endpoint(target, vocab_size, about={"server": url, "model": model}, as_text=as_text)


@asynccontextmanager
async def own_mesh(flags: Sequence[str], pace: str = "") -> AsyncIterator[str]:
    """Start a mesh on a free port, yield its address, and stop it at the end. With a pace, its workers simulate the
    model (paced.py). Raises RunFailed with the end of its stderr.
    """
    program = ("tandem_cli.load_test.paced", "up") if pace else ("tandem_cli", "up")
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder:
        log = Path(folder) / "stderr"
        with log.open("w") as stderr:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", *program, "--port=0", "--no-http", f"--log-dir={folder}", *flags),
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                env=os.environ | {PARENT_ENV: str(os.getpid())} | ({PACE_ENV: pace} if pace else {}),
                start_new_session=True,
            )
        assert process.stdout is not None
        try:
            ready = (await process.stdout.readline()).decode().split()
            if not ready:
                await process.wait()  # its end is near; a signal at this moment would take its status from asyncio
                lines = log.read_text(errors="replace").splitlines()[-_NUM_LOG_LINES:]
                raise RunFailed(f"the mesh did not start: {'; '.join(lines) or 'it wrote no log'}")
            yield ready[1]
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
            await process.wait()
