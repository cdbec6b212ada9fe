"""The gateway's side of a custom handler: its process, started again when it dies, and requests passed on to it.

A handler that crashes, hangs or eats memory takes its own process with it, and nothing else: requests get 503 until it
is back. One that takes longer than `request_timeout_s` is killed, because its only thread would never be free again.
"""

import asyncio
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import structlog
from starlette.responses import JSONResponse, Response, StreamingResponse

import tandem
from gateway.exchange import Exchange
from gateway.handler.server import STREAM_MARK
from gateway.settings import GatewaySettings
from mesh.domain.errors import ConfigurationError

log = structlog.get_logger(__name__)

_FIRST_BACKOFF_S, _MAX_BACKOFF_S = 0.5, 10.0
_STOP_S = 6.0
_MAX_LINE_BYTES = 1 << 20
# What the mesh trusts is none of the handler's business.
_SECRETS = frozenset({"TANDEM_MESH_KEY", "TANDEM_TRIAL_KEY_SHA256", "TANDEM_REGISTRY_URL"})
_NOT_READY = "the custom handler is being started; try again later"
# Of one connection only, or the server's own to set.
_DROPPED = frozenset({"connection", "content-length", "date", "host", "keep-alive", "transfer-encoding", STREAM_MARK})


class HandlerProcess:
    """One for a gateway. `async with` it: the first start must succeed. Raises ConfigurationError if it does not."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._parts: list[str] = []
        self.ready = asyncio.Event()
        """Set while it takes requests."""
        self._process: asyncio.subprocess.Process | None = None

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep it running while the block runs."""
        with tempfile.TemporaryDirectory(prefix="tandem-handler-") as folder:
            path = str(Path(folder) / "socket")
            transport = httpx2.AsyncHTTPTransport(uds=path)
            async with httpx2.AsyncClient(transport=transport, base_url="http://handler", timeout=None) as self._client:
                if not await self._start(path):
                    raise ConfigurationError(f"the handler {self._settings.handler} does not start; its log says why")
                keeper = asyncio.create_task(self._keep(path))
                try:
                    yield
                finally:
                    keeper.cancel()
                    await asyncio.gather(keeper, return_exceptions=True)
                    await self._stop()

    def has(self, part: str) -> bool:
        """True if the user's code has a `handle`, an `input_formatter` or an `output_formatter`. Raises NoWorkers."""
        if not self.ready.is_set():
            raise tandem.NoWorkers(_NOT_READY)
        return part in self._parts

    async def handle(self, exchange: Exchange, model: str) -> Response:
        """The handler's answer. Raises NoWorkers, DeadlineExceeded."""
        request = exchange.arrival.request
        headers = {key: value for key, value in request.headers.items() if key not in _DROPPED}
        headers |= {"x-request-id": exchange.request_id, "model_name": model}
        return await self._send("/handle", exchange.body, headers, dict(request.query_params))

    async def format(self, part: str, value: dict[str, Any]) -> Any:
        """What a formatter makes of a payload or an answer; InvalidRequest if it fails."""
        body = json.dumps(value).encode()
        response = await self._send(f"/{part}", body, {"content-type": "application/json"}, {})
        formatted = json.loads(bytes(response.body))
        if response.status_code != 200:
            raise tandem.InvalidRequest(f"{part}: {formatted['error']}")
        return formatted

    async def _send(self, path: str, body: bytes, headers: dict[str, str], query: dict[str, str]) -> Response:
        asked = self._client.build_request("POST", path, content=body, headers=headers, params=query)
        try:
            async with asyncio.timeout(self._settings.request_timeout_s):
                answer = await self._client.send(asked, stream=True)
                kept = {key: value for key, value in answer.headers.items() if key not in _DROPPED}
                if STREAM_MARK in answer.headers:
                    return StreamingResponse(_passed_on(answer), answer.status_code, kept)
                content = await answer.aread()
        except TimeoutError:
            self._kill()
            raise tandem.DeadlineExceeded("the custom handler took too long") from None
        except httpx2.TransportError as error:
            log.warning("the custom handler is gone", error=str(error))
            self._kill()
            raise tandem.NoWorkers(_NOT_READY) from None
        return Response(content, answer.status_code, kept)

    async def _keep(self, path: str) -> None:
        """Start it again whenever it has ended, later and later while it does not come up."""
        backoff_s = _FIRST_BACKOFF_S
        while True:
            assert self._process is not None
            status = await self._process.wait()
            self.ready.clear()
            log.error("the custom handler has ended", status=status, starting_again_in_s=backoff_s)
            await asyncio.sleep(backoff_s)
            backoff_s = _FIRST_BACKOFF_S if await self._start(path) else min(_MAX_BACKOFF_S, 2 * backoff_s)

    async def _start(self, path: str) -> bool:
        """True once it serves; False if it has ended before."""
        Path(path).unlink(missing_ok=True)  # noqa: ASYNC240  (of a process that is gone)
        settings = self._settings
        given = {
            "file": settings.handler,
            "function": settings.handler_function,
            "socket": path,
            "router": settings.router,
        }
        flags = [f"--{name}={value}" for name, value in given.items()]
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gateway.handler", *flags, "--follow-stdin"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={name: value for name, value in os.environ.items() if name not in _SECRETS},
            limit=_MAX_LINE_BYTES,
        )
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            parts = _ready_parts(line)
            if parts is not None:
                self._parts = parts
                self.ready.set()
                self._drain = asyncio.create_task(_drain(self._process.stdout))
                log.info("custom handler ready", file=settings.handler, parts=parts)
                return True
        await self._process.wait()
        return False

    def _kill(self) -> None:
        self.ready.clear()
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def _stop(self) -> None:
        if self._process is None or self._process.returncode is not None:
            return
        self._process.terminate()
        try:
            async with asyncio.timeout(_STOP_S):
                await self._process.wait()
        except TimeoutError:
            self._kill()
            await self._process.wait()


async def format_response(handler: HandlerProcess, response: Response) -> Response:
    """A built-in answer as the user's output_formatter has it; streams and errors stay as they are."""
    if not isinstance(response, JSONResponse) or response.status_code != 200:
        return response
    return JSONResponse(await handler.format("output_formatter", json.loads(bytes(response.body))))


async def _passed_on(answer: httpx2.Response) -> AsyncIterator[bytes]:
    try:
        async for chunk in answer.aiter_raw():
            yield chunk
    finally:
        await answer.aclose()


def _ready_parts(line: bytes) -> list[str] | None:
    try:
        announced = json.loads(line)
        return list(announced["parts"]) if announced["event"] == "ready" else None
    except (ValueError, KeyError, TypeError):
        return None


async def _drain(output: asyncio.StreamReader) -> None:
    """What a handler prints is for its developer: it must only not fill the pipe."""
    while await output.read(1 << 16):
        pass
