"""Where OpenAI's API lies: under /v1, and for some clients without it."""

from starlette.routing import Route

from gateway.exchange import Endpoint
from gateway.openai.chat import chat_completions
from gateway.openai.completions import completions
from gateway.openai.errors import OpenAIDialect
from gateway.openai.models import get_model, list_models

_DIALECT = OpenAIDialect()
_CHAT = Endpoint(_DIALECT, chat_completions, generates=True)
_COMPLETIONS = Endpoint(_DIALECT, completions, generates=True)
_MODELS = Endpoint(_DIALECT, list_models)
_MODEL = Endpoint(_DIALECT, get_model)


def routes() -> list[Route]:
    """All of them."""
    return [
        route
        for prefix in ("/v1", "")
        for route in (
            Route(f"{prefix}/chat/completions", _CHAT, methods=["POST"]),
            Route(f"{prefix}/completions", _COMPLETIONS, methods=["POST"]),
            Route(f"{prefix}/models", _MODELS, methods=["GET"]),
            Route(f"{prefix}/models/{{model:path}}", _MODEL, methods=["GET"]),
        )
    ]
