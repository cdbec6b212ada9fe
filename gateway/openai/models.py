"""GET /v1/models, for clients of OpenAI and of Anthropic, and POST /v1/embeddings, which is refused."""

from datetime import UTC, datetime

from starlette.responses import JSONResponse, Response

from gateway.errors import InvalidField
from gateway.exchange import Exchange
from gateway.openai.sdk_arguments import model_of
from gateway.schema import AnyJson, Body, Json, Name
from tandem import Model


async def list_models(exchange: Exchange) -> Response:
    models = await exchange.client.models(timeout=exchange.settings.request_timeout_s)
    data = [_model_json(name, model) for model in models for name in (model.name, *model.adapters)]
    pages = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return JSONResponse({"object": "list", "data": data, "has_more": False, **pages})


async def get_model(exchange: Exchange) -> Response:
    name = exchange.request.path_params["model"]
    if not name:  # /v1/models/
        return await list_models(exchange)
    model = await exchange.client.model(name, timeout=exchange.settings.request_timeout_s)
    return JSONResponse(_model_json(name, model))


def _model_json(name: str, model: Model) -> Json:
    """Render a model, or one of its adapters, whose `parent` is the model. It was created when the router began to
    serve it.
    """
    since = datetime.fromtimestamp(model.serving_since_unix_s, UTC)
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": name,
        "created": model.serving_since_unix_s,
        "created_at": since.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "owned_by": "tandem",
        "root": model.name,
        "parent": None if name == model.name else model.name,
        "max_model_len": model.max_total_tokens,
        "max_input_tokens": model.max_input_tokens,
    }


class EmbeddingsBody(Body):
    model: Name = ""
    input: AnyJson


async def embeddings(exchange: Exchange) -> Response:
    """Raise ModelNotFound for an unknown model, and InvalidField for any other: workers compute no embeddings."""
    body = await exchange.parse(EmbeddingsBody)
    model = await exchange.client.model(model_of(body.model) or "", timeout=exchange.settings.request_timeout_s)
    message = (
        f"The model '{model.name}' does not support embeddings: it generates text. "
        "Send 'input' to a service that serves an embedding model."
    )
    raise InvalidField(message, field="model", code="unsupported_model")
