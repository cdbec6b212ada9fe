"""The public API over gRPC: translates between messages and domain types."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any

import grpc

from mesh import wire
from mesh.domain.errors import InvalidRequest
from mesh.durations import duration_from_proto
from mesh.rpc.credentials import Metadata
from mesh.rpc.server import end_blocked_call
from mesh.tracing import HEADERS
from mesh.wire import require_at_most
from router.answer_stream import Delta, PromptInfo
from router.choice import TokenEvent, TopToken, Usage
from router.served_model import ModelStatus
from router.service_directory import ServiceDirectory
from router.tenants import CallerDirectory, Priority, Tenant
from router.text.chat import ChatMessage, ChatPrompt, Prompt, Rendering, TextPrompt, TokenPrompt
from router.timeline import AttemptTiming, Timing
from router.validation import MAX_CHAT_MESSAGES, GenerateParams
from tandem.v1 import generation_pb2, generation_pb2_grpc

_PRIORITIES: Mapping[int, Priority] = MappingProxyType(
    {
        generation_pb2.PRIORITY_BATCH: Priority.BATCH,
        generation_pb2.PRIORITY_STANDARD: Priority.STANDARD,
        generation_pb2.PRIORITY_INTERACTIVE: Priority.INTERACTIVE,
    }
)

# Tokens to convert before other tasks get a turn: a few milliseconds of work.
_MAX_CONVERTED = 1024


class GenerationServicer(generation_pb2_grpc.GenerationServicer):
    """The clients' API of all models."""

    def __init__(self, models: ServiceDirectory, callers: CallerDirectory) -> None:
        self._models = models
        self._callers = callers

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        metadata = context.invocation_metadata()
        tenant = self._callers.tenant_of(metadata)
        with self._models.counting_refusals():
            params = replace(_params_from_proto(request, tenant), trace_headers=_trace_headers(metadata))
            answer = await self._models.generate(params, context.time_remaining())
        # If the client leaves while a message is being written, this generator never resumes; the callback still runs.
        context.add_done_callback(lambda _: answer.stream.close())
        handler = asyncio.current_task()
        if handler is not None:
            answer.stream.on_stuck = lambda error: end_blocked_call(context, handler, error)
        async for delta in answer.deltas():
            yield _delta_to_proto(delta)

    async def Tokenize(
        self, request: generation_pb2.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> generation_pb2.TokenizeResponse:
        tenant = self._callers.tenant_of(context.invocation_metadata())
        text, tokens = await self._models.find(request.model).tokenize(
            _prompt_from_proto(request),
            tenant,
            skip_special_tokens=request.skip_special_tokens if request.HasField("skip_special_tokens") else True,
        )
        response = generation_pb2.TokenizeResponse(text=text)
        tokens.reverse()
        while tokens:  # convert and free one part, then let other tasks run
            part = tokens[: -_MAX_CONVERTED - 1 : -1]
            del tokens[-_MAX_CONVERTED:]
            response.tokens.extend(
                generation_pb2.Token(id=token.id, text=token.text, special=token.special) for token in part
            )
            await asyncio.sleep(0)
        return response

    async def GetTokenizer(
        self, request: generation_pb2.GetTokenizerRequest, context: grpc.aio.ServicerContext
    ) -> generation_pb2.GetTokenizerResponse:
        config = self._models.find(request.model).model.tokenizer_config
        return generation_pb2.GetTokenizerResponse(config_json=json.dumps(config))

    async def GetModel(
        self, request: generation_pb2.GetModelRequest, context: grpc.aio.ServicerContext
    ) -> generation_pb2.GetModelResponse:
        return generation_pb2.GetModelResponse(model=_model_to_proto(self._models.status(request.model)))

    async def ListModels(
        self, request: generation_pb2.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> generation_pb2.ListModelsResponse:
        return generation_pb2.ListModelsResponse(models=map(_model_to_proto, self._models.all_statuses()))


def _trace_headers(metadata: Metadata | None) -> dict[str, str]:
    return {key: value for key, value in metadata or () if key in HEADERS and isinstance(value, str)}


def _params_from_proto(request: generation_pb2.GenerateRequest, tenant: Tenant) -> GenerateParams:
    output = request.output
    return GenerateParams(
        prompt=_prompt_from_proto(request),
        sampling=wire.sampling_from_proto(request.sampling),
        model=request.model,
        num_choices=request.num_choices if request.HasField("num_choices") else 1,
        best_of=request.best_of if request.HasField("best_of") else None,
        top_logprobs=output.top_logprobs,
        prompt_logprobs=output.prompt_logprobs,
        echo=output.echo,
        include_stop=output.include_stop,
        skip_special_tokens=output.skip_special_tokens if output.HasField("skip_special_tokens") else True,
        spaces_between_special_tokens=(
            output.spaces_between_special_tokens if output.HasField("spaces_between_special_tokens") else True
        ),
        include_eos=output.include_eos if output.HasField("include_eos") else None,
        own_bytes=output.own_bytes,
        client_request_id=request.client_request_id,
        tenant=tenant,
        priority=_priority_from_proto(request.priority),
        ttft_target_s=duration_from_proto(request.ttft_target) if request.HasField("ttft_target") else None,
        adapter=request.adapter,
        cache_hints=wire.hints_from_proto(request.cache_hints),
    )


def _priority_from_proto(number: int) -> Priority | None:
    """Raises InvalidRequest for numbers that generation.proto does not define."""
    if number == generation_pb2.PRIORITY_UNSPECIFIED:
        return None
    if number not in _PRIORITIES:
        raise InvalidRequest(f"priority: there is none with the number {number}")
    return _PRIORITIES[number]


def _prompt_from_proto(request: generation_pb2.GenerateRequest | generation_pb2.TokenizeRequest) -> Prompt | None:
    kind = request.WhichOneof("input")
    if kind == "prompt":
        adds_special_tokens = request.add_special_tokens if request.HasField("add_special_tokens") else True
        return TextPrompt(request.prompt, adds_special_tokens)
    if kind == "chat":
        return _chat_from_proto(request.chat)
    if kind == "token_ids":
        return TokenPrompt(request.token_ids.ids)
    return None


def _chat_from_proto(chat: generation_pb2.Chat) -> ChatPrompt:
    require_at_most("chat.messages", chat.messages, MAX_CHAT_MESSAGES)
    turns = (ChatMessage(turn.role, turn.content, turn.extra_json) for turn in chat.messages)
    continues = chat.continue_final_message
    adds = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else not continues
    return ChatPrompt(tuple(turns), chat.tools_json, Rendering(chat.template_kwargs_json, adds, continues))


def _delta_to_proto(delta: Delta) -> generation_pb2.GenerateResponse:
    """Convert in place and set rare fields only if present: this runs for every token (see wire.write_output)."""
    events = delta.events
    message = generation_pb2.GenerateResponse()
    if delta.echo:
        message.echo = delta.echo
    if delta.prompt is not None:
        _write_prompt(delta.prompt, message.prompt)
    if events is None:
        return message
    message.index = events.index
    _write_tokens(events.tokens, message.tokens)
    if events.finish_reason is not None:
        message.finish_reason = wire.finish_to_proto(events.finish_reason)
    if events.usage is not None:
        message.usage.CopyFrom(_usage_to_proto(events.usage))
    if events.timing is not None:
        message.timing.CopyFrom(timing_to_proto(events.timing))
    return message


def _write_prompt(prompt: PromptInfo, message: generation_pb2.PromptInfo) -> None:
    message.request_id = prompt.request_id
    message.num_tokens = prompt.num_tokens
    message.in_reasoning = prompt.in_reasoning
    message.model = prompt.revision
    _write_tokens(prompt.tokens, message.tokens)


def _write_tokens(tokens: Iterable[TokenEvent], messages: Any) -> None:
    for token in tokens:
        message = messages.add()
        message.id = token.id
        message.text = token.text
        if token.logprob is not None:
            message.logprob = token.logprob
        if token.special:
            message.special = True
        if token.own_bytes is not None:
            message.own_bytes = token.own_bytes
        if token.top:
            message.top.extend(_top_to_proto(token.top))


def _top_to_proto(top: Iterable[TopToken]) -> list[generation_pb2.TopToken]:
    return [
        generation_pb2.TopToken(id=entry.id, text=entry.text, logprob=entry.logprob, own_bytes=entry.own_bytes)
        for entry in top
    ]


def _usage_to_proto(usage: Usage) -> generation_pb2.Usage:
    return generation_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )


def _model_to_proto(status: ModelStatus) -> generation_pb2.Model:
    model = status.model
    return generation_pb2.Model(
        name=model.name,
        max_input_tokens=status.limits.max_input_tokens,
        max_total_tokens=status.limits.max_total_tokens,
        vocab_size=model.facts.vocab_size,
        eos_token_ids=sorted(model.facts.eos_token_ids),
        has_chat_template=model.chat_template is not None,
        tool_call_format=model.chat_template.tool_call_format if model.chat_template is not None else "",
        has_reasoning=model.chat_template is not None and model.chat_template.has_reasoning,
        ready=status.ready,
        is_encoder_decoder=bool(model.decoder_prompt),
        max_concurrent_requests=status.max_concurrent_requests,
        serving_since_unix_s=status.since_unix_s,
        adapters=status.adapters,
        sampling_defaults=generation_pb2.SamplingDefaults(**model.sampling_defaults),
        stop_strings=model.stop_strings,
    )


def timing_to_proto(timing: Timing) -> generation_pb2.Timing:
    """Convert a timing, for clients and for operators."""
    return generation_pb2.Timing(
        total_ms=_ms(timing.total_s),
        prepare_ms=_ms(timing.prepare_s),
        first_token_ms=_ms(timing.first_token_s),
        attempts=map(_attempt_to_proto, timing.attempts),
    )


def _attempt_to_proto(attempt: AttemptTiming) -> generation_pb2.AttemptTiming:
    phases = {phase.name.removesuffix("_s"): getattr(attempt.phases, phase.name) for phase in fields(attempt.phases)}
    return generation_pb2.AttemptTiming(
        kv_transfer_ms=None if attempt.kv_transfer_s is None else _ms(attempt.kv_transfer_s),
        **{f"{name}_ms": _ms(seconds) for name, seconds in phases.items()},
    )


def _ms(seconds: float) -> float:
    """Convert seconds to milliseconds, rounded to microseconds."""
    return round(seconds * 1000, 3)
