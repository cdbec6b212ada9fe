"""The Generate and Tokenize calls of one model, over domain types; api/generation_servicer.py translates from gRPC.

Life of a Generate call:

    check parameters, priority ─▶ permits (or Overloaded, at once) ─▶ structure, template, tokens, limits
        ─▶ one Dispatcher.run per choice
        ─▶ chunks, merged: the first carries PromptInfo, a choice's last its finish reason and usage
        ─▶ finished, failed or cancelled: attempts aborted, reservations and permits released

A request holds one permit per choice, because each choice runs as a sequence of its own. Tokenize needs no permit: it
has its own threads and its own cap. Tokenize and Generate share the template process, one rendering at a time.

ModelServices finds a request's model by name.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import structlog

from mesh.domain.errors import InvalidRequest, ModelNotFound, NoWorkers, Overloaded
from mesh.domain.request import mint_id
from router.admission.fair_queue import QueueEntry
from router.admission.forecast import Forecast, retry_after_s
from router.admission.limiter import ConcurrencyLimiter, Permit
from router.answer_stream import MAX_PENDING_BEHIND_PROMPT, MAX_PENDING_EVENTS, Answer, AnswerStream, ChoiceRun
from router.choice import Choice, Siblings
from router.dispatch import Dispatcher
from router.journal import ChoiceSpan, Journal
from router.served_model import EncodedPrompt, LimitPolicy, ModelInfo, ModelText
from router.settings import RouterSettings
from router.tenants import ANONYMOUS, Tenant
from router.text.chat import Prompt
from router.text.tokenizer import TextToken
from router.timeline import Timeline
from router.traffic import Traffic, conversation_key
from router.validation import (
    GenerateParams,
    Limits,
    ValidRequest,
    check_best_of,
    check_counts,
    check_encoder_decoder,
    check_prompt_ids,
    check_prompt_logprobs,
    complete_sampling,
    require_prompt,
)
from router.workers.mesh_view import MeshView, shown

log = structlog.get_logger(__name__)

_MAX_LOGGED_CHARS = 128
_MAX_SHOWN_CHARS = 128
_MAX_TOKENIZING = 16
_STOPPING = "this router is stopping; try again"


class ModelService:
    """Serves the calls of one model. Raises ConfigurationError if the settings' limits do not fit the model.

    `on_gap` is called with the seconds between two tokens of a choice.
    """

    def __init__(
        self,
        text: ModelText,
        settings: RouterSettings,
        *,
        limiter: ConcurrencyLimiter,
        forecast: Forecast,
        mesh: MeshView,
        dispatcher: Dispatcher,
        journal: Journal,
        on_gap: Callable[[float], None] | None = None,
    ) -> None:
        self.model = text.model
        self._text = text
        self._limit_policy = LimitPolicy(settings, text.model.facts)
        self._slow_reader_s = settings.slow_reader_s
        self._ttft_target_s = settings.ttft_target_s
        self._limiter = limiter
        self._forecast = forecast
        self._mesh = mesh
        self._dispatcher = dispatcher
        self._journal = journal
        self._on_gap = on_gap
        self._streams: set[AnswerStream] = set()
        self._num_open = 0  # requests that are being admitted or have a stream
        self._all_ended = asyncio.Event()
        self._num_running = 0
        self._num_tokenizing = 0
        self._stopping = False
        self._is_grace_over = False

    async def generate(self, params: GenerateParams, time_left_s: float | None) -> Answer:
        """Start generating. Raises errors that keep the request from starting; the answer raises later ones."""
        if params.client_request_id:  # bound here so that all log lines of the call and its choices carry it
            shown = params.client_request_id[:_MAX_LOGGED_CHARS]
            structlog.contextvars.bind_contextvars(client_request_id=shown)
        if self._stopping:
            raise NoWorkers(_STOPPING)
        self._num_open += 1
        try:
            return await self._begin(params, time_left_s)
        except BaseException:
            self._one_ended()
            raise

    async def _begin(self, params: GenerateParams, time_left_s: float | None) -> Answer:
        timeline = Timeline(asyncio.get_running_loop().time, self._on_gap)
        queue_entry = self._queue_entry(params, time_left_s)
        cap = queue_entry.priority.share_of(self._limiter.max_permits)
        check_counts(params, max_choices=min(cap, params.tenant.max_concurrent_requests or cap))
        if self.model.decoder_prompt:
            check_encoder_decoder(params)
        params.sampling.validate(self.model.facts.vocab_size)
        adapter = self._mesh.adapter_digest(params.adapter)
        permits = await self._admit(params, cap)
        try:
            await self._text.grammars.check(params.sampling.structure, params.tenant.name)
            prompt = await self._encode(params)
            valid = replace(self._validate(params, prompt, queue_entry), adapter=adapter)
            echo = await self._echo(prompt) if params.echo else ""
            if self._is_grace_over:
                raise NoWorkers(_STOPPING)
            return self._start(valid, permits, timeline, echo)
        except BaseException:
            for permit in permits:
                permit.release()
            raise

    async def _encode(self, params: GenerateParams) -> EncodedPrompt:
        """Encode the prompt. With truncation no text is too long; the encoder still bounds how much text may wait."""
        truncate = params.sampling.truncate_prompt_tokens
        max_tokens = self._limits().max_input_tokens if truncate is None else None
        prompt = await self._text.encoder.encode(
            require_prompt(params.prompt), tenant=params.tenant.name, max_tokens=max_tokens
        )
        return prompt.last(truncate)

    async def tokenize(self, prompt: Prompt | None, tenant: Tenant = ANONYMOUS) -> tuple[str, list[TextToken]]:
        """Return the rendered text and the tokens that `generate` would use, each with its text.

        Raises InvalidRequest for prompts that `generate` would refuse, and Overloaded over the cap.
        """
        if self._num_tokenizing >= _MAX_TOKENIZING:
            raise Overloaded(f"{self._num_tokenizing} prompts are being tokenised; try again later")
        encoder = self._text.tokenize_encoder
        self._num_tokenizing += 1
        try:
            limits = self._limits()
            encoded = await encoder.encode(
                require_prompt(prompt), tenant=tenant.name, max_tokens=limits.max_input_tokens
            )
            self._check_ids(encoded, limits)
            return encoded.text or "", await encoder.pieces(encoded.ids)
        finally:
            self._num_tokenizing -= 1

    def describe(self) -> ModelInfo:
        """Return the model with the limits that hold now."""
        return ModelInfo(
            self.model, self._limits(), self._mesh.has_path, self._limiter.max_permits, tuple(self._mesh.adapters())
        )

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests, let running ones end within the grace, then fail the rest with NoWorkers."""
        self._stopping = True
        if self._num_open:
            with suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self._all_ended.wait()
        # First, so that no request that is being admitted starts with a permit that a failing stream releases.
        self._is_grace_over = True
        for stream in list(self._streams):
            stream.fail(NoWorkers(_STOPPING))

    def _one_ended(self) -> None:
        self._num_open -= 1
        if self._stopping and not self._num_open:
            self._all_ended.set()

    def _stream_ended(self, stream: AnswerStream) -> None:
        self._streams.discard(stream)
        self._one_ended()

    def _limits(self) -> Limits:
        return self._limit_policy.resolve(self._mesh.decode_capacities)

    def _queue_entry(self, params: GenerateParams, time_left_s: float | None) -> QueueEntry:
        """Return the queue entry of a request that arrives now. Raises InvalidRequest if its priority is too high."""
        now_s = asyncio.get_running_loop().time()
        target_s = self._ttft_target_s if params.ttft_target_s is None else params.ttft_target_s
        return QueueEntry(
            tenant=params.tenant.name,
            priority=params.tenant.priority_of(params.priority),
            first_token_by_s=None if target_s is None else now_s + target_s,
            deadline_s=None if time_left_s is None else now_s + time_left_s,
        )

    async def _admit(self, params: GenerateParams, cap: int) -> list[Permit]:
        """Acquire permits under `cap`. Raises Overloaded with the forecast's retry-after."""
        count = params.num_generated_choices
        try:
            return await self._limiter.admit(count, params.tenant, cap)
        except Overloaded as error:
            wait_s = retry_after_s(self._forecast.permits_s(count), error.retry_after_s)
            raise Overloaded(str(error), retry_after_s=wait_s) from None

    def _check_ids(self, prompt: EncodedPrompt, limits: Limits) -> None:
        check_prompt_ids(prompt.ids, vocab_size=self.model.facts.vocab_size, limits=limits)

    def _validate(self, params: GenerateParams, prompt: EncodedPrompt, queue_entry: QueueEntry) -> ValidRequest:
        limits = self._limits()
        self._check_ids(prompt, limits)
        spellings = self._text.encoder.spellings(params.sampling.bad_words)
        sampling = complete_sampling(
            replace(params.sampling, bad_word_ids=(*params.sampling.bad_word_ids, *spellings)),
            num_prompt_tokens=len(prompt.ids),
            vocab_size=self.model.facts.vocab_size,
            limits=limits,
        )
        ids = tuple(prompt.ids)
        valid = ValidRequest(
            mint_id(), ids, sampling, params, queue_entry, self.model.decoder_prompt, prompt.in_reasoning
        )
        check_best_of(valid)
        check_prompt_logprobs(params, len(prompt.ids))
        return valid

    async def _echo(self, prompt: EncodedPrompt) -> str:
        return await self._text.encoder.decode(prompt.ids) if prompt.text is None else prompt.text

    def _start(self, valid: ValidRequest, permits: list[Permit], timeline: Timeline, echo: str) -> Answer:
        """Start one task per choice."""
        num_choices = valid.params.num_generated_choices
        siblings = Siblings(num_choices) if num_choices > 1 else None
        choices = [Choice(index, valid, self.model.tokenizer, siblings) for index in range(num_choices)]
        runs = [
            ChoiceRun(choice, permit, lambda choice: self._run(choice, valid, timeline))
            for choice, permit in zip(choices, permits, strict=True)
        ]
        num_best = valid.params.num_choices if (valid.params.best_of or 1) > 1 else None
        stream = AnswerStream(
            runs,
            slow_reader_s=self._slow_reader_s,
            num_best=num_best,
            max_pending_events=MAX_PENDING_BEHIND_PROMPT if valid.params.prompt_logprobs else MAX_PENDING_EVENTS,
        )
        self._streams.add(stream)
        stream.ended.add_done_callback(lambda _: self._stream_ended(stream))
        return Answer(stream, valid, first_choice=choices[0], encoder=self._text.encoder, echo=echo)

    async def _run(self, choice: Choice, valid: ValidRequest, timeline: Timeline) -> None:
        """Run one choice and write its access log line. All log lines of the task carry the choice's request id."""
        timeline = timeline if choice.index == 0 else timeline.copy()
        structlog.contextvars.bind_contextvars(request_id=choice.request_id)
        span = ChoiceSpan(valid.params.trace_headers, choice.request_id, age_s=timeline.age_s)
        choice.traceparent = span.traceparent
        error: str | None = None
        self._count_start()
        self._journal.began(choice, timeline)
        try:
            await self._dispatcher.run(choice, timeline, valid.queue_entry.deadline_s)
        except BaseException as failure:
            if choice.finish_reason is None:
                error = choice.ended_by or type(failure).__name__
            raise
        finally:
            self._count_end()
            timeline.mark("finished")
            span.end(self._journal.ended(choice, timeline, error))
            log.info(
                "finished",
                request_id=choice.request_id,
                tenant=valid.params.tenant.name,
                client_request_id=valid.params.client_request_id[:_MAX_LOGGED_CHARS],
                model=self.model.name,
                adapter=valid.params.adapter,
                prompt_tokens=choice.num_prompt_tokens,
                completion_tokens=len(choice.token_ids),
                cached_tokens=choice.cached_tokens or 0,
                finish_reason=choice.finish_reason.value if choice.finish_reason is not None else None,
                error=error,
                trace_id=span.trace_id,
                **timeline.as_fields(),
            )

    def _count_start(self) -> None:
        self._num_running += 1
        self._forecast.service.begin()

    def _count_end(self) -> None:
        self._num_running -= 1
        self._forecast.service.did(1)
        if not self._num_running:
            self._forecast.service.end()


