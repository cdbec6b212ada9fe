"""Routes of no dialect: the web pages (chat at /, the mesh at /mesh), the state of the mesh, health checks and metrics.

The pages are static and need no key; the routes that they call do. Their content security policy lets them load from
and call this gateway only, and forbids inline scripts. Trusted types are required and none are defined, so text from a
model cannot become markup even by mistake.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from gateway.access import key_in
from gateway.backend import Backend
from gateway.errors import OpenAIDialect, Problem
from gateway.exchange import Exchange
from gateway.schema import Json
from mesh.domain.host import is_loopback
from tandem import Mesh, TandemError, Worker

PAGES = Path(__file__).parent / "pages"
_MESH_TIMEOUT_S = 5.0
_NEARLY_FULL = 0.85
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

HEADERS: Mapping[str, str] = MappingProxyType(
    {
        "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
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


@dataclass(frozen=True, slots=True)
class Verdict:
    """A verdict for operators. `level`: ok, busy or down. `side`: the side to look at, prefill or decode, or ""."""

    level: str
    side: str
    headline: str
    detail: str


async def mesh_state(exchange: Exchange) -> Response:
    """Handle GET /mesh/state. The page computes rates from the counters and `at_s` of two answers."""
    mesh = await exchange.client.mesh(timeout=_MESH_TIMEOUT_S)
    return JSONResponse(state_json(mesh, at_s=time.monotonic()), headers={"cache-control": "no-store"})


def state_json(mesh: Mesh, *, at_s: float) -> Json:
    """The mesh under the SDK's names, plus `at_s` and the verdict."""
    return asdict(mesh) | {"at_s": at_s, "verdict": asdict(judge(mesh))}


def judge(mesh: Mesh) -> Verdict:
    """Find the bottleneck: what the queue waits for, or, without a queue, the fuller side."""
    decode = [worker for worker in mesh.workers if worker.role == "decode"]
    serving = [worker for worker in decode if worker.serving]
    prefill = [worker for worker in mesh.workers if worker.role == "prefill" and worker.serving]
    if not serving:
        return Verdict("down", "decode", "No model is served: no decode worker takes requests", _worker_states(decode))
    if mesh.shortage == "decode worker":
        return Verdict(
            "down", "decode", "A model has no decode worker that takes requests", f"{_waiting(mesh)} for one."
        )
    if mesh.shortage == "decode room":
        detail = (
            f"{_waiting(mesh)} for a batch slot or KV memory: {_decode_load(serving)}. More decode workers would help."
        )
        return Verdict("busy", "decode", "Decode is the bottleneck", detail)
    if mesh.shortage == "prefill room":
        detail = f"{_waiting(mesh)} for prefill: {_prefill_load(prefill)}. More prefill workers would help."
        return Verdict("busy", "prefill", "Prefill is the bottleneck", detail)
    return _judge_without_queue(mesh, prefill, serving)


def _judge_without_queue(mesh: Mesh, prefill: list[Worker], decode: list[Worker]) -> Verdict:
    load = f"Decode: {_decode_load(decode)}. Prefill: {_prefill_load(prefill)}."
    away = [f"{worker.worker_id} is {worker.state}" for worker in mesh.workers if worker.state in ("lost", "stalled")]
    if away:
        return Verdict("busy", "", f"{', '.join(away)}; no request waits", load)
    if not prefill:
        return Verdict("ok", "prefill", "No prefill worker serves: decode workers run prefill themselves", load)
    if max(_slot_use(decode), _kv_use(decode)) >= _NEARLY_FULL:
        return Verdict("busy", "decode", "Decode is nearly full, but no request waits", load)
    num_waiting = sum(worker.load.num_waiting for worker in prefill)
    if num_waiting:
        return Verdict(
            "busy", "prefill", f"Prefill is the busier side: {_count(num_waiting, 'prompt')} in its queue", load
        )
    headline = "No bottleneck: no request waits" if mesh.active_requests else "Idle: ready for requests"
    return Verdict("ok", "", headline, load)


def _worker_states(decode: Iterable[Worker]) -> str:
    states = [
        f"{worker.worker_id} is {worker.state if worker.state != 'ready' else 'not proven yet'}" for worker in decode
    ]
    return "; ".join(states) + "." if states else "None has registered."


def _waiting(mesh: Mesh) -> str:
    return f"{_count(mesh.queued_requests, 'request')} {'waits' if mesh.queued_requests == 1 else 'wait'}"


def _decode_load(workers: list[Worker]) -> str:
    running = sum(worker.load.num_running for worker in workers)
    slots = sum(worker.max_num_seqs for worker in workers)
    used = f"{running} of {slots} slots taken, {100 * _kv_use(workers):.0f} % of KV memory in use"
    return used + _draft_acceptance(workers)


def _draft_acceptance(workers: list[Worker]) -> str:
    drafted = sum(worker.load.drafted_tokens for worker in workers)
    accepted = sum(worker.load.accepted_tokens for worker in workers)
    return f", {100 * accepted / drafted:.0f} % of draft tokens accepted" if drafted else ""


def _prefill_load(workers: list[Worker]) -> str:
    if not workers:
        return "no worker serves"
    return f"{_count(sum(worker.prefilling_tokens for worker in workers), 'prompt token')} to compute"


def _slot_use(workers: list[Worker]) -> float:
    return sum(worker.load.num_running for worker in workers) / max(1, sum(worker.max_num_seqs for worker in workers))


def _kv_use(workers: list[Worker]) -> float:
    total = sum(worker.num_blocks for worker in workers)
    return 1 - sum(worker.load.free_blocks for worker in workers) / total if total else 0.0


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
