"""The gateway's side of a custom handler: runs its process, restarts it when it dies, and forwards requests to it.

A handler that crashes, hangs or exhausts its memory affects only its own process: requests get 503 until it is back. A
handler that answers no request for `request_timeout_s` is killed, because its only thread would stay blocked. If other
requests were answered meanwhile, only the request that timed out fails.
"""

import asyncio
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from pathlib import Path

import httpx2
import structlog
from starlette.responses import JSONResponse, Response

import tandem
from gateway.answers import ClosingResponse
from gateway.exchange import Exchange
from gateway.handler.server import STREAM_MARK
from gateway.settings import GatewaySettings
from mesh.domain.errors import ConfigurationError
from mesh.logs import LogLimit
from mesh.process import handing_over, run_for_life
from mesh.settings import as_flags
from mesh.tasks import backoff_s, cancel_all

log = structlog.get_logger(__name__)

_FIRST_BACKOFF_S, _MAX_BACKOFF_S = 0.5, 10.0
_STOP_S = 6.0
_DRAIN_OUTPUT_S = 1.0
# Variables that the handler must not see. Its own properties come over a pipe.
_SECRETS = frozenset(
    {
        *("TANDEM_MESH_KEY", "TANDEM_TRIAL_KEY_SHA256", "TANDEM_REGISTRY_URL", "TANDEM_HANDLER_PROPERTIES"),
        # Credentials of clients, which an operator's shell may have.
        *("TANDEM_API_KEY", "TANDEM_OPENAI_API_KEY", "OPENAI_API_KEY", "OPTION_API_KEY", "API_KEY"),
    }
)
_NOT_READY = "the custom handler is starting; try again later"
_INCOMPLETE = "the custom handler did not complete its answer; try again later"
# Headers that are not forwarded: they belong to one connection, or the server sets them itself.
_DROPPED = frozenset(
    {b"connection", b"content-length", b"date", b"host", b"keep-alive", b"transfer-encoding", STREAM_MARK.encode()}
)
_NO_LIMITS = httpx2.Limits(max_connections=None)
_MAX_LINE_BYTES = 16 << 10
_MAX_SHOWN_CHARS = 2000
_BURST, _LINES_PER_S = 200, 20.0

Headers = list[tuple[bytes, bytes]]
OnReady = Callable[[list[str] | None], None]


