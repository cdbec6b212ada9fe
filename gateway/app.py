"""The ASGI application: routes of all dialects on one port, the check of the Host header, what all answers share."""

import re

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway import web
from gateway.access import is_known_host
from gateway.anthropic.messages import count_tokens, messages
from gateway.backend import Backend
from gateway.batches import endpoints as batches
from gateway.errors import ANTHROPIC, LMI, OPENAI, TGI, Dialect, Problem, Reply, Row
from gateway.exchange import Endpoint, Handler, request_id_of
from gateway.lmi.invocations import invocations, lmi_options, sagemaker_invocations, sagemaker_invocations_stream
from gateway.lmi.sagemaker import SAGEMAKER
from gateway.openai.chat import chat_completions
from gateway.openai.completions import completions
from gateway.openai.models import embeddings, get_model, list_models
from gateway.openai.responses.endpoint import count_input_tokens, create_response
from gateway.openai.tokens import detokenize, tokenizer_info
from gateway.tgi import endpoints as tgi
from tandem import TandemError

_HEALTH = ("/health", "/ping")
# Beside those that pages of other origins can always read.
_HEADERS_FOR_PAGES = (
    *("x-request-id", "request-id", "retry-after", "retry-after-ms"),
    *("x-compute-type", "x-compute-characters", "x-compute-time", "x-total-time", "x-validation-time"),
    *("x-queue-time", "x-inference-time", "x-time-per-token", "x-prompt-tokens", "x-generated-tokens"),
)
_ID_HEADER = "x-request-id"
_ABSOLUTE = re.compile("https?://([^/]*)", re.IGNORECASE)
_ABSOLUTE_BYTES = re.compile(b"https?://[^/]*", re.IGNORECASE)
_NAMES = {404: "ResourceNotFoundException", 405: "MethodNotAllowedException"}


def build_app(backend: Backend) -> Starlette:
    app = Starlette(
        routes=[*_openai_routes(), *_anthropic_routes(), *_lmi_routes(), *_tgi_routes(), *_web_routes()],
        middleware=_middleware(backend),
        exception_handlers={HTTPException: _unknown_route},
    )
    app.state.backend = backend
    return app


def _openai_routes() -> list[BaseRoute]:
    """OpenAI's API, with and without the /v1 prefix."""
    chat = Endpoint(OPENAI, chat_completions, generates=True)
    return [
        route
        for prefix in ("/v1", "")
        for route in (
            Route(f"{prefix}/chat/completions", chat, methods=["POST"]),
            Route(f"{prefix}/completions", Endpoint(OPENAI, completions, generates=True), methods=["POST"]),
            Route(f"{prefix}/responses", Endpoint(OPENAI, create_response, generates=True), methods=["POST"]),
            Route(f"{prefix}/responses/input_tokens", Endpoint(OPENAI, count_input_tokens), methods=["POST"]),
            *_batch_routes(prefix),
            Route(f"{prefix}/embeddings", Endpoint(OPENAI, embeddings), methods=["POST"]),
            Route(f"{prefix}/models", _SharedRoute(list_models), methods=["GET"]),
            Route(f"{prefix}/models/{{model:path}}", _SharedRoute(get_model), methods=["GET"]),
        )
    ]


def _batch_routes(prefix: str) -> list[BaseRoute]:
    return [
        Route(f"{prefix}/files", Endpoint(OPENAI, batches.upload_file), methods=["POST"]),
        Route(f"{prefix}/files", Endpoint(OPENAI, batches.list_files), methods=["GET"]),
        Route(f"{prefix}/files/{{id}}", Endpoint(OPENAI, batches.get_file), methods=["GET"]),
        Route(f"{prefix}/files/{{id}}", Endpoint(OPENAI, batches.delete_file), methods=["DELETE"]),
        Route(f"{prefix}/files/{{id}}/content", Endpoint(OPENAI, batches.file_content), methods=["GET"]),
        Route(f"{prefix}/batches", Endpoint(OPENAI, batches.create_batch), methods=["POST"]),
        Route(f"{prefix}/batches", Endpoint(OPENAI, batches.list_batches, is_polled=True), methods=["GET"]),
        Route(f"{prefix}/batches/{{id}}", Endpoint(OPENAI, batches.get_batch, is_polled=True), methods=["GET"]),
        Route(f"{prefix}/batches/{{id}}/cancel", Endpoint(OPENAI, batches.cancel_batch), methods=["POST"]),
    ]


