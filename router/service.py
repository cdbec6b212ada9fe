"""What clients can ask of the router, over domain types; the gRPC side is in servicer.py.

Life of a Generate call:

    shape, priority ─▶ permits (or Overloaded, at once) ─▶ structure, template, tokens, limits
        ─▶ one Dispatcher.run per choice
        ─▶ chunks, merged: the first carries PromptInfo, a choice's last its finish reason and usage
        ─▶ ended, failed or abandoned: attempts aborted, bookings and permits given back

A request holds one permit for each of its choices, because each runs as a sequence of its own. Tokenize needs none: it
has a thread and a cap of its own, so that neither can keep the other waiting.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog

from mesh.domain.errors import MeshError, NoWorkers, Overloaded
from mesh.domain.request import mint_id
from router.admission import Admission, Permit
from router.answer import Answer, AnswerParts
from router.choice import Choice
from router.claim import Claim
from router.dispatch import Dispatcher
from router.forecast import Forecast, retry_after_s
from router.generation import GenerationStream, Work
from router.grammars import Grammars
from router.journal import Journal
from router.limits import LimitPolicy, Limits
from router.mesh_view import MeshView
from router.prompts import EncodedPrompt, Prompt, PromptEncoder
from router.served_model import ServedModel
from router.siblings import Siblings
from router.text.tokenizer import TextToken
from router.timeline import Timeline
from router.tracing import ChoiceSpan
from router.turns import Lane
from router.validation import (
    GenerateInput,
    ValidRequest,
    check_for_encoder,
    check_prompt_ids,
    check_ranked,
    check_shape,
    complete_sampling,
    require_prompt,
)

log = structlog.get_logger(__name__)

_MAX_LOGGED_CHARS = 128
_MAX_TOKENIZING = 16
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
    tokenize_encoder: PromptEncoder
    grammars: Grammars
    limits: LimitPolicy
    permits: Admission
    forecast: Forecast
    mesh: MeshView
    dispatcher: Dispatcher
    journal: Journal
    slow_reader_s: float
    ttft_target_s: float | None = None
    on_gap: Callable[[float], None] | None = None


class GenerationService:
    """One for all clients of a model."""

    def __init__(self, parts: ServiceParts) -> None:
        self._parts = parts
        self._streams: set[GenerationStream] = set()
        self._num_running = 0
        self._num_tokenizing = 0
        self._stopping = False

    @property
    def model(self) -> ServedModel:
        """What it serves."""
        return self._parts.model

    async def generate(self, asked: GenerateInput, time_left_s: float | None) -> Answer:
        """Start generating. Raises what keeps the request from starting; later errors come out of the answer."""
        if asked.client_request_id:  # all lines of the call and of its choices have it
            shown = asked.client_request_id[:_MAX_LOGGED_CHARS]
            structlog.contextvars.bind_contextvars(client_request_id=shown)
        try:
            return await self._begin(asked, time_left_s)
        except MeshError as error:
            self._parts.journal.refused(type(error).__name__)
            raise

    async def _begin(self, asked: GenerateInput, time_left_s: float | None) -> Answer:
        timeline = Timeline(asyncio.get_running_loop().time, self._parts.on_gap)
        if self._stopping:
            raise NoWorkers(_STOPPING)
        claim = self._claim(asked, time_left_s)
        most = claim.lane.priority.share_of(self._parts.permits.max_permits)
        check_shape(asked, max_choices=most)
        if self._parts.model.decoder_prompt:
            check_for_encoder(asked)
        asked.sampling.validate(self._parts.model.facts.vocab_size)
        permits = await self._admit(asked, most)
        try:
            await self._parts.grammars.check(asked.sampling.structure)
            prompt = await self._parts.encoder.encode(require_prompt(asked.prompt))
            prompt = prompt.last(asked.sampling.truncate_prompt_tokens)
            valid = self._validate(asked, prompt, claim)
            echo = await self._echo(prompt) if asked.echo else ""
        except BaseException:
            for permit in permits:
                permit.release()
            raise
        return self._start(valid, permits, timeline, echo)

    async def tokenize(self, prompt: Prompt | None) -> tuple[str, list[TextToken]]:
        """The text, as rendered, and the token ids that `generate` would use, with their texts.

        Prompts that it would not take are refused.
        """
        if self._num_tokenizing >= _MAX_TOKENIZING:
            raise Overloaded(f"{self._num_tokenizing} prompts are being tokenised; try again later")
        encoder = self._parts.tokenize_encoder
        self._num_tokenizing += 1
        try:
            encoded = await encoder.encode(require_prompt(prompt))
            self._check_ids(encoded, self._limits())
            return encoded.text or "", await encoder.pieces(encoded.ids)
        finally:
            self._num_tokenizing -= 1

    def describe(self) -> ModelInfo:
        """The model, and what holds for it now."""
        return ModelInfo(self._parts.model, self._limits(), self._parts.mesh.has_path)

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests, let running ones end within the grace, then end the rest with a clear error."""
        self._stopping = True
        endings = [stream.ended for stream in self._streams]
        if endings:
            await asyncio.wait(endings, timeout=grace_s)
        for stream in list(self._streams):
            stream.fail(NoWorkers(_STOPPING))

    def _limits(self) -> Limits:
        return self._parts.limits.resolve(self._parts.mesh.decode_workers())

    def _claim(self, asked: GenerateInput, time_left_s: float | None) -> Claim:
        """What a request that comes in now may ask of the queue. Raises InvalidRequest if its priority is too high."""
        now_s = asyncio.get_running_loop().time()
        target_s = self._parts.ttft_target_s if asked.ttft_target_s is None else asked.ttft_target_s
        return Claim(
            lane=Lane(asked.tenant.name, asked.tenant.priority_of(asked.priority)),
            first_token_by_s=None if target_s is None else now_s + target_s,
            deadline_s=None if time_left_s is None else now_s + time_left_s,
        )

    async def _admit(self, asked: GenerateInput, most: int) -> list[Permit]:
        """Permits, if no more than `most` are then in service. Raises Overloaded.

        Who refuses knows the cap; when it makes sense to come back is the forecast's to say.
        """
        permits = self._parts.permits
        try:
            return await permits.admit(asked.num_generated_choices, asked.tenant, most)
        except Overloaded as error:
            wait_s = retry_after_s(self._parts.forecast.permits_s(asked.num_generated_choices), error.retry_after_s)
            raise Overloaded(str(error), retry_after_s=wait_s) from None

    def _check_ids(self, prompt: EncodedPrompt, limits: Limits) -> None:
        check_prompt_ids(prompt.ids, vocab_size=self._parts.model.facts.vocab_size, limits=limits)

    def _validate(self, asked: GenerateInput, prompt: EncodedPrompt, claim: Claim) -> ValidRequest:
        limits = self._limits()
        self._check_ids(prompt, limits)
        spellings = self._parts.encoder.spellings(asked.sampling.bad_words)
        sampling = complete_sampling(
            replace(asked.sampling, bad_word_ids=(*asked.sampling.bad_word_ids, *spellings)),
            num_prompt_tokens=len(prompt.ids),
            vocab_size=self._parts.model.facts.vocab_size,
            limits=limits,
        )
        decoder_prompt = self._parts.model.decoder_prompt
        valid = ValidRequest(mint_id(), tuple(prompt.ids), sampling, asked, claim, decoder_prompt)
        check_ranked(valid)
        return valid

    async def _echo(self, prompt: EncodedPrompt) -> str:
        return await self._parts.encoder.decode(prompt.ids) if prompt.text is None else prompt.text

    def _start(self, valid: ValidRequest, permits: list[Permit], timeline: Timeline, echo: str) -> Answer:
        """One task for each choice."""
        num_choices = valid.asked.num_generated_choices
        siblings = Siblings(num_choices) if num_choices > 1 else None
        choices = [Choice(index, valid, self._parts.model.tokenizer, siblings) for index in range(num_choices)]
        works = [
            Work(choice, permit, lambda choice: self._run(choice, valid, timeline))
            for choice, permit in zip(choices, permits, strict=True)
        ]
        num_best = valid.asked.num_choices if (valid.asked.best_of or 1) > 1 else None
        stream = GenerationStream(works, slow_reader_s=self._parts.slow_reader_s, num_best=num_best)
        self._streams.add(stream)
        stream.ended.add_done_callback(lambda _: self._streams.discard(stream))
        return Answer(AnswerParts(valid, choices[0], self._parts.encoder, echo), stream)

    async def _run(self, choice: Choice, valid: ValidRequest, timeline: Timeline) -> None:
        """Run one choice, and write its line of the access log. All lines of its task have its id."""
        timeline = timeline if choice.index == 0 else timeline.copy()
        structlog.contextvars.bind_contextvars(request_id=choice.request_id)
        span = ChoiceSpan(valid.asked.trace_headers, choice.request_id, age_s=timeline.age_s)
        choice.traceparent = span.traceparent
        error: str | None = None
        self._count_in()
        self._parts.journal.began(choice, timeline)
        try:
            await self._parts.dispatcher.run(choice, timeline, valid.claim.deadline_s)
        except BaseException as failure:
            if choice.finish_reason is None:
                error = type(failure).__name__
            raise
        finally:
            self._count_out()
            timeline.mark("finished")
            span.end(self._parts.journal.ended(choice, timeline, error))
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
                trace_id=span.trace_id,
                **timeline.as_fields(),
            )

    def _count_in(self) -> None:
        self._num_running += 1
        self._parts.forecast.service.begin()

    def _count_out(self) -> None:
        self._num_running -= 1
        self._parts.forecast.service.did(1)
        if not self._num_running:
            self._parts.forecast.service.end()
