"""GET /v1/models and /v1/models/{id}."""

from starlette.responses import JSONResponse, Response

from gateway.exchange import Exchange
from gateway.streaming import Json
from tandem import Model


async def list_models(exchange: Exchange) -> Response:
    """All served models."""
    models = await exchange.client.models(timeout=exchange.settings.request_timeout_s)
    return JSONResponse({"object": "list", "data": [_model(each) for each in models]})


async def get_model(exchange: Exchange) -> Response:
    """One model."""
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
