"""What clients can ask of the router, over domain types; the gRPC side is in servicer.py.

Life of a Generate call:

    shape checked ─▶ permits (or Overloaded, at once) ─▶ template, tokens, limits ─▶ one Dispatcher.run per choice
        ─▶ chunks, merged: the first carries PromptInfo, a choice's last its finish reason and usage
        ─▶ ended, failed or abandoned: attempts aborted, bookings and permits given back

A request holds one permit for each of its choices, because each runs as a sequence of its own.
"""

import asyncio
from dataclasses import dataclass

import structlog

from mesh.domain.errors import ModelNotFound, NoWorkers
from mesh.domain.request import mint_id
from router.admission import Admission, Permit
from router.answer import Answer, AnswerParts
from router.choice import Choice
from router.dispatch import Dispatcher
from router.generation import GenerationStream, Work
from router.limits import LimitPolicy, Limits
from router.mesh_view import MeshView
from router.prompts import EncodedPrompt, Prompt, PromptEncoder
from router.served_model import ServedModel
from router.text.tokenizer import TextToken
from router.timeline import Timeline
from router.validation import (
    GenerateInput,
    ValidRequest,
    check_prompt_ids,
    check_shape,
    complete_sampling,
    require_prompt,
)

log = structlog.get_logger(__name__)

_MAX_LOGGED_CHARS = 128
_STOPPING = "this router is stopping; try again"


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A served model and the limits that hold now. `ready` if a complete path serves it."""

    model: ServedModel
    limits: Limits
    ready: bool


@dataclass(frozen=True, slots=True)
class ServiceParts:
    """What the service is made of."""

    model: ServedModel
    encoder: PromptEncoder
    limits: LimitPolicy
    permits: Admission
    mesh: MeshView
    dispatcher: Dispatcher
    slow_reader_s: float


class GenerationService:
    """One for all clients of a router."""

    def __init__(self, parts: ServiceParts) -> None:
        self._parts = parts
        self._streams: set[GenerationStream] = set()
        self._stopping = False

    async def generate(self, asked: GenerateInput, time_left_s: float | None) -> Answer:
        """Start generating. Raises what keeps the request from starting; later errors come out of the answer."""
        loop = asyncio.get_running_loop()
        span = _Span(Timeline(loop.time), None if time_left_s is None else loop.time() + time_left_s)
        if self._stopping:
            raise NoWorkers(_STOPPING)
        self._require_model(asked.model)
        check_shape(asked, max_choices=self._parts.permits.max_permits)
        asked.sampling.validate(self._parts.model.facts.vocab_size)
        permits = await self._parts.permits.admit(asked.num_choices, asked.tenant)
        try:
            prompt = await self._parts.encoder.encode(require_prompt(asked.prompt))
            valid = self._validate(asked, prompt)
            echo = await self._echo(prompt) if asked.echo else ""
        except BaseException:
            for permit in permits:
                permit.release()
            raise
        return self._start(valid, permits, span, echo)

    async def tokenize(self, prompt: Prompt | None, model: str) -> list[TextToken]:
        """Token ids that `generate` would use, with their texts."""
        self._require_model(model)
        encoded = await self._parts.encoder.encode(require_prompt(prompt))
        return await self._parts.encoder.pieces(encoded.ids)

    def describe(self, model: str = "") -> ModelInfo:
        """One served model. Raises ModelNotFound."""
        self._require_model(model)
        return ModelInfo(self._parts.model, self._limits(), self._parts.mesh.has_path)

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests, let running ones end within the grace, then end the rest with a clear error."""
        self._stopping = True
        endings = [stream.ended for stream in self._streams]
        if endings:
            await asyncio.wait(endings, timeout=grace_s)
        for stream in list(self._streams):
            stream.fail(NoWorkers(_STOPPING))

    def _require_model(self, name: str) -> None:
        served = self._parts.model.name
        if name not in ("", served):
            raise ModelNotFound(f"model {name[:_MAX_LOGGED_CHARS]!r} is not served here; served: {served}")

    def _limits(self) -> Limits:
        return self._parts.limits.resolve(self._parts.mesh.decode_workers())

    def _validate(self, asked: GenerateInput, prompt: EncodedPrompt) -> ValidRequest:
        limits, vocab_size = self._limits(), self._parts.model.facts.vocab_size
        check_prompt_ids(prompt.ids, vocab_size=vocab_size, limits=limits)
        sampling = complete_sampling(
            asked.sampling, num_prompt_tokens=len(prompt.ids), vocab_size=vocab_size, limits=limits
        )
        return ValidRequest(mint_id(), tuple(prompt.ids), sampling, asked)

    async def _echo(self, prompt: EncodedPrompt) -> str:
        return await self._parts.encoder.decode(prompt.ids) if prompt.text is None else prompt.text

    def _start(self, valid: ValidRequest, permits: list[Permit], span: "_Span", echo: str) -> Answer:
        """One task for each choice."""
        choices = [Choice(index, valid, self._parts.model.tokenizer) for index in range(valid.asked.num_choices)]
        works = [
            Work(choice, permit, lambda choice: self._run(choice, valid, span))
            for choice, permit in zip(choices, permits, strict=True)
        ]
        stream = GenerationStream(works, slow_reader_s=self._parts.slow_reader_s)
        self._streams.add(stream)
        stream.ended.add_done_callback(lambda _: self._streams.discard(stream))
        return Answer(AnswerParts(valid, choices[0], self._parts.encoder, echo), stream)

    async def _run(self, choice: Choice, valid: ValidRequest, span: "_Span") -> None:
        """Run one choice, and write its line of the access log."""
        timeline = span.timeline if choice.index == 0 else span.timeline.copy()
        error: str | None = None
        try:
            await self._parts.dispatcher.run(choice, timeline, span.deadline_s)
        except BaseException as failure:
            if choice.finish_reason is None:
                error = type(failure).__name__
            raise
        finally:
            timeline.mark("finished")
            log.info(
                "finished",
                request_id=choice.request_id,
                tenant=valid.asked.tenant.name,
                client_request_id=valid.asked.client_request_id[:_MAX_LOGGED_CHARS],
                prompt_tokens=choice.num_prompt_tokens,
                completion_tokens=len(choice.token_ids),
                cached_tokens=choice.cached_tokens or 0,
                finish_reason=choice.finish_reason.value if choice.finish_reason is not None else None,
                error=error,
                **timeline.as_fields(),
            )


@dataclass(frozen=True, slots=True)
class _Span:
    """When a request came in and must be done, in the event loop's time."""

    timeline: Timeline
    deadline_s: float | None
