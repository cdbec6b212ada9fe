"""POST /generate, /generate_stream and /."""

from starlette.responses import JSONResponse, Response

import tandem
from gateway.answers import SSE, Answer, Framing, Streamer, collect, failed_stream
from gateway.errors import UnsupportedMediaType
from gateway.exchange import Exchange
from gateway.metrics import Phases
from gateway.tgi.parameters import generate_arguments
from gateway.tgi.render import StreamEvents, TgiShape, answer_json
from gateway.tgi.schemas import GenerateBody


async def generate(exchange: Exchange) -> Response:
    """Handle POST /generate: one object."""
    return await _complete(exchange, await _parse(exchange), full_text=False)


async def generate_stream(exchange: Exchange) -> Response:
    """Handle POST /generate_stream. After parsing, errors are events too: clients read nothing else."""
    return await _stream(exchange, await _parse(exchange), SSE, full_text=False)


async def generate_compat(exchange: Exchange) -> Response:
    """Handle POST /: an array of one object, or events if the body has `stream`."""
    return await answer_compat(exchange, await _parse(exchange), SSE)


async def answer_compat(exchange: Exchange, body: GenerateBody, framing: Framing) -> Response:
    """Answer like / and SageMaker's TGI containers: by default the generated text begins with the prompt.

    An encoder-decoder model does not continue its prompt, so its text never begins with it by default.
    """
    model = exchange.model()
    full_text = model is None or not model.is_encoder_decoder
    if body.stream:
        return await _stream(exchange, body, framing, full_text=full_text)
    return await _complete(exchange, body, full_text=full_text, as_array=True)


async def _stream(exchange: Exchange, body: GenerateBody, framing: Framing, *, full_text: bool) -> Response:
    streamer = Streamer(framing, exchange, raise_early=False, extra=_compute(body))
    try:
        arguments = generate_arguments(body, stream=True)
    except tandem.TandemError as error:
        return failed_stream(streamer, error, StreamEvents(build_shape(body, {}, full_text=full_text)))
    renderer = StreamEvents(build_shape(body, arguments, full_text=full_text))
    return await streamer.respond(exchange.feed([arguments]), renderer)


async def _complete(exchange: Exchange, body: GenerateBody, *, full_text: bool, as_array: bool = False) -> Response:
    arguments = generate_arguments(body, stream=False)
    num_choices = body.parameters.num_choices
    answer = await collect(exchange.feed([arguments], num_choices), num_choices)
    content = answer_json(answer, build_shape(body, arguments, full_text=full_text))
    return JSONResponse([content] if as_array else content, headers=_headers(exchange, body, answer))


def build_shape(body: GenerateBody, arguments: tandem.GenerateArguments, *, full_text: bool) -> TgiShape:
    """Return how to render the answer. `full_text` is the route's default of `return_full_text`."""
    parameters = body.parameters
    returns_full_text = full_text if parameters.return_full_text is None else parameters.return_full_text
    return TgiShape(
        details=parameters.wants_details,
        prefill=parameters.decoder_input_details,
        prefix=body.inputs if returns_full_text else "",
        seed=arguments.get("seed") if parameters.num_choices == 1 else None,  # each of several choices has its own seed
        top_tokens=bool(parameters.top_n_tokens),
        max_new_tokens=parameters.max_new_tokens,
    )


async def _parse(exchange: Exchange) -> GenerateBody:
    content_type = exchange.arrival.request.headers.get("content-type", "")
    if "json" not in content_type:
        raise UnsupportedMediaType("Expected request with `Content-Type: application/json`")
    return await exchange.parse(GenerateBody)


def _headers(exchange: Exchange, body: GenerateBody, answer: Answer) -> dict[str, str]:
    """TGI's headers of a complete answer, for its best choice. Times are whole ms, but x-compute-time is in seconds."""
    best = answer.choices[0]
    total_s = exchange.arrival.progress.duration_s()
    return {
        **_compute(body),
        "x-compute-time": str(total_s),
        "x-total-time": str(int(total_s * 1000)),
        "x-prompt-tokens": str(best.usage.prompt_tokens),
        "x-generated-tokens": str(best.usage.completion_tokens),
        **_times(best),
    }


def _compute(body: GenerateBody) -> dict[str, str]:
    """Headers that streams have, too. The gateway does not know the workers' devices."""
    return {"x-compute-type": "unknown", "x-compute-characters": str(len(body.inputs))}


def _times(choice: tandem.Choice) -> dict[str, str]:
    """Headers with the time of each phase; none if the router reports no timing."""
    if choice.timing is None:
        return {}
    phases = Phases.of(choice.timing)
    times_ms = {
        "x-validation-time": phases.validation_ms,
        "x-queue-time": phases.queue_ms,
        "x-inference-time": phases.inference_ms,
        "x-time-per-token": phases.inference_ms / max(1, choice.usage.completion_tokens),
    }
    return {name: str(int(ms)) for name, ms in times_ms.items()}