def _anthropic_routes() -> list[BaseRoute]:
    return [
        Route("/v1/messages", Endpoint(ANTHROPIC, messages, generates=True), methods=["POST"]),
        Route("/v1/messages/count_tokens", Endpoint(ANTHROPIC, count_tokens), methods=["POST"]),
    ]


def _lmi_routes() -> list[BaseRoute]:
    """The routes of LMI's and SageMaker's APIs."""
    invoke = Endpoint(LMI, invocations, generates=True)
    sagemaker_invoke = Endpoint(SAGEMAKER, sagemaker_invocations, generates=True)
    sagemaker_stream = Endpoint(SAGEMAKER, sagemaker_invocations_stream, generates=True)
    return [
        Route("/invocations", invoke, methods=["POST"]),
        Route("/invocations", Endpoint(LMI, lmi_options), methods=["OPTIONS"]),
        Route("/predictions/{model}", invoke, methods=["POST"]),
        Route("/predictions/{model}/{version}", invoke, methods=["POST"]),
        Route("/models/{model}/invoke", invoke, methods=["POST"]),
        Route("/endpoints/{model}/invocations", sagemaker_invoke, methods=["POST"]),
        Route("/endpoints/{model}/invocations-response-stream", sagemaker_stream, methods=["POST"]),
    ]


def _tgi_routes() -> list[BaseRoute]:
    """TGI's routes that need a key, and vLLM's of that kind."""
    return [
        Route("/", Endpoint(TGI, tgi.generate_compat, generates=True), methods=["POST"]),
        Route("/generate", Endpoint(TGI, tgi.generate, generates=True), methods=["POST"]),
        Route("/generate_stream", Endpoint(TGI, tgi.generate_stream, generates=True), methods=["POST"]),
        Route("/tokenize", Endpoint(TGI, tgi.tokenize), methods=["POST"]),
        Route("/detokenize", Endpoint(OPENAI, detokenize), methods=["POST"]),
        Route("/tokenizer_info", Endpoint(OPENAI, tokenizer_info), methods=["GET"]),
        Route("/version", Endpoint(OPENAI, web.version, is_polled=True), methods=["GET"]),
        Route("/load", Endpoint(OPENAI, web.load, is_polled=True), methods=["GET"]),
        Route("/chat_tokenize", Endpoint(TGI, tgi.chat_tokenize), methods=["POST"]),
        Route("/info", Endpoint(TGI, tgi.info), methods=["GET"]),
    ]


def _web_routes() -> list[BaseRoute]:
    """Pages, health checks and metrics."""
    return [
        Route("/", web.root, methods=["GET"]),
        Route("/mesh", web.mesh_page, methods=["GET"]),
        Route("/mesh/state", Endpoint(OPENAI, web.mesh_state, is_polled=True), methods=["GET"]),
        Route("/mesh/history", Endpoint(OPENAI, web.mesh_history, is_polled=True), methods=["GET"]),
        Route("/mesh/workers/{worker}/drain", Endpoint(OPENAI, web.drain), methods=["POST"]),
        Route("/mesh/workers/{worker}/undrain", Endpoint(OPENAI, web.undrain), methods=["POST"]),
        Route("/mesh/workers/{worker}/switch/{role}", Endpoint(OPENAI, web.switch_role), methods=["POST"]),
        Mount("/pages", web.PageFiles(directory=web.PAGES)),
        Route("/health", web.health, methods=["GET"]),
        Route("/ping", web.ping, methods=["GET", "POST"]),
        Route("/metrics", web.metrics, methods=["GET"]),
    ]


