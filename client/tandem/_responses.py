"""Converts response messages to the values of models.py and mesh.py, and streams of events to results."""

from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from tandem.exceptions import ConnectionFailed, InternalError
from tandem.mesh import (
    Advice,
    AttemptPlace,
    HistoryPoint,
    Incident,
    Mesh,
    RequestTrace,
    RoutedRequests,
    Worker,
    WorkerLoad,
)
from tandem.models import (
    ATTEMPT_PHASES,
    AttemptTiming,
    Choice,
    FinishReason,
    Model,
    Result,
    SamplingDefaults,
    Timing,
    Token,
    TokenEvent,
    TopToken,
    Usage,
)
from tandem.v1 import generation_pb2, mesh_pb2, sampling_pb2

FINISH_REASONS = {
    sampling_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    sampling_pb2.FINISH_REASON_EOS_TOKEN: FinishReason.EOS_TOKEN,
    sampling_pb2.FINISH_REASON_STOP_SEQUENCE: FinishReason.STOP_SEQUENCE,
}


def _words(enum: Any, prefix: str) -> dict[int, str]:
    """The values of an enum in words, without the unspecified one."""
    return {number: name.removeprefix(prefix).lower().replace("_", " ") for name, number in enum.items() if number}


_ROLES = _words(mesh_pb2.WorkerRole, "WORKER_ROLE_")
_STATES = _words(mesh_pb2.WorkerState, "WORKER_STATE_")
_ACTIONS = _words(mesh_pb2.AdviceAction, "ADVICE_ACTION_")
_SHORTAGES = {mesh_pb2.SHORTAGE_UNSPECIFIED: ""} | _words(mesh_pb2.Shortage, "SHORTAGE_")
_KINDS = _words(mesh_pb2.IncidentKind, "INCIDENT_KIND_")


@dataclass(slots=True)
class _ChoiceProgress:
    """Progress of one choice: ids of all tokens that were delivered, and the position of the present stream in them."""

    ids: "array[int]" = field(default_factory=lambda: array("I"))
    position: int = 0
    has_ended: bool = False


class EventReader:
    """Converts the messages of one Generate call to events, one event per token.

    After `repeat()` the messages start again from the first. Tokens that were delivered before produce no events.
    `has_details` is False if neither alternatives nor own bytes of tokens were requested, which saves looking for them.
    """

    def __init__(self, num_choices: int, *, has_details: bool = True) -> None:
        self._num_choices = num_choices
        self._token = token if has_details else _plain_token
        self._request_id = ""
        self._prompt_tokens: tuple[Token, ...] = ()
        self._num_prompt_tokens = 0
        self._in_reasoning = False
        self._model = ""
        self._echo: dict[int, str] = {}
        self._has_events = False
        self._progress: defaultdict[int, _ChoiceProgress] = defaultdict(_ChoiceProgress)

    def repeat(self) -> None:
        """Expect the answer from its beginning, because the call was sent again."""
        if not self._has_events:
            self._prompt_tokens = ()
        for choice in self._progress.values():
            choice.position = 0

    def read(self, message: generation_pb2.GenerateResponse) -> list[TokenEvent]:
        """The events of one message. Raises ConnectionFailed if a repeated answer differs from the first one."""
        index = message.index
        choice = self._progress[index]
        if message.HasField("prompt") and not self._has_events:
            self._request_id = message.prompt.request_id
            self._prompt_tokens += tuple(map(self._token, message.prompt.tokens))  # a long prompt: in several messages
            self._num_prompt_tokens = message.prompt.num_tokens
            self._in_reasoning = message.prompt.in_reasoning
            self._model = message.prompt.model
        if message.echo and not choice.ids:
            self._echo[index] = message.echo
        tokens: list[Token | None] = [*map(self._token, self._new_tokens(message, choice))]
        if choice.has_ended:
            return []
        if message.finish_reason and not tokens:
            tokens.append(None)
        events = [TokenEvent(index, new_token, self._request_id, model=self._model) for new_token in tokens]
        self._has_events = self._has_events or bool(events)
        if events and (self._num_prompt_tokens or self._echo or self._prompt_tokens or self._in_reasoning):
            events[0] = self._with_prompt(events[0])
        if message.finish_reason:
            choice.has_ended = True
            reason = FINISH_REASONS.get(message.finish_reason, FinishReason.UNKNOWN)
            took = timing(message.timing) if message.HasField("timing") else None
            events[-1] = replace(events[-1], finish_reason=reason, usage=usage(message.usage), timing=took)
        return events

    def _new_tokens(
        self, message: generation_pb2.GenerateResponse, choice: _ChoiceProgress
    ) -> Sequence[generation_pb2.Token]:
        """The tokens of the message that were not delivered before. Raises ConnectionFailed if earlier tokens
        differ.
        """
        tokens: Sequence[generation_pb2.Token] = message.tokens
        start = choice.position
        num_repeated = min(len(tokens), len(choice.ids) - start)
        choice.position += len(tokens)
        if num_repeated:
            is_same = all(
                new_token.id == choice.ids[start + index] for index, new_token in enumerate(tokens[:num_repeated])
            )
            tokens = tokens[num_repeated:]
        else:
            is_same = True
        ends_early = bool(message.finish_reason) and choice.position < len(choice.ids)
        if not is_same or ends_early or (tokens and choice.has_ended):
            raise ConnectionFailed(
                f"the connection broke, and when request {self._request_id!r} was sent again the answer was different"
            )
        choice.ids.extend(new_token.id for new_token in tokens)
        return tokens

    def is_complete(self) -> bool:
        """True if every choice has ended."""
        return sum(choice.has_ended for choice in self._progress.values()) >= self._num_choices

    def check_complete(self) -> None:
        """Raise InternalError unless every choice has ended."""
        if not self.is_complete():
            raise InternalError(f"the stream of request {self._request_id!r} ended without a finish reason")

    def _with_prompt(self, event: TokenEvent) -> TokenEvent:
        """Add the prompt to the first event of the stream, and the echo to the first event of each choice."""
        prompt_tokens, self._prompt_tokens = self._prompt_tokens, ()
        in_reasoning, self._in_reasoning = self._in_reasoning, False
        num_prompt_tokens, self._num_prompt_tokens = self._num_prompt_tokens, 0
        return replace(
            event,
            echo=self._echo.pop(event.index, ""),
            prompt_tokens=prompt_tokens,
            in_reasoning=in_reasoning,
            num_prompt_tokens=num_prompt_tokens,
        )


