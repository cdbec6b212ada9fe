"""The gateway's side of a custom handler: its process, started again when it dies, and requests passed on to it.

A handler that crashes, hangs or eats memory takes its own process with it, and nothing else: requests get 503 until it
is back. One that answers nobody for `request_timeout_s` is killed: its only thread would never be free again. A request
that has waited as long while others were answered is given up alone.
"""

import asyncio
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Iterable
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
_BROKEN_OFF = "the custom handler broke its answer off; try again later"
# Of one connection only, or the server's own to set.
_DROPPED = frozenset(
    {b"connection", b"content-length", b"date", b"host", b"keep-alive", b"transfer-encoding", STREAM_MARK.encode()}
)
_NO_LIMITS = httpx2.Limits(max_connections=None)

Headers = list[tuple[bytes, bytes]]


class HandlerProcess:
    """One for a gateway. `async with` it: the first start must succeed. Raises ConfigurationError if it does not."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._parts: list[str] = []
        self.ready = asyncio.Event()
        """Set while it takes requests."""
        self._process: asyncio.subprocess.Process | None = None
        self._last_answer_s = 0.0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep it running while the block runs."""
        with tempfile.TemporaryDirectory(prefix="tandem-handler-") as folder:
            path = str(Path(folder) / "socket")
            # No client around it: there is nothing to keep between requests, which are of different people.
            async with httpx2.AsyncHTTPTransport(uds=path, limits=_NO_LIMITS) as self._transport:
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
        """The handler's answer. Raises NoWorkers, DeadlineExceeded, InvalidRequest."""
        request = exchange.arrival.request
        headers = [each for each in _kept(request.headers.raw) if each[0] != b"x-request-id"]
        headers.append((b"x-request-id", exchange.request_id.encode()))
        query = {"model_name": "", **request.query_params} | ({"model_name": model} if model else {})
        return await self._send("/handle", exchange.body, headers, query)

    async def format(self, part: str, value: dict[str, Any]) -> Any:
        """What a formatter makes of a payload or an answer; InvalidRequest if it fails."""
        body = json.dumps(value).encode()
        response = await self._send(f"/{part}", body, [(b"content-type", b"application/json")], {})
        formatted = json.loads(bytes(response.body))
        if response.status_code != 200:
            raise tandem.InvalidRequest(f"{part}: {formatted['error']}")
        return formatted

    async def _send(self, path: str, body: bytes, headers: Headers, query: dict[str, str]) -> Response:
        asked = httpx2.Request("POST", f"http://handler{path}", params=query, headers=headers, content=body)
        async with self._patience():
            answer = await self._transport.handle_async_request(asked)
            if STREAM_MARK in answer.headers:
                response: Response = _PassedOn(answer, self._chunks(answer))
            else:
                content = b"".join([chunk async for chunk in answer.aiter_raw()])
                response = Response(content, answer.status_code)
        response.raw_headers.extend(_kept(answer.headers.raw))
        return response

    async def _chunks(self, answer: httpx2.Response) -> AsyncIterator[bytes]:
        """Each must come in time."""
        chunks = answer.aiter_raw()
        while True:
            async with self._patience():
                chunk = await anext(chunks, None)
            if chunk is None:
                return
            yield chunk

    @contextlib.asynccontextmanager
    async def _patience(self) -> AsyncIterator[None]:
        """The block waits for the handler. Raises what it is to the client if nothing comes."""
        clock = asyncio.get_running_loop().time
        began_s = clock()
        try:
            async with asyncio.timeout(self._settings.request_timeout_s):
                yield
        except TimeoutError:
            if self._last_answer_s < began_s:
                self._kill()
            raise tandem.DeadlineExceeded("the custom handler took too long") from None
        except httpx2.LocalProtocolError as error:
            raise tandem.InvalidRequest(f"the request cannot be passed on: {error}") from None
        except httpx2.TransportError as error:
            log.warning("no answer of the custom handler", error=repr(error))
            raise tandem.NoWorkers(_NOT_READY if isinstance(error, httpx2.ConnectError) else _BROKEN_OFF) from None
        self._last_answer_s = clock()

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
        """True once it serves; False if it has ended before, or takes too long."""
        try:
            async with asyncio.timeout(self._settings.handler_start_s):
                self._process = await self._spawn(path)
                assert self._process.stdout is not None
                parts = await _announced(self._process.stdout)
                if parts is None:
                    await self._process.wait()
                    return False
        except OSError as error:  # TimeoutError is one
            log.error("the custom handler does not start", error=repr(error))
            await self._stop()
            return False
        self._parts = parts
        self.ready.set()
        self._drain = asyncio.create_task(_drain(self._process.stdout))
        log.info("custom handler ready", file=self._settings.handler, parts=parts)
        return True

    async def _spawn(self, path: str) -> asyncio.subprocess.Process:
        Path(path).unlink(missing_ok=True)  # noqa: ASYNC240  (of a process that is gone)
        settings = self._settings
        given = {
            "file": settings.handler,
            "function": settings.handler_function,
            "socket": path,
            "router": settings.router,
        }
        flags = [f"--{name}={value}" for name, value in given.items()]
        environ = {name: value for name, value in os.environ.items() if name not in _SECRETS}
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gateway.handler", *flags, "--follow-stdin"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environ | {"TANDEM_HANDLER_PROPERTIES": settings.handler_properties},
            limit=_MAX_LINE_BYTES,
        )

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


class _PassedOn(StreamingResponse):
    """Lets the handler's answer go however the response ends."""

    def __init__(self, answer: httpx2.Response, chunks: AsyncIterator[bytes]) -> None:
        super().__init__(chunks, answer.status_code)
        self._answer = answer

    async def __call__(self, *connection: Any) -> None:
        try:
            await super().__call__(*connection)
        finally:
            await self._answer.aclose()


def _kept(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    lower = ((name.lower(), value.strip()) for name, value in headers)
    return [(name, value) for name, value in lower if name not in _DROPPED]


async def _announced(output: asyncio.StreamReader) -> list[str] | None:
    """The parts that a process says it has once it is ready; None if it ends before."""
    while True:
        try:
            line = await output.readline()
        except ValueError:  # longer than any of ours
            continue
        if not line:
            return None
        parts = _ready_parts(line)
        if parts is not None:
            return parts


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
