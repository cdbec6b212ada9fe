"""What needs no key: health for load balancers, figures for Prometheus."""

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Probe = Callable[[Request], Awaitable[Response]]


async def health(request: Request) -> Response:
    """TGI's: an empty 200, or 503."""
    if await request.app.state.backend.readiness.is_ready():
        return Response()
    return JSONResponse({"error": "unhealthy", "error_type": "healthcheck"}, 503)


async def ping(request: Request) -> Response:
    """SageMaker's: 200 only while the router's health says SERVING."""
    is_ready = await request.app.state.backend.readiness.is_ready()
    return JSONResponse({"status": "Healthy" if is_ready else "Unhealthy"}, 200 if is_ready else 503)


async def metrics(request: Request) -> Response:
    """Prometheus' text format."""
    return Response(request.app.state.backend.metrics.text(), media_type=_METRICS_TYPE)


def routes() -> list[Route]:
    """All of them."""
    return [
        Route("/health", health, methods=["GET"]),
        Route("/ping", ping, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
    ]