class ResultBuilder:
    """Builds a result from the events of one stream."""

    def __init__(self) -> None:
        self._request_id = self._model = ""
        self._prompt_tokens: tuple[Token, ...] = ()
        self._texts: dict[int, list[str]] = {}
        self._tokens: dict[int, list[Token]] = {}
        self._choices: dict[int, Choice] = {}

    def add(self, event: TokenEvent) -> None:
        self._request_id, self._model = event.request_id, event.model
        self._prompt_tokens = self._prompt_tokens or event.prompt_tokens
        texts = self._texts.setdefault(event.index, [])
        tokens = self._tokens.setdefault(event.index, [])
        texts.append(event.text)
        if event.token:
            tokens.append(event.token)
        if event.finish_reason:
            self._choices[event.index] = Choice(
                event.index, "".join(texts), tuple(tokens), event.finish_reason, event.usage or Usage(), event.timing
            )

    def result(self) -> Result:
        """The result. Call it after the end of the stream."""
        choices = tuple(choice for _, choice in sorted(self._choices.items()))
        return Result(self._request_id, choices, self._prompt_tokens, self._model)


def token(message: generation_pb2.Token) -> Token:
    logprob = message.logprob if message.HasField("logprob") else None
    alternatives = message.top
    top = tuple(map(_top_token, alternatives)) if alternatives else ()
    own_bytes = message.own_bytes if message.HasField("own_bytes") else None
    return Token(message.id, message.text, logprob, message.special, top, own_bytes)


def _plain_token(message: generation_pb2.Token) -> Token:
    logprob = message.logprob if message.HasField("logprob") else None
    return Token(message.id, message.text, logprob, message.special)


def _top_token(message: generation_pb2.TopToken) -> TopToken:
    own_bytes = message.own_bytes if message.HasField("own_bytes") else None
    return TopToken(message.id, message.text, message.logprob, own_bytes)


def usage(message: generation_pb2.Usage) -> Usage:
    return Usage(message.prompt_tokens, message.completion_tokens, message.cached_tokens)


def timing(message: generation_pb2.Timing) -> Timing:
    attempts = tuple(map(_attempt_timing, message.attempts))
    return Timing(message.total_ms, message.prepare_ms, message.first_token_ms, attempts)


def _attempt_timing(message: generation_pb2.AttemptTiming) -> AttemptTiming:
    phases = {f"{name}_ms": getattr(message, f"{name}_ms") for name in ATTEMPT_PHASES}
    kv_transfer_ms = message.kv_transfer_ms if message.HasField("kv_transfer_ms") else None
    return AttemptTiming(kv_transfer_ms=kv_transfer_ms, **phases)


def models(messages: Iterable[generation_pb2.Model]) -> tuple[Model, ...]:
    """Convert the models of a ListModels or GetModel response."""
    return tuple(
        Model(
            name=message.name,
            max_input_tokens=message.max_input_tokens,
            max_total_tokens=message.max_total_tokens,
            vocab_size=message.vocab_size,
            eos_token_ids=tuple(message.eos_token_ids),
            has_chat_template=message.has_chat_template,
            tool_call_format=message.tool_call_format,
            has_reasoning=message.has_reasoning,
            is_encoder_decoder=message.is_encoder_decoder,
            max_concurrent_requests=message.max_concurrent_requests,
            serving_since_unix_s=message.serving_since_unix_s,
            ready=message.ready,
            adapters=tuple(message.adapters),
            sampling_defaults=SamplingDefaults(
                **{field.name: value for field, value in message.sampling_defaults.ListFields()}
            ),
            stop_strings=tuple(message.stop_strings),
        )
        for message in messages
    )


