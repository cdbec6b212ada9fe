"""The application: routes of all dialects on one port."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway import lmi, openai, probes, tgi, web
from gateway.backend import Backend

_NAMES = {404: "ResourceNotFoundException", 405: "MethodNotAllowedException"}


def build_app(backend: Backend) -> Starlette:
    """The ASGI application."""
    app = Starlette(
        routes=[*openai.routes(), *lmi.routes(), *tgi.routes(), *probes.routes(), *web.routes()],
        middleware=_middleware(backend),
        exception_handlers={HTTPException: _no_such_route},
    )
    app.state.backend = backend
    return app


def _middleware(backend: Backend) -> list[Middleware]:
    if not backend.allowed_origins:
        return []
    return [
        Middleware(
            CORSMiddleware, allow_origins=sorted(backend.allowed_origins), allow_methods=["*"], allow_headers=["*"]
        )
    ]


async def _no_such_route(request: Request, error: Exception) -> Response:
    """In OpenAI's words under /v1, else in LMI's."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:128]} is not served here"
    if request.url.path.startswith("/v1/"):
        error_of_v1 = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        return JSONResponse({"error": error_of_v1}, error.status_code, error.headers)
    kind = _NAMES.get(error.status_code, "HttpException")
    content = {"code": error.status_code, "type": kind, "message": message}
    return JSONResponse(content, error.status_code, error.headers)
