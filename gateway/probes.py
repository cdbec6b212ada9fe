"""Health checks for load balancers, and metrics for Prometheus."""

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway.access import key_in
from gateway.backend import Backend
from gateway.errors import OpenAIDialect, Problem
from mesh.domain.host import is_loopback
from tandem import TandemError

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Probe = Callable[[Request], Awaitable[Response]]


async def health(request: Request) -> Response:
    """TGI's health check: an empty 200, or 503."""
    if await request.app.state.backend.readiness.is_ready():
        return Response()
    return JSONResponse({"error": "unhealthy", "error_type": "healthcheck"}, 503)


async def ping(request: Request) -> Response:
    """SageMaker's health check: 200 only while the router's health status is SERVING."""
    is_ready = await request.app.state.backend.readiness.is_ready()
    return JSONResponse({"status": "Healthy" if is_ready else "Unhealthy"}, 200 if is_ready else 503)


async def metrics(request: Request) -> Response:
    """Metrics as Prometheus text. Beyond loopback they need an operator's key, if the router has keys."""
    backend: Backend = request.app.state.backend
    if not is_loopback(backend.settings.host):
        try:
            await backend.gate.check_operator(key_in(request.headers))
        except TandemError as error:
            return OpenAIDialect().error_response(Problem.of(error))
    return Response(backend.metrics.text(), media_type=_METRICS_TYPE)


def routes() -> list[Route]:
    return [
        Route("/health", health, methods=["GET"]),
        Route("/ping", ping, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
    ]
