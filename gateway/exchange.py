"""The steps that requests of every dialect share.

    origin, key ─▶ body ─▶ slot ─▶ handler ─▶ response
An error in any step ends the request with the dialect's error response. A refusal is sent at once, and the server
discards the rest of the body (server.py). A request holds one of the gateway's slots from the end of its
body to the end of its response. A client that disconnects cancels the handler and its calls of the router.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Concatenate, ParamSpec, TypeVar
from uuid import uuid4

import structlog
from opentelemetry import trace
from opentelemetry.trace import INVALID_SPAN, Span, SpanKind
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

import tandem
from gateway.access import is_foreign_page, key_in
from gateway.backend import Backend
from gateway.errors import BodyTooLarge, BodyTooSlow, Dialect, Problem, UnsupportedMediaType, is_ours
from gateway.feed import Feed
from gateway.metrics import Progress
from gateway.schema import M, check, parse
from gateway.server import cancel_on_disconnect
from gateway.settings import GatewaySettings
from mesh.tracing import context_in, mark_failed, trace_id_of

log = structlog.get_logger(__name__)

_ID_HEADERS = ("x-request-id", "x-amzn-sagemaker-inference-id")
_MAX_ID_CHARS = 128
_CLIENT_GONE = 499

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request that has passed the checks. `request_id` is the client's, or a generated one; `client` calls the router
    with the caller's API key.
    """

    backend: Backend
    request: Request
    request_id: str
    progress: Progress
    client: tandem.AsyncClient
    body: bytes

    @property
    def settings(self) -> GatewaySettings:
        return self.backend.settings

    async def parse(self, schema: type[M]) -> M:
        """Parse and check the JSON body. Raises InvalidRequest."""
        return await self.backend.parser.run(len(self.body), partial(parse, schema, self.body))

    async def check(self, schema: type[M], payload: object) -> M:
        """Check a payload that was read from the body already. Raises InvalidRequest."""
        return await self.backend.parser.run(len(self.body), partial(check, schema, payload))

    async def read(self, function: Callable[Concatenate[bytes, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return `function(body, ...)`, which runs on a thread if the body is large."""
        return await self.backend.parser.run(len(self.body), partial(function, self.body, *args, **kwargs))

    @property
    def served_name(self) -> str:
        """The model that answers requests without a model name."""
        return self.backend.gate.served_name

    def model(self, name: str = "") -> tandem.Model | None:
        """Return the served model of that name or with that adapter, or the default model. None if no model is known
        yet.
        """
        gate = self.backend.gate
        return gate.models.get(name) or gate.models.get(gate.served_name)

    def feed(self, arguments: Sequence[tandem.GenerateArguments], num_choices: int = 1) -> Feed:
        """Start a router call per element of `arguments`, of `num_choices` choices each. The caller closes the feed."""
        progress, timeout_s = self.progress, self.settings.request_timeout_s
        for arguments_of_call in arguments:
            progress.start(num_choices, arguments_of_call.get("max_new_tokens"))
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        calls = [partial(self._call, arguments_of_call, deadline_s) for arguments_of_call in arguments]
        return Feed(calls, num_choices, progress.observe, timeout_s)

    def _call(self, arguments: tandem.GenerateArguments, deadline_s: float) -> AsyncGenerator[tandem.TokenEvent, None]:
        time_left_s = max(0.0, deadline_s - asyncio.get_running_loop().time())
        defaults = tandem.GenerateArguments(timeout=time_left_s, client_request_id=self.request_id)
        return self.client.stream(**(defaults | arguments))


Handler = Callable[[Exchange], Coroutine[object, object, Response]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An ASGI application: one route's handler with its dialect.

    `generates`: the route counts in TGI's metrics and gets a span. `is_polled`: only failures are written to the log.
    """

    dialect: Dialect
    handler: Handler
    generates: bool = False
    is_polled: bool = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        backend: Backend = scope["app"].state.backend
        request_id = request_id_of(request.headers)
        structlog.contextvars.bind_contextvars(request_id=request_id)
        progress = Progress(backend.metrics)
        status = _CLIENT_GONE
        with self._start_span(request, request_id) as span, ExitStack() as cleanup:
            try:
                response = await self._respond(backend, request, request_id, progress, cleanup)
                response.headers["x-request-id"] = response.headers[self.dialect.id_header] = request_id
                status = response.status_code
                sending = _Sending(send)
                await response(scope, receive, sending)
                if not sending.is_complete and not progress.failure:
                    progress.failure = "dropped"
            except ClientDisconnect:
                progress.failure = "dropped"
            except tandem.TandemError as error:  # in the middle of a response, which stays incomplete
                progress.failed(Problem.of(error))
            finally:
                progress.close()
                self._record(backend, request_id, progress, status)
                span.set_attribute("http.response.status_code", status)
                if progress.failure:
                    mark_failed(span, progress.failure)

    def _start_span(self, request: Request, request_id: str) -> AbstractContextManager[Span]:
        """Start the request's span as the current one, with the client's trace context as its parent."""
        if not self.generates:
            return trace.use_span(INVALID_SPAN)
        path = request.scope["route"].path
        attributes = {"http.request.method": request.method, "http.route": path, "tandem.request_id": request_id}
        return trace.get_tracer("tandem.gateway").start_as_current_span(
            f"{request.method} {path}", context_in(request.headers), SpanKind.SERVER, attributes
        )

    async def _respond(
        self, backend: Backend, request: Request, request_id: str, progress: Progress, cleanup: ExitStack
    ) -> Response:
        """Return the answer or the dialect's error response. `cleanup` is closed after it: it releases the slot and the
        body's bytes. Raises ClientDisconnect.
        """
        has_body = False
        try:
            client, body = await _receive(backend, request, cleanup)
            has_body = True
            exchange = Exchange(backend, request, request_id, progress, client, body)
            return await cancel_on_disconnect(self.handler(exchange), request)
        except ClientDisconnect:
            raise
        except Exception as error:
            if is_ours(error):
                log.exception("a request failed", request_id=request_id)
            problem = Problem.of(error)
            progress.failed(problem)
            response = self.dialect.error_response(problem)
            if not has_body and (isinstance(error, BodyTooSlow) or "expect" in request.headers):
                response.headers["connection"] = "close"  # the rest of the body may or may not follow
            return response

    def _record(self, backend: Backend, request_id: str, progress: Progress, status: int) -> None:
        duration_s = progress.duration_s()
        backend.metrics.observe_answer(self.dialect.name, status)
        if self.generates:
            backend.metrics.observe_generation(progress.failure, duration_s)
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


class _Sending:
    """An ASGI send channel that records whether the response was sent completely."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.is_complete = False

    async def __call__(self, message: Message) -> None:
        await self._send(message)
        self.is_complete = message["type"] == "http.response.body" and not message.get("more_body", False)


async def _receive(backend: Backend, request: Request, cleanup: ExitStack) -> tuple[tandem.AsyncClient, bytes]:
    """Run the steps before the handler. Return a client that sends the caller's key, and the body. Raises the error
    that refuses the request.
    """
    if is_foreign_page(request.headers, backend.allowed_origins):
        raise tandem.PermissionDenied("pages of this origin may not call the gateway; see cors_allow_origin")
    key = key_in(request.headers)
    await backend.gate.check(key)
    backend.slots.require_slot()  # before the body is read, which would be wasted work
    body = await _read_body(request, backend.settings, cleanup.enter_context(backend.bodies.share()))
    cleanup.enter_context(backend.slots.slot())
    return backend.client.acting_for(key), body


async def _read_body(request: Request, settings: GatewaySettings, grow: Callable[[int], None]) -> bytes:
    """Read the body. `grow`: see BodyBudget. Raises BodyTooLarge, BodyTooSlow, UnsupportedMediaType, Overloaded or
    ClientDisconnect.
    """
    too_large = BodyTooLarge(f"the body may have {settings.max_body_bytes} bytes at most")
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() not in ("", "identity"):
        raise UnsupportedMediaType(f"bodies in content-encoding {encoding[:64]} are not read: send it without")
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > settings.max_body_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            async for chunk in request.stream():
                if len(body) + len(chunk) > settings.max_body_bytes:
                    raise too_large
                grow(len(body) + len(chunk))
                body += chunk
    except TimeoutError:
        raise BodyTooSlow(f"the body did not arrive within {settings.body_timeout_s:g} s") from None
    return bytes(body)


def request_id_of(headers: Headers) -> str:
    """Return the client's id if it is printable ASCII, cut to its maximum length, or a new id."""
    for name in _ID_HEADERS:
        value = headers.get(name, "")
        if value and value.isascii() and value.isprintable():
            return value[:_MAX_ID_CHARS].strip()
    return uuid4().hex
