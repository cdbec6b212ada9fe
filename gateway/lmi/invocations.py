"""POST /invocations and its aliases. The members of the body select the API:

    messages ─▶ OpenAI's chat      prompt ─▶ OpenAI's completions      inputs ─▶ LMI's own, or TGI's with `tgi_compat`
Streams are JSON lines unless `output_formatter` is sse.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from gateway.answers import JSON_LINES, SSE, SSE_DONE, collect, stream_answer
from gateway.exchange import Exchange
from gateway.handler.process import format_response
from gateway.lmi.requests import InvocationBody, invocation_arguments, log_dropped, read_payload
from gateway.lmi.responses import FORMATS, Lines, LmiShape, answers_json
from gateway.lmi.sagemaker import forward, forward_as_event_stream
from gateway.openai.chat import answer_chat
from gateway.openai.completions import answer_completion
from gateway.openai.requests import ChatBody, CompletionBody
from gateway.schema import Body
from gateway.settings import GatewaySettings
from gateway.tgi.endpoints import answer_compat
from gateway.tgi.requests import GenerateBody
from tandem import GenerateArguments, InvalidRequest, TokenizeArguments

B = TypeVar("B", bound=Body)

_DEFAULT_MODEL = "lmi"
_ADAPTER_HEADER = "X-Amzn-SageMaker-Adapter-Identifier"


async def invocations(exchange: Exchange, *, streams_by_default: bool = False) -> Response:
    """Handle a request. `streams_by_default`: a body without `stream` gets JSON lines if its options allow it."""
    request = exchange.request
    handler = exchange.backend.handler
    if handler is not None and handler.has("handle"):
        return await handler.handle(exchange, request.path_params.get("model", ""))
    payload = await exchange.read(read_payload, request.headers.get("content-type", ""))
    if handler is not None and handler.has("input_formatter"):
        formatted = await handler.format("input_formatter", payload)
        if not isinstance(formatted, dict):
            raise InvalidRequest(f"input_formatter returned {type(formatted).__name__}, not a dict")
        payload = formatted
    if adapter := request.headers.get(_ADAPTER_HEADER):
        payload = payload | {"adapters": adapter}
    streaming = _Streaming.of(payload, exchange.settings, by_default=streams_by_default)
    response = await _built_in(exchange, payload, streaming)
    if handler is not None and handler.has("output_formatter"):
        response = await format_response(handler, response)
    return _ending_in_newline(response)


async def sagemaker_invocations(exchange: Exchange) -> Response:
    return await forward(await invocations(exchange))


async def sagemaker_invocations_stream(exchange: Exchange) -> Response:
    """Handle InvokeEndpointWithResponseStream. Its clients expect a stream: a body without `stream` gets JSON lines."""
    return await forward_as_event_stream(await invocations(exchange, streams_by_default=True), exchange)


async def lmi_options(exchange: Exchange) -> Response:
    return JSONResponse({})


@dataclass(frozen=True, slots=True)
class _Streaming:
    """Reasons to stream that are not in the body: `forced` by the output formatter, or `by_default` on the route."""

    forced: bool
    by_default: bool

    @classmethod
    def of(cls, payload: Mapping[str, object], settings: GatewaySettings, *, by_default: bool) -> "_Streaming":
        is_open = payload.get("stream") is None and settings.output_formatter == "auto" and not settings.tgi_compat
        return cls(settings.output_formatter in ("jsonlines", "sse"), by_default and is_open)

    def apply(self, body: B, *, can_stream: bool = True) -> B:
        """Return the body with its final `stream`."""
        if self.forced or (self.by_default and can_stream):
            return body.model_copy(update={"stream": True})
        return body


def _ending_in_newline(response: Response) -> Response:
    """Append a newline: clients that read lines wait for the end of the last one."""
    if not isinstance(response, StreamingResponse) and response.body and not bytes(response.body).endswith(b"\n"):
        response.body = bytes(response.body) + b"\n"
        response.headers["content-length"] = str(len(response.body))
    return response


async def _built_in(exchange: Exchange, payload: dict[str, object], streaming: _Streaming) -> Response:
    model = _model(exchange.request, payload)
    settings = exchange.settings
    openai_framing = SSE_DONE if _wants_events(settings) else JSON_LINES
    if "inputs" not in payload:
        model = _only_adapter(payload) or model
    if "messages" in payload:
        chat = streaming.apply(await exchange.check(ChatBody, payload | {"model": model}))
        return await answer_chat(exchange, chat, openai_framing)
    if "prompt" in payload:
        completion = await exchange.check(CompletionBody, payload | {"model": model})
        completion = streaming.apply(completion, can_stream=completion.can_stream)
        return await answer_completion(exchange, completion, openai_framing)
    if "inputs" not in payload:
        raise InvalidRequest("the body needs inputs, messages or prompt")
    if settings.tgi_compat:
        framing = SSE if _wants_events(settings) else JSON_LINES
        return await answer_compat(exchange, streaming.apply(await _compat_body(exchange, payload)), framing)
    return await _answer(exchange, payload, model, streaming)


def _model(request: Request, payload: dict[str, object]) -> str:
    """Return the model's name from path, query or body; "" for the default model, also if it is LMI's name for it."""
    name = request.path_params.get("model") or request.query_params.get("model_name") or payload.get("model") or ""
    if not isinstance(name, str):
        raise InvalidRequest("model must be a string")
    return "" if name == _DEFAULT_MODEL else name


def _only_adapter(payload: Mapping[str, object]) -> str:
    """The adapter of a request with one prompt; "" for none. Raises InvalidRequest."""
    adapters = payload.get("adapters") or ""
    if isinstance(adapters, list) and len(adapters) == 1:
        adapters = adapters[0]
    if not isinstance(adapters, str):
        raise InvalidRequest("adapters must be the name of one adapter")
    return adapters


def _wants_events(settings: GatewaySettings) -> bool:
    return settings.output_formatter == "sse" or (settings.tgi_compat and settings.output_formatter == "auto")


async def _answer(exchange: Exchange, payload: dict[str, object], model: str, streaming: _Streaming) -> Response:
    request_body = await exchange.check(InvocationBody, payload)
    body = streaming.apply(request_body, can_stream=request_body.can_stream)
    log_dropped(payload, exchange.request_id)
    shape = LmiShape(FORMATS[exchange.settings.lmi_schema], body)
    arguments = await _arguments(exchange, body, model)
    if body.stream:
        # Only clients of LMI 0.26 get a stream that they did not request.
        lines = Lines(shape, closing_line=shape.details and not request_body.stream)
        framing = SSE if _wants_events(exchange.settings) else JSON_LINES
        return await stream_answer(exchange, exchange.feed(arguments), lines, framing)
    num_choices = body.parameters.num_choices
    answers = answers_json(await collect(exchange.feed(arguments, num_choices), num_choices), shape)
    return JSONResponse(answers[0] if isinstance(body.inputs, str) else answers)


async def _arguments(exchange: Exchange, body: InvocationBody, model: str) -> list[GenerateArguments]:
    """Return the SDK arguments of each input. Raises InvalidRequest."""
    parameters, max_inputs = body.parameters, exchange.settings.max_client_batch_size
    if body.stream and not isinstance(body.inputs, str):
        raise InvalidRequest("inputs must be one string when streaming")
    if body.stream and not body.can_stream:
        raise InvalidRequest("decoder_input_details, prompt_logprobs, n and best_of are not supported when streaming")
    if not 1 <= len(body.prompts) <= max_inputs:
        raise InvalidRequest(f"inputs may have 1 to {max_inputs} strings, got {len(body.prompts)}")
    sampling_by_default = exchange.settings.lmi_schema == "async"
    shared = invocation_arguments(body, model=model, sampling_by_default=sampling_by_default)
    arguments_of_inputs = [
        shared | GenerateArguments(prompt=prompt, adapter=adapter)
        for prompt, adapter in zip(body.prompts, body.adapter_names, strict=True)
    ]
    if parameters.max_seq_len is None:
        return arguments_of_inputs
    return [await _within_total(exchange, arguments, parameters.max_seq_len) for arguments in arguments_of_inputs]


async def _within_total(exchange: Exchange, arguments: GenerateArguments, max_seq_len: int) -> GenerateArguments:
    """Limit max_new_tokens so that prompt and new tokens are at most `max_seq_len`. Raises InvalidRequest.

    Without max_new_tokens the answer may fill the rest: FasterTransformer's clients set no other limit.
    """
    tokenize_arguments = TokenizeArguments(
        prompt=arguments.get("prompt"), model=arguments.get("model"), timeout=exchange.settings.request_timeout_s
    )
    num_prompt = min(
        len(await exchange.client.tokenize(**tokenize_arguments)),
        arguments.get("truncate_prompt_tokens") or sys.maxsize,
    )
    if num_prompt >= max_seq_len:
        raise InvalidRequest(f"max_seq_len ({max_seq_len}) must be greater than the prompt's tokens ({num_prompt})")
    num_left = max_seq_len - num_prompt
    requested = arguments.get("max_new_tokens")
    return arguments | GenerateArguments(max_new_tokens=num_left if requested is None else min(num_left, requested))


async def _compat_body(exchange: Exchange, payload: dict[str, object]) -> GenerateBody:
    """Check TGI's body. In LMI's `tgi_compat` mode `details` defaults to true, and `adapters` may name an adapter."""
    parameters, adapter = payload.get("parameters"), _only_adapter(payload)
    if parameters is None or isinstance(parameters, dict):
        defaults = {"details": True} | ({"adapter_id": adapter} if adapter else {})
        payload = payload | {"parameters": defaults | (parameters or {})}
    return await exchange.check(GenerateBody, payload)
