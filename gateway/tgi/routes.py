"""Where TGI's API lies."""

from starlette.routing import Route

from gateway.exchange import Endpoint
from gateway.tgi.errors import TgiDialect
from gateway.tgi.generate import generate, generate_compat, generate_stream
from gateway.tgi.info import info
from gateway.tgi.tokenize import chat_tokenize, tokenize

_DIALECT = TgiDialect()


def routes() -> list[Route]:
    """All of them; those that need no key are in probes.py."""
    return [
        Route("/", Endpoint(_DIALECT, generate_compat, generates=True), methods=["POST"]),
        Route("/generate", Endpoint(_DIALECT, generate, generates=True), methods=["POST"]),
        Route("/generate_stream", Endpoint(_DIALECT, generate_stream, generates=True), methods=["POST"]),
        Route("/tokenize", Endpoint(_DIALECT, tokenize), methods=["POST"]),
        Route("/chat_tokenize", Endpoint(_DIALECT, chat_tokenize), methods=["POST"]),
        Route("/info", Endpoint(_DIALECT, info), methods=["GET"]),
    ]
