"""Routes of OpenAI's API, with and without the /v1 prefix, and the handlers of /models."""

from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway.errors import OpenAIDialect
from gateway.exchange import Endpoint, Exchange
from gateway.openai.chat import chat_completions
from gateway.openai.completions import completions
from gateway.schema import Json
from tandem import Model


async def list_models(exchange: Exchange) -> Response:
    models = await exchange.client.models(timeout=exchange.settings.request_timeout_s)
    return JSONResponse({"object": "list", "data": [_model(model) for model in models]})


async def get_model(exchange: Exchange) -> Response:
    name = exchange.arrival.request.path_params["model"]
    return JSONResponse(_model(await exchange.client.model(name, timeout=exchange.settings.request_timeout_s)))


def _model(model: Model) -> Json:
    return {
        "id": model.name,
        "object": "model",
        "created": 0,
        "owned_by": "tandem",
        "max_model_len": model.max_total_tokens,
    }


_DIALECT = OpenAIDialect()
_CHAT = Endpoint(_DIALECT, chat_completions, generates=True)
_COMPLETIONS = Endpoint(_DIALECT, completions, generates=True)
_MODELS = Endpoint(_DIALECT, list_models)
_MODEL = Endpoint(_DIALECT, get_model)


def routes() -> list[Route]:
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
