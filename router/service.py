"""The Generate and Tokenize calls of one model, over domain types; api/generation_servicer.py translates from gRPC.

Life of a Generate call:

    check parameters, priority ─▶ permits (or Overloaded, at once) ─▶ structure, template, tokens, limits
        ─▶ one Dispatcher.run per choice
        ─▶ deltas, merged: the first carries PromptInfo, a choice's last its finish reason and usage
        ─▶ finished, failed or cancelled: attempts aborted, claims on workers and permits released

A request holds one permit per choice, because each choice runs as a sequence of its own. Tokenize needs no permit: it
has its own threads and its own cap. Tokenize and Generate share the template process, one rendering at a time.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from functools import partial

import structlog

from mesh.domain.errors import NoWorkers, Overloaded, RouterStopping, TooLarge
from mesh.domain.request import mint_id
from mesh.tasks import set_within
from router.admission.fair_queue import QueueEntry
from router.admission.forecast import Forecast, retry_after_s
from router.admission.limiter import ConcurrencyLimiter, Permit
from router.answer_stream import MAX_PENDING_BEHIND_PROMPT, MAX_PENDING_EVENTS, Answer, AnswerStream
from router.choice import Choice, Siblings
from router.dispatch import Dispatcher
from router.journal import ChoiceSpan, Journal
from router.served_model import LimitPolicy, ModelStatus
from router.settings import RouterSettings
from router.tenants import ANONYMOUS, Tenant
from router.text.chat import Prompt, TextPrompt
from router.text.input_processor import EncodedPrompt, InputProcessor
from router.text.tokenizer import TextToken
from router.timeline import Timeline
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
    with_stop_strings,
)
from router.workers.mesh_view import MeshView

log = structlog.get_logger(__name__)

_MAX_LOGGED_CHARS = 128
_MAX_TOKENIZING = 16
_WORKERS_RETURN_S = 5.0
"""Workers of a router that was started again are back by then (worker/registration.py, _MAX_BACKOFF_S)."""
_STOPPING = "this router is stopping; try again"


class GenerationService:
    """Serves the calls of one model. Raises ConfigurationError if the settings' limits do not fit the model.

    `on_gap` is called with the seconds between two tokens of a choice.
    """

    def __init__(
        self,
        inputs: InputProcessor,
        settings: RouterSettings,
        *,
        limiter: ConcurrencyLimiter,
        forecast: Forecast,
        mesh: MeshView,
        dispatcher: Dispatcher,
        journal: Journal,
        on_gap: Callable[[float], None] | None = None,
    ) -> None:
        self.model = inputs.model
        self._since_unix_s = int(time.time())
        self._workers_back_by_s = time.monotonic() + _WORKERS_RETURN_S
        self._inputs = inputs
        self._limit_policy = LimitPolicy(settings, inputs.model.facts)
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
            label = params.client_request_id[:_MAX_LOGGED_CHARS]
            structlog.contextvars.bind_contextvars(client_request_id=label)
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
            await self._inputs.grammars.check(params.sampling.structure, params.tenant.name)
            prompt, valid = await self._prepare(params, queue_entry, adapter)
            echo = ""
            if params.echo:
                echo = await self._inputs.encoder.decode(prompt.ids) if prompt.text is None else prompt.text
            if self._is_grace_over:
                raise RouterStopping(_STOPPING)
            return self._start(valid, permits, timeline, echo)
        except BaseException:
            for permit in permits:
                permit.release()
            raise

    async def _prepare(
        self, params: GenerateParams, queue_entry: QueueEntry, adapter: str
    ) -> tuple[EncodedPrompt, ValidRequest]:
        """Encode and validate. Larger workers may still be on their way back to a router that has just been started."""
        while True:
            limits = self._limits()
            try:
                prompt = await self._encode(params)
                return prompt, self._validate(params, prompt, queue_entry, adapter)
            except TooLarge:
                is_final = limits == self._limit_policy.resolve(())
                if is_final or not await self._while_workers_return(partial(self._allows_more, limits)):
                    raise

    def _allows_more(self, limits: Limits) -> bool:
        """True if a worker serves that makes the limits larger than these."""
        capacities = self._mesh.serving_capacities
        return bool(capacities) and self._limit_policy.resolve(capacities).max_total_tokens > limits.max_total_tokens

    async def _encode(self, params: GenerateParams) -> EncodedPrompt:
        """Encode the prompt. With truncation no text is too long; the encoder still bounds how much text may wait."""
        truncate = params.sampling.truncate_prompt_tokens
        max_tokens = self._limits().max_input_tokens if truncate is None else None
        prompt = await self._inputs.encoder.encode(
            require_prompt(params.prompt), tenant=params.tenant.name, max_tokens=max_tokens
        )
        return prompt.last(truncate)

    async def tokenize(
        self, prompt: Prompt | None, tenant: Tenant = ANONYMOUS, *, skip_special_tokens: bool = True
    ) -> tuple[str, list[TextToken]]:
        """Return the rendered text and the tokens that `generate` would use, each with its text.

        Raises InvalidRequest for prompts that `generate` would refuse, but for a text without tokens, and Overloaded
        over the cap.
        """
        if self._num_tokenizing >= _MAX_TOKENIZING:
            raise Overloaded(f"{self._num_tokenizing} prompts are being tokenised; try again later")
        encoder = self._inputs.tokenize_encoder
        self._num_tokenizing += 1
        try:
            limits = self._limits()
            prompt = require_prompt(prompt, may_be_empty=True)
            encoded = await encoder.encode(prompt, tenant=tenant.name, max_tokens=limits.max_input_tokens)
            if encoded.ids or not isinstance(prompt, TextPrompt):
                self._check_ids(encoded, limits)
            tokens = await encoder.pieces(encoded.ids, skip_special_tokens=skip_special_tokens)
            return encoded.text or "", tokens
        finally:
            self._num_tokenizing -= 1

    def status(self) -> ModelStatus:
        """Return the model with the limits that hold now."""
        return ModelStatus(
            self.model,
            self._limits(),
            self._mesh.has_path,
            self._limiter.max_permits,
            self._since_unix_s,
            tuple(self._mesh.adapters()),
        )

    async def adapters_known(self) -> None:
        """Return once a decode worker has said which adapters the model has, or should have."""
        await self._while_workers_return(lambda: self._mesh.knows_adapters)

    async def _while_workers_return(self, condition: Callable[[], bool]) -> bool:
        """Wait for workers with which `condition` holds, if this router has just been started: it knows nothing of them
        until they are back. Returns whether it holds.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._workers_back_by_s - time.monotonic()):
                while not condition():
                    await self._mesh.changed()
        return condition()

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests, let running ones end within the grace, then fail the rest with RouterStopping."""
        self._stopping = True
        if self._num_open:
            await set_within(self._all_ended, grace_s)
        # First, so that no request that is being admitted starts with a permit that a failing stream releases.
        self._is_grace_over = True
        for stream in list(self._streams):
            stream.fail(RouterStopping(_STOPPING))

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
            return await self._limiter.acquire(count, params.tenant, cap)
        except Overloaded as error:
            wait_s = retry_after_s(self._forecast.permits_s(count), error.retry_after_s)
            raise Overloaded(str(error), retry_after_s=wait_s) from None

    def _check_ids(self, prompt: EncodedPrompt, limits: Limits) -> None:
        check_prompt_ids(prompt.ids, vocab_size=self.model.facts.vocab_size, limits=limits)

    def _validate(
        self, params: GenerateParams, prompt: EncodedPrompt, queue_entry: QueueEntry, adapter: str
    ) -> ValidRequest:
        """`adapter` is the digest of the request's adapter."""
        limits = self._limits()
        self._check_ids(prompt, limits)
        params = with_stop_strings(params, self.model.stop_strings)
        sampling = complete_sampling(
            params.sampling,
            num_prompt_tokens=len(prompt.ids),
            vocab_size=self.model.facts.vocab_size,
            limits=limits,
            spellings=self._inputs.encoder.spellings(params.sampling.bad_words),
        )
        valid = ValidRequest(
            request_id=mint_id(),
            prompt_ids=tuple(prompt.ids),
            sampling=sampling,
            params=params,
            queue_entry=queue_entry,
            decoder_prompt=self.model.decoder_prompt,
            in_reasoning=prompt.in_reasoning,
            adapter=adapter,
        )
        check_best_of(valid)
        check_prompt_logprobs(params, len(prompt.ids))
        return valid

    def _start(self, valid: ValidRequest, permits: list[Permit], timeline: Timeline, echo: str) -> Answer:
        """Start one task per choice."""
        num_choices = valid.params.num_generated_choices
        siblings = Siblings(num_choices) if num_choices > 1 else None
        choices = [Choice(index, valid, self.model.tokenizer, siblings) for index in range(num_choices)]
        num_best = valid.params.num_choices if (valid.params.best_of or 1) > 1 else None
        stream = AnswerStream(
            choices,
            permits,
            partial(self._run, valid=valid, timeline=timeline),
            slow_reader_s=self._slow_reader_s,
            num_best=num_best,
            max_pending_events=MAX_PENDING_BEHIND_PROMPT if valid.params.prompt_logprobs else MAX_PENDING_EVENTS,
        )
        self._streams.add(stream)
        stream.ended.add_done_callback(lambda _: self._stream_ended(stream))
        return Answer(stream, valid, first_choice=choices[0], encoder=self._inputs.encoder, echo=echo)

    async def _run(self, choice: Choice, valid: ValidRequest, timeline: Timeline) -> None:
        """Run one choice and write its access log line. All log lines of the task carry the choice's request id."""
        timeline = timeline if choice.index == 0 else timeline.copy()
        structlog.contextvars.bind_contextvars(request_id=choice.request_id)
        span = ChoiceSpan(valid.params.trace_headers, choice.request_id, age_s=timeline.age_s)
        choice.traceparent = span.traceparent
        error: str | None = None
        self._num_running += 1
        self._forecast.service.begin()
        self._journal.began(choice, timeline)
        try:
            await self._dispatcher.run(choice, timeline, valid.queue_entry.deadline_s)
        except BaseException as failure:
            if choice.finish_reason is None:
                error = choice.ended_by or type(failure).__name__
            raise
        finally:
            self._num_running -= 1
            self._forecast.service.did(1)
            if not self._num_running:
                self._forecast.service.end()
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
