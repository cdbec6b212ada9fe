"""POST /invocations and its other names. The body's members decide what it is:

    messages ─▶ OpenAI's chat      prompt ─▶ OpenAI's completions      inputs ─▶ LMI's own, or TGI's with `tgi_compat`
Streams are JSON lines unless server-sent events are configured.
"""

from typing import Any

import structlog
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.answers import collect
from gateway.exchange import Exchange
from gateway.handler.process import format_response
from gateway.lmi.formats import FORMATS
from gateway.lmi.parameters import invocation_arguments
from gateway.lmi.render import Lines, Shape, answers_json
from gateway.lmi.schemas import InvocationBody, read_payload, unknown_parameters
from gateway.openai.chat import answer_chat
from gateway.openai.completions import answer_completion
from gateway.openai.schemas import ChatBody, CompletionBody
from gateway.schema import check
from gateway.settings import GatewaySettings
from gateway.streaming import JSON_LINES, SSE, SSE_DONE, Framing, Streamer
from gateway.tgi.generate import answer_compat
from gateway.tgi.schemas import GenerateBody
from tandem import GenerateArguments, InvalidRequest

log = structlog.get_logger(__name__)

_ONLY_ONE = "lmi"
_ADAPTER_HEADER = "X-Amzn-SageMaker-Adapter-Identifier"


async def invocations(exchange: Exchange) -> Response:
    """The handler."""
    request = exchange.arrival.request
    if request.headers.get(_ADAPTER_HEADER):
        raise InvalidRequest(f"{_ADAPTER_HEADER} is not supported: there are no adapters")
    handler = exchange.arrival.backend.handler
    if handler is not None and handler.has("handle"):
        return await handler.handle(exchange, request.path_params.get("model", ""))
    payload = read_payload(exchange.body, request.headers.get("content-type", ""))
    if handler is not None and handler.has("input_formatter"):
        payload = await handler.format("input_formatter", payload)
        if not isinstance(payload, dict):
            raise InvalidRequest(f"input_formatter returned {type(payload).__name__}, not a dict")
    response = await _built_in(exchange, payload)
    if handler is not None and handler.has("output_formatter"):
        return await format_response(handler, response)
    return response


async def _built_in(exchange: Exchange, payload: dict[str, Any]) -> Response:
    model = _model(exchange.arrival.request, payload)
    settings = exchange.settings
    payload["stream"] = payload.get("stream") or settings.output_formatter in ("jsonlines", "sse")
    openai_framing = SSE_DONE if _wants_events(settings) else JSON_LINES
    if "messages" in payload:
        return await answer_chat(exchange, check(ChatBody, payload | {"model": model}), openai_framing)
    if "prompt" in payload:
        return await answer_completion(exchange, check(CompletionBody, payload | {"model": model}), openai_framing)
    if "inputs" not in payload:
        raise InvalidRequest("the body needs inputs, messages or prompt")
    framing = SSE if _wants_events(settings) else JSON_LINES
    if settings.tgi_compat:
        return await answer_compat(exchange, _compat_body(payload), framing)
    return await _answer(exchange, payload, model, framing)


def _model(request: Request, payload: dict[str, Any]) -> str:
    """Where LMI's clients name a model: path, query or body. LMI's own name for the only one means none."""
    named = request.path_params.get("model") or request.query_params.get("model_name") or payload.get("model") or ""
    if not isinstance(named, str):
        raise InvalidRequest("model must be a text")
    return "" if named == _ONLY_ONE else named


def _wants_events(settings: GatewaySettings) -> bool:
    """True if streams are server-sent events."""
    return settings.output_formatter == "sse" or (settings.tgi_compat and settings.output_formatter == "auto")


async def _answer(exchange: Exchange, payload: dict[str, Any], model: str, framing: Framing) -> Response:
    body = check(InvocationBody, payload)
    dropped = unknown_parameters(payload)
    if dropped:
        log.warning("parameters nobody knows are dropped", request_id=exchange.request_id, names=dropped[:16])
    shape = Shape(FORMATS[exchange.settings.lmi_schema], body)
    arguments = _arguments(exchange, body, model)
    if body.stream:
        return await Streamer(framing, exchange).respond(exchange.feed(arguments), Lines(shape))
    num_choices = body.parameters.num_choices
    answers = answers_json(await collect(exchange.feed(arguments, num_choices), num_choices), shape)
    return JSONResponse(answers[0] if isinstance(body.inputs, str) else answers)


def _arguments(exchange: Exchange, body: InvocationBody, model: str) -> list[GenerateArguments]:
    """One for each input."""
    parameters, most = body.parameters, exchange.settings.max_client_batch_size
    if body.stream and not isinstance(body.inputs, str):
        raise InvalidRequest("inputs must be one text when streaming")
    if body.stream and (parameters.wants_prefill or parameters.num_choices != 1):
        raise InvalidRequest("decoder_input_details, prompt_logprobs, n and best_of are not supported when streaming")
    if not 1 <= len(body.prompts) <= most:
        raise InvalidRequest(f"inputs may have 1 to {most} texts, got {len(body.prompts)}")
    samples = exchange.settings.lmi_schema == "async"
    shared = invocation_arguments(body, model=model, samples_by_default=samples)
    return [shared | GenerateArguments(prompt=prompt) for prompt in body.prompts]


def _compat_body(payload: dict[str, Any]) -> GenerateBody:
    """TGI's body; with LMI's `tgi_compat` details are there unless refused."""
    parameters = payload.get("parameters")
    if parameters is None or isinstance(parameters, dict):
        payload = payload | {"parameters": {"details": True} | (parameters or {})}
    return check(GenerateBody, payload)
