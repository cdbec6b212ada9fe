"""The road every request takes, whatever its dialect.

    room? ─▶ origin, key ─▶ body ─▶ handler ─▶ response
Each step can end it with an error, which the dialect puts into words. A client that leaves cancels what is done for it,
wherever the request is.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol
from uuid import uuid4

import structlog
from opentelemetry import trace
from opentelemetry.trace import INVALID_SPAN, Span, SpanKind
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

import tandem
from gateway.access import is_foreign_page, key_in
from gateway.backend import Backend
from gateway.errors import BodyTooLarge, BodyTooSlow, Problem, is_ours
from gateway.feed import Feed
from gateway.impatience import impatient
from gateway.leaving import unless_gone
from gateway.metrics import Outcome
from gateway.progress import Progress
from gateway.settings import GatewaySettings
from mesh.tracing import context_in, mark_failed, trace_id_of

log = structlog.get_logger(__name__)

_ID_HEADERS = ("x-request-id", "x-amzn-sagemaker-inference-id")
_MAX_ID_CHARS = 128
_CLIENT_GONE = 499
_DISCARD_S = 10.0
_DISCARD_SILENCE_S = 1.0
_MAX_DISCARDED_BYTES = 64 << 20


class Dialect(Protocol):
    """How one family of clients is spoken to."""

    @property
    def name(self) -> str:
        """For logs and metrics."""
        ...

    def error_response(self, problem: Problem) -> Response:
        """What a client gets instead of an answer."""
        ...


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that has come in: nothing of it is believed yet."""

    backend: Backend
    request: Request
    request_id: str
    progress: Progress


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request that is being answered. `client` calls the router in its caller's name."""

    arrival: Arrival
    client: tandem.AsyncClient
    body: bytes

    @property
    def settings(self) -> GatewaySettings:
        """The gateway's."""
        return self.arrival.backend.settings

    @property
    def request_id(self) -> str:
        """What the client calls this request, or we do."""
        return self.arrival.request_id

    @property
    def served_name(self) -> str:
        """The model that answers requests which name none."""
        return self.arrival.backend.gate.served_name

    def tool_call_format(self, model: str) -> str:
        """How a model writes calls of functions: as configured, or else as its template says; "" if nobody knows."""
        if self.settings.tool_call_parser != "auto":
            return self.settings.tool_call_parser
        formats = self.arrival.backend.gate.tool_call_formats
        return formats.get(model, formats.get(self.served_name, ""))

    def feed(self, arguments: Sequence[tandem.GenerateArguments], num_choices: int = 1) -> Feed:
        """Start generating: one call for each of `arguments`, of `num_choices` choices each."""
        progress = self.arrival.progress
        for each in arguments:
            progress.asked(num_choices, each.get("max_new_tokens"))
        return Feed([self._call(each) for each in arguments], num_choices, progress.saw)

    def _call(self, arguments: tandem.GenerateArguments) -> AsyncGenerator[tandem.TokenEvent, None]:
        own = tandem.GenerateArguments(
            timeout=self.settings.request_timeout_s, client_request_id=self.arrival.request_id
        )
        return self.client.stream(**(own | arguments))


