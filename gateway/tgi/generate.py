"""POST /generate, /generate_stream and /."""

from starlette.responses import JSONResponse, Response

import tandem
from gateway.answers import Answer, collect
from gateway.errors import UnsupportedMediaType
from gateway.exchange import Exchange
from gateway.phases import Phases
from gateway.schema import parse
from gateway.streaming import SSE, Framing, Streamer, failed_stream
from gateway.tgi.parameters import generate_arguments
from gateway.tgi.render import Shape, StreamEvents, answer_json
from gateway.tgi.schemas import GenerateBody


async def generate(exchange: Exchange) -> Response:
    """One object."""
    return await _whole(exchange, _parse(exchange), full_text=False)


async def generate_stream(exchange: Exchange) -> Response:
    """Events. What goes wrong after parsing is an event too: clients read nothing else."""
    return await _stream(exchange, _parse(exchange), SSE, full_text=False)


async def generate_compat(exchange: Exchange) -> Response:
    """An array of one object, or events if the body has `stream`. The text begins with the prompt unless refused."""
    return await answer_compat(exchange, _parse(exchange), SSE)


async def answer_compat(exchange: Exchange, body: GenerateBody, framing: Framing) -> Response:
    """Answer as / and SageMaker's TGI containers do."""
    if body.stream:
        return await _stream(exchange, body, framing, full_text=True)
    return await _whole(exchange, body, full_text=True, as_array=True)


async def _stream(exchange: Exchange, body: GenerateBody, framing: Framing, *, full_text: bool) -> Response:
    streamer = Streamer(framing, exchange, raise_early=False, extra=_compute(body))
    try:
        arguments = generate_arguments(body, stream=True)
    except tandem.TandemError as error:
        return failed_stream(streamer, error, StreamEvents(shape_of(body, {}, full_text=full_text)))
    renderer = StreamEvents(shape_of(body, arguments, full_text=full_text))
    return await streamer.respond(exchange.feed([arguments]), renderer)


async def _whole(exchange: Exchange, body: GenerateBody, *, full_text: bool, as_array: bool = False) -> Response:
    arguments = generate_arguments(body, stream=False)
    num_choices = body.parameters.num_choices
    answer = await collect(exchange.feed([arguments], num_choices), num_choices)
    content = answer_json(answer, shape_of(body, arguments, full_text=full_text))
    return JSONResponse([content] if as_array else content, headers=_figures(exchange, body, answer))


def shape_of(body: GenerateBody, arguments: tandem.GenerateArguments, *, full_text: bool) -> Shape:
    """What the answer shows; `full_text` is the route's default."""
    parameters = body.parameters
    wants_full = full_text if parameters.return_full_text is None else parameters.return_full_text
    return Shape(
        details=parameters.wants_details,
        prefill=parameters.decoder_input_details,
        prefix=body.inputs if wants_full else "",
        seed=arguments.get("seed") if parameters.num_choices == 1 else None,  # each of several has one of its own
        top_tokens=bool(parameters.top_n_tokens),
        max_new_tokens=parameters.max_new_tokens,
    )


def _parse(exchange: Exchange) -> GenerateBody:
    content_type = exchange.arrival.request.headers.get("content-type", "")
    if "json" not in content_type:
        raise UnsupportedMediaType("Expected request with `Content-Type: application/json`")
    return parse(GenerateBody, exchange.body)


def _figures(exchange: Exchange, body: GenerateBody, answer: Answer) -> dict[str, str]:
    """TGI's headers of a whole answer: its best choice's. Times are whole milliseconds, the compute time is seconds."""
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
    """Those that streams have as well. What the workers compute on is not the gateway's to know."""
    return {"x-compute-type": "unknown", "x-compute-characters": str(len(body.inputs))}


def _times(choice: tandem.Choice) -> dict[str, str]:
    """None from a router that does not say where the time went."""
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
