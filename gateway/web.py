"""The web pages: chat at /, the mesh at /mesh. The pages are static and need no key; the routes that they call do.

Their content security policy lets them load from and call this gateway only, and forbids inline scripts. Trusted types
are required and none are defined, so text from a model cannot become markup even by mistake.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from gateway.errors import OpenAIDialect
from gateway.exchange import Endpoint
from gateway.mesh_state import mesh_state
from gateway.probes import health

PAGES = Path(__file__).parent / "pages"

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


async def mesh(request: Request) -> Response:
    return _page("mesh.html")


def _page(name: str) -> Response:
    return FileResponse(PAGES / name, headers=dict(HEADERS))


class _Files(StaticFiles):
    """Scripts and styles, with the pages' security headers."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        return response


def routes() -> list[BaseRoute]:
    return [
        Route("/", root, methods=["GET"]),
        Route("/mesh", mesh, methods=["GET"]),
        Route("/mesh/state", Endpoint(OpenAIDialect(), mesh_state, is_polled=True), methods=["GET"]),
        Mount("/pages", _Files(directory=PAGES)),
    ]
