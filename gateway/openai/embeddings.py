"""POST /v1/embeddings: refused, because workers compute no embeddings."""

from starlette.responses import Response

from gateway.errors import InvalidField
from gateway.exchange import Exchange
from gateway.openai.parameters import model_of
from gateway.schema import AnyJson, Body, Name


class EmbeddingsBody(Body):
    model: Name = ""
    input: AnyJson


async def embeddings(exchange: Exchange) -> Response:
    """Raise the error that tells a wrong model name from a model that cannot do it."""
    body = await exchange.parse(EmbeddingsBody)
    model = await exchange.client.model(model_of(body.model) or "", timeout=exchange.settings.request_timeout_s)
    message = (
        f"The model '{model.name}' does not support embeddings: it generates text. "
        "Send 'input' to a service that serves an embedding model."
    )
    raise InvalidField(message, field="model", code="unsupported_model")
