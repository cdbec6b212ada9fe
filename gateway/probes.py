"""What needs no key: health for load balancers, figures for Prometheus, and the pages for people."""

from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

PAGES = Path(__file__).parent / "pages"
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Probe = Callable[[Request], Awaitable[Response]]


async def health(request: Request) -> Response:
    """TGI's: an empty 200, or 503."""
    if await request.app.state.backend.readiness.is_ready():
        return Response()
    return JSONResponse({"error": "unhealthy", "error_type": "healthcheck"}, 503)


async def ping(request: Request) -> Response:
    """SageMaker's: 200 only once a complete path of workers serves."""
    is_ready = await request.app.state.backend.readiness.is_ready()
    return JSONResponse({"status": "Healthy" if is_ready else "Unhealthy"}, 200 if is_ready else 503)


async def metrics(request: Request) -> Response:
    """Prometheus' text format."""
    return Response(request.app.state.backend.metrics.text(), media_type=_METRICS_TYPE)


async def root(request: Request) -> Response:
    """The page for browsers; for others TGI's health check."""
    if "text/html" in request.headers.get("accept", ""):
        return FileResponse(PAGES / "index.html")
    return await health(request)


def routes() -> list[BaseRoute]:
    """All of them."""
    return [
        Route("/", root, methods=["GET"]),
        Route("/health", health, methods=["GET"]),
        Route("/ping", ping, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
        Mount("/pages", StaticFiles(directory=PAGES)),
    ]