def mesh(message: mesh_pb2.ListWorkersResponse) -> Mesh:
    """Workers and requests of the mesh at the time of the call."""
    return Mesh(
        workers=tuple(map(_worker, message.workers)),
        queued_requests=message.queued_requests,
        active_requests=message.active_requests,
        shortage=_SHORTAGES.get(message.shortage, "unknown"),
        ended_choices=message.ended_choices,
        failed_choices=message.failed_choices,
        replays=message.replays,
        incidents=tuple(map(_incident, message.incidents)),
        traces=tuple(map(_trace, message.traces)),
        running=tuple(map(_trace, message.running)),
        advice=tuple(map(_advice, message.advice)),
        traffic={each.name: dict(each.shares) for each in message.traffic},
        routed={
            each.name: RoutedRequests(dict(each.requests), each.span.ToNanoseconds() / 1e9) for each in message.routed
        },
    )


def _advice(message: mesh_pb2.Advice) -> Advice:
    return Advice(
        _ACTIONS.get(message.action, "unknown"), _ROLES.get(message.role, "unknown"), message.reason, message.model
    )


def history(message: mesh_pb2.GetHistoryResponse) -> tuple[HistoryPoint, ...]:
    """The points of a router's history, oldest first."""
    return tuple(map(_point, message.points))


def _point(message: mesh_pb2.HistoryPoint) -> HistoryPoint:
    def seconds(name: str) -> float | None:
        return getattr(message, name).ToNanoseconds() / 1e9 if message.HasField(name) else None

    return HistoryPoint(
        age_s=message.age.ToNanoseconds() / 1e9,
        length_s=message.length.ToNanoseconds() / 1e9,
        generated_tokens=message.generated_tokens,
        computed_tokens=message.computed_tokens,
        replays=message.replays,
        failed_choices=message.failed_choices,
        waiting=message.waiting,
        running=message.running,
        kv_used=message.kv_used if message.HasField("kv_used") else None,
        first_token_p50_s=seconds("first_token_p50"),
        first_token_p95_s=seconds("first_token_p95"),
        gap_p50_s=seconds("gap_p50"),
        gap_p99_s=seconds("gap_p99"),
    )


def _worker(message: mesh_pb2.WorkerStatus) -> Worker:
    record, load = message.record, message.load
    return Worker(
        worker_id=record.worker_id,
        incarnation=record.incarnation,
        role=_ROLES.get(record.role, "unknown"),
        state=_STATES.get(message.state, "unknown"),
        address=record.address,
        model=record.model,
        device=record.device,
        pid=record.pid,
        num_blocks=record.num_blocks,
        max_num_seqs=record.max_num_seqs,
        load=WorkerLoad(**{each.name: getattr(load, each.name) for each in fields(WorkerLoad)}),
        last_seen_s=message.last_seen.ToNanoseconds() / 1e9,
        serving=message.serving,
        open_transfers=message.open_transfers,
        transferred_bytes=message.transferred_bytes,
        prefilling_tokens=message.prefilling_tokens,
        canary_error=message.canary_error,
        speculative=record.speculative or "none",
        tensor_parallel=record.tensor_parallel or 1,
        pipeline_parallel=record.pipeline_parallel or 1,
        adapters=tuple(record.adapters),
        switchable=record.switchable,
        max_batch_tokens=record.max_batch_tokens,
        block_size=record.block_size,
        state_blocks=record.state_blocks,
        windows=tuple(record.windows),
        windows_are_chunks=record.windows_are_chunks,
    )


def _incident(message: mesh_pb2.Incident) -> Incident:
    return Incident(
        kind=_KINDS.get(message.kind, "unknown"),
        age_s=message.age.ToNanoseconds() / 1e9,
        worker_id=message.worker_id,
        request_id=message.request_id,
        cause=message.cause,
    )


def _trace(message: mesh_pb2.RequestTrace) -> RequestTrace:
    return RequestTrace(
        request_id=message.request_id,
        age_s=message.age.ToNanoseconds() / 1e9,
        prompt_tokens=message.prompt_tokens,
        completion_tokens=message.completion_tokens,
        cached_tokens=message.cached_tokens,
        finish_reason=FINISH_REASONS.get(message.finish_reason),
        error=message.error,
        timing=timing(message.timing) if message.HasField("timing") else None,
        places=tuple(AttemptPlace(p.prefill_worker, p.decode_worker, p.failure) for p in message.places),
    )