class ModelServices:
    """All models of a router, by name. A request without a name means the only model."""

    def __init__(self, services: Sequence[ModelService], journal: Journal, traffic: Traffic) -> None:
        self._by_name = {service.model.name: service for service in services}
        self.counting_refusals = journal.counting_refusals
        self._traffic = traffic

    async def generate(self, params: GenerateParams, time_left_s: float | None) -> Answer:
        """Start generating with the request's model. Raises the errors of `find` and ModelService.generate."""
        name = self._public_name(params.model)
        with self.counting_refusals():
            params = self._with_revision(params, name)
            service = self.find(params.model)
            answer = await service.generate(_with_adapter(params, service.model.name), time_left_s)
        if params.revision:
            self._traffic.began(name, params.revision)
        return answer

    def _with_revision(self, params: GenerateParams, name: str) -> GenerateParams:
        """Choose the model that answers, if `name` stands for several revisions."""
        if not self._traffic.revisions(name):
            return params  # without the hash of a prompt that may be long
        model = self._traffic.choose(name, conversation_key(params.prompt, params.tenant.name))
        return replace(params, model=model, revision=model)

    def _public_name(self, name: str) -> str:
        """The only name that clients need if they give none."""
        names = self._traffic.public_names()
        return names[0] if not name and len(names) == 1 else name

    def describe(self, name: str) -> ModelInfo:
        """A model with the limits that hold now. A name that stands for several is described by that with the largest
        share. Raises the errors of `find`.
        """
        name = self._public_name(name)
        revisions = [self._by_name[model].describe() for model in self._traffic.revisions(name)]
        if not revisions:
            return self.find(name).describe()
        return replace(
            revisions[0],
            model=replace(revisions[0].model, name=name),
            ready=any(revision.ready for revision in revisions),
            max_concurrent_requests=sum(revision.max_concurrent_requests for revision in revisions),
        )

    def describe_all(self) -> list[ModelInfo]:
        """All models, in the order of the settings, after the names that stand for several of them."""
        names = [name for name in self._traffic.public_names() if name not in self._by_name]
        return [self.describe(name) for name in (*names, *self._by_name)]

    def find(self, name: str) -> ModelService:
        """The service of a model, also by the name of one of its adapters, or by one that stands for several models.
        Raises ModelNotFound; InvalidRequest if the name is empty and there are several models, or if several models
        have such an adapter.
        """
        name = self._public_name(name)
        for known in (name, *self._traffic.revisions(name)):
            if known in self._by_name:
                return self._by_name[known]
        adapters = [(adapter, service) for service in self.all() for adapter in service.describe().adapters]
        with_it = [service for adapter, service in adapters if adapter == name]
        if len(with_it) > 1:
            models = ", ".join(service.model.name for service in with_it)
            raise InvalidRequest(f"model: {models} have an adapter {name!r}: name one of them, and the adapter")
        if with_it:
            return with_it[0]
        served = shown([*self._by_name, *(adapter for adapter, _ in adapters)])
        if name:
            raise ModelNotFound(f"model {name[:_MAX_SHOWN_CHARS]!r} is not served here; served: {served}")
        if len(self._by_name) > 1:
            raise InvalidRequest(f"model: name one of those served here: {served}")
        return next(iter(self._by_name.values()))

    def all(self) -> list[ModelService]:
        """All services, in the order of the settings."""
        return list(self._by_name.values())

    async def drain(self, grace_s: float) -> None:
        """Drain all models at the same time; see ModelService.drain."""
        await asyncio.gather(*(service.drain(grace_s) for service in self.all()))


def _with_adapter(params: GenerateParams, model: str) -> GenerateParams:
    """The parameters, whose adapter may stand in place of the model's name. Raises InvalidRequest for two adapters."""
    if params.model in ("", model):
        return params
    if params.adapter not in ("", params.model):
        raise InvalidRequest(
            f"model {params.model[:_MAX_SHOWN_CHARS]!r} is an adapter, and adapter names another: give one of them"
        )
    return replace(params, adapter=params.model)
