"""Routes of TGI's API, and the handlers of /tokenize, /chat_tokenize and /info."""

from collections.abc import Sequence

from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import tandem
from gateway.errors import TgiDialect
from gateway.exchange import Endpoint, Exchange
from gateway.openai.parameters import model_of, rendering_of
from gateway.openai.schemas import ChatBody
from gateway.streaming import Json
from gateway.tgi.generate import generate, generate_compat, generate_stream
from gateway.tgi.schemas import TokenizeBody
from mesh.domain.request import MAX_CHOICES, MAX_STOP_STRINGS


async def tokenize(exchange: Exchange) -> Response:
    """Handle POST /tokenize."""
    body = await exchange.parse(TokenizeBody)
    timeout_s = exchange.settings.request_timeout_s
    return JSONResponse(_tokens_json(await exchange.client.tokenize(prompt=body.inputs, timeout=timeout_s)))


async def chat_tokenize(exchange: Exchange) -> Response:
    """Handle POST /chat_tokenize: the tokens of a conversation, and the rendered prompt."""
    body = await exchange.parse(ChatBody)
    defaults = tandem.TokenizeArguments(model=model_of(body.model), timeout=exchange.settings.request_timeout_s)
    arguments = rendering_of(body) | defaults
    tokens = await exchange.client.tokenize(**arguments)
    text = await exchange.client.render(**arguments)
    return JSONResponse({"tokenize_response": _tokens_json(tokens), "templated_text": text})


def _tokens_json(tokens: Sequence[tandem.Token]) -> list[Json]:
    """Render tokens. `start` and `stop` are offsets in the joined token texts; special tokens have no text."""
    rendered: list[Json] = []
    start = 0
    for token in tokens:
        stop = start + len(token.text)
        rendered.append({"id": token.id, "text": token.text, "start": start, "stop": stop})
        start = stop
    return rendered


async def info(exchange: Exchange) -> Response:
    """Handle GET /info: the members of all TGI versions, null where they do not apply here."""
    settings = exchange.settings
    model = await exchange.client.model(timeout=settings.request_timeout_s)
    return JSONResponse(
        {
            "model_id": model.name,
            "model_sha": None,
            "model_pipeline_tag": "text2text-generation" if model.is_encoder_decoder else "text-generation",
            "model_dtype": None,
            "model_device_type": None,
            "max_concurrent_requests": model.max_concurrent_requests or settings.max_open_requests,
            "max_best_of": MAX_CHOICES,
            "max_stop_sequences": MAX_STOP_STRINGS,
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


_DIALECT = TgiDialect()


def routes() -> list[Route]:
    """TGI's routes with a key. /health is in probes.py, GET / in web.py."""
    return [
        Route("/", Endpoint(_DIALECT, generate_compat, generates=True), methods=["POST"]),
        Route("/generate", Endpoint(_DIALECT, generate, generates=True), methods=["POST"]),
        Route("/generate_stream", Endpoint(_DIALECT, generate_stream, generates=True), methods=["POST"]),
        Route("/tokenize", Endpoint(_DIALECT, tokenize), methods=["POST"]),
        Route("/chat_tokenize", Endpoint(_DIALECT, chat_tokenize), methods=["POST"]),
        Route("/info", Endpoint(_DIALECT, info), methods=["GET"]),
    ]