class HandlerProcess:
    """One handler process of one gateway, restarted with backoff. It runs inside `async with running()`."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._parts: list[str] = []
        self.ready = asyncio.Event()
        """Set while the process takes requests."""
        self._process: _WatchedProcess | None = None
        self._stdio: StdioLogger | None = None
        self._last_answer_s = 0.0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the process while the block runs. Raises ConfigurationError if its first start fails."""
        with tempfile.TemporaryDirectory(prefix="tandem-handler-") as folder:
            path = str(Path(folder) / "socket")
            # A transport without a client: no cookies or other state may pass from one user's request to the next.
            async with (
                httpx2.AsyncHTTPTransport(uds=path, limits=_NO_LIMITS) as self._transport,
                contextlib.AsyncExitStack() as ending,
            ):
                ending.push_async_callback(self._stop)
                if not await self._start(path):
                    raise ConfigurationError(
                        f"the custom handler {self._settings.handler} does not start; see its log lines"
                    )
                restarter = run_for_life(self._restart_forever(path))
                try:
                    yield
                finally:
                    await cancel_all([restarter])

    def has(self, part: str) -> bool:
        """True if model.py has `part`: handle, input_formatter or output_formatter. Raises NoWorkers."""
        if not self.ready.is_set():
            raise tandem.NoWorkers(_NOT_READY)
        return part in self._parts

    async def handle(self, exchange: Exchange, model: str) -> Response:
        """Forward a request and return the handler's answer. Raises NoWorkers, DeadlineExceeded or InvalidRequest."""
        request = exchange.request
        headers = [header for header in _forwarded_headers(request.headers.raw) if header[0] != b"x-request-id"]
        headers.append((b"x-request-id", exchange.request_id.encode()))
        query = {"model_name": "", **request.query_params} | ({"model_name": model} if model else {})
        return await self._send("/handle", exchange.body, headers, query)

    async def format(self, part: str, value: Mapping[str, object]) -> object:
        """Return what the formatter `part` makes of a payload or an answer. Raises InvalidRequest if it fails."""
        body = json.dumps(value).encode()
        response = await self._send(f"/{part}", body, [(b"content-type", b"application/json")], {})
        formatted = json.loads(bytes(response.body))
        if response.status_code != 200:
            raise tandem.InvalidRequest(f"{part}: {formatted['error']}")
        return formatted

    async def _send(self, path: str, body: bytes, headers: Headers, query: dict[str, str]) -> Response:
        request = httpx2.Request("POST", f"http://handler{path}", params=query, headers=headers, content=body)
        async with self._deadline():
            answer = await self._transport.handle_async_request(request)
            if STREAM_MARK in answer.headers:
                response: Response = ClosingResponse(
                    self._chunks(answer), answer.aclose, status_code=answer.status_code
                )
            else:
                content = b"".join([chunk async for chunk in answer.aiter_raw()])
                response = Response(content, answer.status_code)
        response.raw_headers.extend(_forwarded_headers(answer.headers.raw))
        return response

    async def _chunks(self, answer: httpx2.Response) -> AsyncIterator[bytes]:
        """Yield chunks. Raises DeadlineExceeded if the next one takes too long."""
        chunks = answer.aiter_raw()
        while True:
            async with self._deadline():
                chunk = await anext(chunks, None)
            if chunk is None:
                return
            yield chunk

    @contextlib.asynccontextmanager
    async def _deadline(self) -> AsyncIterator[None]:
        """Wrap a wait for the handler: apply the timeout, and translate transport errors to the client's errors."""
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
            raise tandem.InvalidRequest(f"the request cannot be forwarded: {error}") from None
        except httpx2.TransportError as error:
            log.warning("no answer of the custom handler", error=repr(error))
            raise tandem.NoWorkers(_NOT_READY if isinstance(error, httpx2.ConnectError) else _INCOMPLETE) from None
        self._last_answer_s = clock()

    async def _restart_forever(self, path: str) -> None:
        """Restart the process whenever it ends, with exponential backoff while it does not become ready."""
        num_failures = 1
        while True:
            assert self._process is not None
            await self._process.wait()
            self.ready.clear()
            status = await self._wait_ended(self._process)
            delay_s = backoff_s(num_failures, first_s=_FIRST_BACKOFF_S, max_s=_MAX_BACKOFF_S)
            log.error("the custom handler has ended", status=status, starting_again_in_s=delay_s)
            await asyncio.sleep(delay_s)
            num_failures = 1 if await self._start(path) else num_failures + 1

    async def _start(self, path: str) -> bool:
        """Start the process. True once it serves, False if it ends before or takes too long."""
        try:
            async with asyncio.timeout(self._settings.handler_start_s):
                self._process = await self._spawn(path)
                functions = await self._wait_ready(self._process)
                if functions is None:
                    await self._wait_ended(self._process)
                    return False
        except OSError as error:  # TimeoutError is one
            log.error("the custom handler does not start", error=repr(error))
            await self._stop()
            return False
        self._parts = functions
        self.ready.set()
        log.info("custom handler ready", file=self._settings.handler, parts=functions)
        return True

    async def _wait_ready(self, process: asyncio.subprocess.Process) -> list[str] | None:
        """Wait until `process` is ready, and return the names of its functions; None if it ends before."""
        ready: asyncio.Future[list[str] | None] = asyncio.get_running_loop().create_future()
        self._stdio = StdioLogger(process, lambda functions: None if ready.done() else ready.set_result(functions))
        return await ready

    async def _wait_ended(self, process: "_WatchedProcess") -> int:
        """Wait for the end of the process and of its output; return its exit status."""
        status = await process.wait()
        if self._stdio is not None:
            await self._stdio.end(_DRAIN_OUTPUT_S)
        process.close()
        return status

    async def _spawn(self, path: str) -> "_WatchedProcess":
        Path(path).unlink(missing_ok=True)  # noqa: ASYNC240  (left by a process that is gone)
        settings = self._settings
        flags = as_flags(
            file=settings.handler,
            function=settings.handler_function,
            socket=path,
            router=settings.router,
            gateway_pid=os.getpid(),
            follow_stdin=True,
        )
        environ = {name: value for name, value in os.environ.items() if name not in _SECRETS}
        with handing_over({"TANDEM_HANDLER_PROPERTIES": settings.handler_properties}) as (extra, secrets_fd):
            loop = asyncio.get_running_loop()
            transport, protocol = await loop.subprocess_exec(
                lambda: _ExitWatch(_MAX_LINE_BYTES, loop),
                *(sys.executable, "-m", "gateway.handler", *flags),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=environ | extra,
                pass_fds=(secrets_fd,),
            )
            return _WatchedProcess(transport, protocol, loop)

    def _kill(self) -> None:
        self.ready.clear()
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def _stop(self) -> None:
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            process.terminate()
            try:
                async with asyncio.timeout(_STOP_S):
                    await process.wait()
            except TimeoutError:
                self._kill()
        await self._wait_ended(process)


