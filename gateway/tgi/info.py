"""GET /info."""

from starlette.responses import JSONResponse, Response

import tandem
from gateway.exchange import Exchange
from gateway.tgi.schemas import MAX_BEST_OF


async def info(exchange: Exchange) -> Response:
    """What TGI of any version tells about its model, as far as it means something here."""
    settings = exchange.settings
    model = await exchange.client.model(timeout=settings.request_timeout_s)
    return JSONResponse(
        {
            "model_id": model.name,
            "model_sha": None,
            "model_pipeline_tag": "text-generation",
            "model_dtype": None,
            "model_device_type": None,
            "max_concurrent_requests": settings.max_open_requests,
            "max_best_of": MAX_BEST_OF,
            "max_stop_sequences": 4,
            "max_input_tokens": model.max_input_tokens,
            "max_input_length": model.max_input_tokens,
            "max_total_tokens": model.max_total_tokens,
            "max_client_batch_size": settings.max_client_batch_size,
            "validation_workers": 1,
            "waiting_served_ratio": None,
            "max_batch_total_tokens": None,
            "max_waiting_tokens": None,
            "router": "tandem",
            "version": tandem.__version__,
            "sha": None,
            "docker_label": None,
        }
    )