class _SharedRoute:
    """A route of both OpenAI's and Anthropic's API. Anthropic's clients send the header `anthropic-version`."""

    def __init__(self, handler: Handler) -> None:
        self._openai = Endpoint(OPENAI, handler)
        self._anthropic = Endpoint(ANTHROPIC, handler)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._anthropic if "anthropic-version" in Headers(scope=scope) else self._openai
        await endpoint(scope, receive, send)


def _middleware(backend: Backend) -> list[Middleware]:
    outer = [Middleware(_AbsoluteTarget), Middleware(_RequestId), Middleware(_HostCheck, backend=backend)]
    if not backend.allowed_origins:
        return outer
    cors = Middleware(
        CORSMiddleware,
        allow_origins=sorted(backend.allowed_origins),
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=_HEADERS_FOR_PAGES,
    )
    return [*outer, cors]


class _AbsoluteTarget:
    """Accepts an absolute URL as the request's target, as proxies send it. Its host replaces the Host header (RFC 9112,
    section 3.2.2).
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (url := _ABSOLUTE.match(scope["path"])) is not None:
            host = url[1].encode("latin-1", "replace")
            headers = [(name, value) for name, value in scope["headers"] if name != b"host"]
            path = scope["path"][url.end() :] or "/"
            raw_path = _ABSOLUTE_BYTES.sub(b"", scope["raw_path"], count=1) or b"/"
            scope = {**scope, "path": path, "raw_path": raw_path, "headers": [(b"host", host), *headers]}
        await self._app(scope, receive, send)


class _RequestId:
    """Adds the request's id to responses that no endpoint made, such as redirects."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                if _ID_HEADER not in headers:
                    request_id = request_id_of(Headers(scope=scope))
                    headers[_ID_HEADER] = headers[_dialect_of(scope["path"]).id_header] = request_id
            await send(message)

        await self._app(scope, receive, with_id)


class _HostCheck:
    """Refuses requests whose Host header is unknown, as a defence against DNS rebinding.

    If the router requires API keys, any host is accepted: a rebound page has no key. Health checks are always accepted:
    they reveal nothing, and load balancers send any host.
    """

    def __init__(self, app: ASGIApp, backend: Backend) -> None:
        self._app = app
        self._backend = backend
        self._names = frozenset(backend.settings.allowed_host_names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host", "")
        if scope["path"] not in _HEALTH and not is_known_host(host, self._names):
            refusal = await self._refusal(scope["path"], host)
            if refusal is not None:
                self._backend.metrics.observe_answer("none", refusal.status_code)
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _refusal(self, path: str, host: str) -> Response | None:
        try:
            if not await self._backend.gate.is_open():
                return None
        except TandemError as error:
            return _dialect_of(path).error_response(Problem.of(error))
        return _error(
            path, 403, "ForbiddenException", f"this gateway is not known as {host[:128]!r}; see allowed_hosts"
        )


async def _unknown_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:128]} is not served here"
    kind = _NAMES.get(error.status_code, "HttpException")
    backend: Backend = request.app.state.backend
    backend.metrics.observe_answer("none", error.status_code)
    response = _error(request.url.path, error.status_code, kind, message)
    response.headers.update(error.headers or {})
    return response


def _error(path: str, status: int, kind: str, message: str) -> Response:
    """The response to a request that reaches no endpoint. `kind` is LMI's name for the error."""
    row = Row(Reply(status, "invalid_request_error"), Reply(status, kind), Reply(status))
    return _dialect_of(path).error_response(Problem(row, message))


def _dialect_of(path: str) -> Dialect:
    """Anthropic's under /v1/messages, OpenAI's under the rest of /v1, LMI's elsewhere."""
    if path.startswith("/v1/messages"):
        return ANTHROPIC
    return OPENAI if path.startswith("/v1/") else LMI