class _ExitWatch(asyncio.subprocess.SubprocessStreamProtocol):
    """`exited` is set when the process exits."""

    def __init__(self, limit: int, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(limit, loop)
        self.exited = asyncio.Event()

    def process_exited(self) -> None:
        super().process_exited()
        self.exited.set()


class _WatchedProcess(asyncio.subprocess.Process):
    """A process whose `wait` returns at its exit. Until Python 3.12.4 asyncio's own also waits for the children of the
    process that hold its pipes, such as those that the user's code has started.
    """

    def __init__(
        self, transport: asyncio.SubprocessTransport, watch: _ExitWatch, loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__(transport, watch, loop)
        self._exited = watch.exited
        self._pipes = transport

    def close(self) -> None:
        """Close the pipes, which children of the process may hold. Call it after the exit."""
        self._pipes.close()

    async def wait(self) -> int:
        await self._exited.wait()
        assert self.returncode is not None
        return self.returncode


async def format_response(handler: HandlerProcess, response: Response) -> Response:
    """Apply the user's output_formatter to a built-in answer. Streams and errors stay unchanged."""
    if not isinstance(response, JSONResponse) or response.status_code != 200:
        return response
    return JSONResponse(await handler.format("output_formatter", json.loads(bytes(response.body))))


def _forwarded_headers(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    lower = ((name.lower(), value.strip()) for name, value in headers)
    return [(name, value) for name, value in lower if name not in _DROPPED]


class StdioLogger:
    """Logs one process's stdout and stderr until both end, cut to a length and limited in rate.

    `on_ready` is called with the functions that the process announces when it is ready, or with None if it ends first.
    """

    def __init__(self, process: asyncio.subprocess.Process, on_ready: OnReady) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        self._on_ready = on_ready
        self._limit = LogLimit(burst=_BURST, lines_per_s=_LINES_PER_S)
        self._readers = [
            asyncio.create_task(self._follow(process.stdout, self._on_stdout)),
            asyncio.create_task(self._follow(process.stderr, self._on_stderr)),
        ]

    async def end(self, limit_s: float) -> None:
        """Wait up to `limit_s` for the end of the output: a child of the handler may keep the pipes open."""
        await asyncio.wait(self._readers, timeout=limit_s)
        for reader in self._readers:
            reader.cancel()
        for _, num_lines in self._limit.all_suppressed():
            log.info("custom handler printed too much", num_lines_left_out=num_lines)

    async def _follow(self, stream: asyncio.StreamReader, on_line: Callable[[str], None]) -> None:
        try:
            async for line in _lines(stream):
                on_line(line.decode(errors="replace"))
        finally:
            if on_line == self._on_stdout:
                self._on_ready(None)

    def _on_stdout(self, line: str) -> None:
        functions = _ready_parts(line)
        if functions is None:
            self._log("stdout", line)
        else:
            self._on_ready(functions)

    def _on_stderr(self, line: str) -> None:
        """Forward lines that the process has logged itself; log any other line."""
        if not _is_log_line(line):
            self._log("stderr", line)
        elif self._limit.admit("log") is not None:
            sys.stderr.write(line + "\n")

    def _log(self, stream: str, line: str) -> None:
        num_suppressed = self._limit.admit(stream)
        if num_suppressed is not None:
            extra = {"suppressed": num_suppressed} if num_suppressed else {}
            log.info("custom handler printed", stream=stream, line=line[:_MAX_SHOWN_CHARS], **extra)


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield the lines without their newline, each cut to `_MAX_LINE_BYTES`."""
    start = b""
    while chunk := await stream.read(1 << 16):
        *lines, remaining = chunk.split(b"\n")
        for line in lines:
            yield (start + line)[:_MAX_LINE_BYTES]
            start = b""
        start = (start + remaining)[:_MAX_LINE_BYTES]
    if start:
        yield start


def _ready_parts(line: str) -> list[str] | None:
    try:
        announced = json.loads(line)
        return list(announced["parts"]) if announced["event"] == "ready" else None
    except (ValueError, KeyError, TypeError):
        return None


def _is_log_line(line: str) -> bool:
    if not line.startswith("{") or not line.isprintable():
        return False
    try:
        entry = json.loads(line)
    except ValueError:
        return False
    return "event" in entry and "level" in entry
