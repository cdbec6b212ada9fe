"""Routes of no dialect: the web pages (chat at /, the mesh at /mesh), the state of the mesh, health checks and metrics.

The pages are static and need no key; the routes that they call do. Their content security policy lets them load from
and call this gateway only, and forbids inline scripts. Trusted types are required and none are defined, so text from a
model cannot become markup even by mistake: Markdown becomes elements one by one.
"""

import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType

from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

import tandem
from gateway.access import key_in
from gateway.backend import Backend
from gateway.bottleneck import find_bottleneck
from gateway.errors import OPENAI, Problem
from gateway.exchange import Exchange
from gateway.schema import Json
from mesh.domain.host import is_loopback
from tandem import InvalidRequest, Mesh, TandemError

PAGES = Path(__file__).parent / "pages"
_MESH_TIMEOUT_S = 5.0
_DAY_S = 86_400

HEADERS: Mapping[str, str] = MappingProxyType(
    {
        "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'",
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
)


async def root(request: Request) -> Response:
    """Return the chat page to browsers, and TGI's health check to other clients."""
    if "text/html" in request.headers.get("accept", ""):
        return _page("chat.html")
    return await health(request)


async def mesh_page(request: Request) -> Response:
    return _page("mesh.html")


def _page(name: str) -> Response:
    return FileResponse(PAGES / name, headers=dict(HEADERS))


class PageFiles(StaticFiles):
    """Scripts and styles, with the pages' security headers."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        return response


async def health(request: Request) -> Response:
    """TGI's health check: an empty 200, or 503."""
    if await request.app.state.backend.router_health.is_ready():
        return Response()
    return JSONResponse({"error": "unhealthy", "error_type": "healthcheck"}, 503)


async def ping(request: Request) -> Response:
    """SageMaker's health check: 200 only while the router's health status is SERVING."""
    is_ready = await request.app.state.backend.router_health.is_ready()
    return JSONResponse({"status": "Healthy" if is_ready else "Unhealthy"}, 200 if is_ready else 503)


async def metrics(request: Request) -> Response:
    """Metrics as Prometheus text, or as OpenMetrics where that is asked for. Beyond loopback they need an operator's
    key, if the router has keys.
    """
    backend: Backend = request.app.state.backend
    if not is_loopback(backend.settings.host):
        try:
            await backend.gate.check_operator(key_in(request.headers))
        except TandemError as error:
            return OPENAI.error_response(Problem.of(error))
    try:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
    except (TypeError, ValueError):  # the header names an invalid version
        encode, content_type = choose_encoder("")
    return Response(encode(backend.metrics), headers={"content-type": content_type})


async def version(exchange: Exchange) -> Response:
    """Handle vLLM's GET /version, with the version of Tandem."""
    return JSONResponse({"version": tandem.__version__})


async def load(exchange: Exchange) -> Response:
    """Handle vLLM's GET /load: the number of choices that run through this gateway; other gateways' are not counted."""
    metrics = exchange.backend.metrics
    return JSONResponse({"server_load": metrics.num_waiting + metrics.num_running})


async def mesh_state(exchange: Exchange) -> Response:
    """Handle GET /mesh/state. The page computes rates from the counters and `at_s` of two answers."""
    mesh = await exchange.client.mesh(timeout=_MESH_TIMEOUT_S)
    return JSONResponse(state_json(mesh, at_s=time.monotonic()), headers={"cache-control": "no-store"})


async def mesh_history(exchange: Exchange) -> Response:
    """Handle GET /mesh/history?span_s=SECONDS: points under the SDK's names, oldest first."""
    text = exchange.request.query_params.get("span_s", str(_DAY_S))
    try:
        span_s = float(text)
    except ValueError:
        span_s = 0.0
    if not 0 < span_s <= _DAY_S:
        raise InvalidRequest(f"span_s must be a number of seconds up to {_DAY_S}, got {text!r}")
    points = await exchange.client.history(span_s, timeout=_MESH_TIMEOUT_S)
    return JSONResponse({"points": [asdict(point) for point in points]}, headers={"cache-control": "no-store"})


async def drain(exchange: Exchange) -> Response:
    worker_id = exchange.request.path_params["worker"]
    await exchange.client.drain(worker_id, timeout=_MESH_TIMEOUT_S)
    return JSONResponse({"worker_id": worker_id, "draining": True})


async def undrain(exchange: Exchange) -> Response:
    worker_id = exchange.request.path_params["worker"]
    await exchange.client.undrain(worker_id, timeout=_MESH_TIMEOUT_S)
    return JSONResponse({"worker_id": worker_id, "draining": False})


async def switch_role(exchange: Exchange) -> Response:
    """Handle POST /mesh/workers/{worker}/switch/{role}."""
    worker_id, role = (exchange.request.path_params[name] for name in ("worker", "role"))
    await exchange.client.switch_role(worker_id, role, timeout=_MESH_TIMEOUT_S)
    return JSONResponse({"worker_id": worker_id, "role": role})


def state_json(mesh: Mesh, *, at_s: float) -> Json:
    """The mesh under the SDK's names, plus `at_s` and, as `verdict`, the bottleneck."""
    return asdict(mesh) | {"at_s": at_s, "verdict": asdict(find_bottleneck(mesh))}
