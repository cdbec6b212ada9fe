"""The driver's side of the protocol in bench.peers.wire: one runner as a child process."""

import asyncio
import getpass
import itertools
import json
import os
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, Any

from tandem_cli.load_test.figures import RunFailed

_ROOT = Path(__file__).resolve().parents[2]  # where `bench` is found
_SILENCE_S = 300.0
_LOADING_S = 900.0
_STOPPING_S = 20.0


class PeerFailed(RunFailed):
    """A runner did not start, died, violated the protocol or hangs. The message ends with the end of its stderr."""


class PeerProcess:
    """A running runner. Streams run concurrently; all of them raise PeerFailed when the runner dies."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, errors: IO[bytes]) -> None:
        self._name = name
        self._process = process
        self._errors = errors
        self._ids = itertools.count(1)
        self._streams: dict[int, asyncio.Queue[dict[str, Any] | PeerFailed]] = {}
        self._failure: PeerFailed | None = None
        self._reading: asyncio.Task[None] | None = None

    async def wait_ready(self) -> None:
        """Wait until the engine is loaded. Raises PeerFailed."""
        try:
            async with asyncio.timeout(_LOADING_S):
                message = await self._read()
        except TimeoutError:
            raise self._failed(f"did not load in {_LOADING_S:.0f} s") from None
        if not message.get("ready"):
            raise self._failed(f"said {message} before it was ready")
        self._reading = asyncio.create_task(self._dispatch())

    async def stream(self, prompt: Sequence[int], max_new_tokens: int) -> AsyncIterator[list[int]]:
        """Run one request and yield new tokens. Raises PeerFailed."""
        if self._failure is not None:
            raise self._failure
        request_id = next(self._ids)
        inbox = self._streams[request_id] = asyncio.Queue()
        self._write({"id": request_id, "prompt": list(prompt), "max_new_tokens": max_new_tokens})
        try:
            while not (message := await self._next(inbox)).get("done"):
                yield message["tokens"]
        finally:
            del self._streams[request_id]

    async def stop(self) -> None:
        """Close stdin, which stops the runner; kill it after a time limit."""
        if self._reading is not None:
            self._reading.cancel()
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(_STOPPING_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    async def _next(self, inbox: "asyncio.Queue[dict[str, Any] | PeerFailed]") -> dict[str, Any]:
        try:
            async with asyncio.timeout(_SILENCE_S):
                message = await inbox.get()
        except TimeoutError:
            raise self._failed(f"said nothing for {_SILENCE_S:.0f} s") from None
        if isinstance(message, PeerFailed):
            raise message
        return message

    async def _dispatch(self) -> None:
        try:
            while True:
                message = await self._read()
                if message["id"] in self._streams:
                    self._streams[message["id"]].put_nowait(message)
        except PeerFailed as failure:
            self._failure = failure
            for inbox in self._streams.values():
                inbox.put_nowait(failure)

    async def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            code = await self._process.wait()
            raise self._failed(f"ended with exit status {code}")
        try:
            message: dict[str, Any] = json.loads(line)
        except ValueError:
            raise self._failed(f"wrote a line that is no JSON: {line[:200]!r}") from None
        return message

    def _write(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")

    def _failed(self, problem: str) -> PeerFailed:
        self._errors.seek(0)
        last_lines = self._errors.read().decode(errors="replace").strip().splitlines()[-12:]
        return PeerFailed("\n".join([f"{self._name} {problem}", *last_lines]))


def _own_temporary(folder: str) -> dict[str, str]:
    """The environment of a runner with this folder for temporary files. PyTorch's cache of compiled code is not one."""
    compiled = f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}"
    return {"TORCHINDUCTOR_CACHE_DIR": compiled} | os.environ | {"TMPDIR": folder}


@asynccontextmanager
async def running(name: str, command: Sequence[str]) -> AsyncIterator[PeerProcess]:
    """Start a runner, wait until it is ready, and stop it at the end.

    A runner that a signal ends leaves temporary files, such as vLLM's `vllm_dist_*`: it has a folder of its own for
    them, which is removed.
    """
    with (
        tempfile.TemporaryFile() as errors,
        tempfile.TemporaryDirectory(prefix="tandem-peer-", ignore_cleanup_errors=True) as temporary,
    ):
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            cwd=_ROOT,
            env=_own_temporary(temporary),
        )
        peer = PeerProcess(name, process, errors)
        try:
            await peer.wait_ready()
            yield peer
        finally:
            await peer.stop()