Handler = Callable[[Exchange], Coroutine[Any, Any, Response]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An ASGI application: one route's handler in its dialect. Only those that `generate` count in TGI's figures;
    of those that are polled only failures are worth a line of the log.
    """

    dialect: Dialect
    handler: Handler
    generates: bool = False
    is_polled: bool = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        request = Request(scope, receive)
        backend: Backend = scope["app"].state.backend
        request_id = _request_id(request)
        structlog.contextvars.bind_contextvars(request_id=request_id)
        progress = Progress(backend.metrics)
        status = _CLIENT_GONE
        with self._span(request, request_id) as span, backend.places.one() as has_place:
            try:
                response = await self._respond(Arrival(backend, request, request_id, progress), has_place=has_place)
                response.headers["x-request-id"] = request_id
                status = response.status_code
                async with impatient(send, backend.settings.slow_reader_s) as send_in_time:
                    await response(scope, receive, send_in_time)
            except (ClientDisconnect, TimeoutError):
                progress.failure = "dropped"
            except tandem.TandemError as error:  # in the midst of an answer, which then stays without its end
                progress.failed(Problem.of(error))
            finally:
                progress.ended()
                self._record(backend, request_id, progress, status)
                span.set_attribute("http.response.status_code", status)
                if progress.failure:
                    mark_failed(span, progress.failure)

    def _span(self, request: Request, request_id: str) -> AbstractContextManager[Span]:
        """The request's, below its client's; calls of the router find it as the current one."""
        if not self.generates:
            return trace.use_span(INVALID_SPAN)
        path = request.scope["route"].path
        facts = {"http.request.method": request.method, "http.route": path, "tandem.request_id": request_id}
        return trace.get_tracer("tandem.gateway").start_as_current_span(
            f"{request.method} {path}", context_in(request.headers), SpanKind.SERVER, facts
        )

    async def _respond(self, arrival: Arrival, *, has_place: bool) -> Response:
        """The answer, or what the dialect says instead. Raises ClientDisconnect."""
        try:
            exchange = await _receive(arrival, has_place=has_place)
        except ClientDisconnect:
            raise
        except Exception as error:
            response = self._tell(error, arrival)
            if not await _discard_rest(arrival.request):
                response.headers["connection"] = "close"
            return response
        try:
            return await unless_gone(self.handler(exchange), arrival.request)
        except ClientDisconnect:
            raise
        except Exception as error:
            return self._tell(error, arrival)

    def _tell(self, error: Exception, arrival: Arrival) -> Response:
        if is_ours(error):
            log.exception("a request failed", request_id=arrival.request_id)
        problem = Problem.of(error)
        arrival.progress.failed(problem)
        return self.dialect.error_response(problem)

    def _record(self, backend: Backend, request_id: str, progress: Progress, status: int) -> None:
        duration_s = progress.duration_s()
        backend.metrics.ended(
            Outcome(self.dialect.name, status, progress.failure, duration_s), generates=self.generates
        )
        if self.is_polled and not progress.failure:
            return
        log.info(
            "answered",
            request_id=request_id,
            dialect=self.dialect.name,
            status=status,
            failure=progress.failure or None,
            duration_ms=round(duration_s * 1000, 1),
            mesh_request_ids=sorted(progress.mesh_request_ids),
            trace_id=trace_id_of(trace.get_current_span()),
        )


async def _receive(arrival: Arrival, *, has_place: bool) -> Exchange:
    """All that comes before a handler. Raises what keeps the request out."""
    if not has_place:
        raise tandem.Overloaded("too many requests are open; try again later", retry_after_s=1.0)
    client = await _admit(arrival)
    return Exchange(arrival, client, await _read_body(arrival))


async def _admit(arrival: Arrival) -> tandem.AsyncClient:
    """A client with the caller's key. Raises Unauthenticated, PermissionDenied."""
    backend, headers = arrival.backend, arrival.request.headers
    if is_foreign_page(headers, backend.allowed_origins):
        raise tandem.PermissionDenied("pages of this origin may not call; see cors_allow_origin")
    key = key_in(headers)
    await backend.gate.check(key)
    return backend.client.acting_for(key)


async def _read_body(arrival: Arrival) -> bytes:
    """Raises BodyTooLarge before more than the cap is read, BodyTooSlow and ClientDisconnect."""
    settings = arrival.backend.settings
    too_large = BodyTooLarge(f"the body may have {settings.max_body_bytes} bytes at most")
    announced = arrival.request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > settings.max_body_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            async for chunk in arrival.request.stream():
                body += chunk
                if len(body) > settings.max_body_bytes:
                    raise too_large
    except TimeoutError:
        raise BodyTooSlow(f"the body did not come within {settings.body_timeout_s:g} s") from None
    return bytes(body)


async def _discard_rest(request: Request) -> bool:
    """Read on and forget, for a while: a client that is still sending would lose the answer. True if all is read."""
    num_bytes, clock = 0, asyncio.get_running_loop().time
    until_s = clock() + _DISCARD_S
    try:
        async with asyncio.timeout(_DISCARD_SILENCE_S) as patience:
            async for chunk in request.stream():
                patience.reschedule(min(until_s, clock() + _DISCARD_SILENCE_S))
                num_bytes += len(chunk)
                if num_bytes > _MAX_DISCARDED_BYTES:
                    return False
    except (TimeoutError, ClientDisconnect):
        return False
    except RuntimeError:  # starlette's word for it: the body ended with the very chunk that was too much
        return True
    return True


def _request_id(request: Request) -> str:
    """The client's, where it is fit to be shown, or a new one."""
    for name in _ID_HEADERS:
        given = request.headers.get(name, "")
        if given and given.isascii() and given.isprintable():
            return given[:_MAX_ID_CHARS].strip()
    return uuid4().hex
