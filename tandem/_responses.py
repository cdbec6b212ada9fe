"""Response messages to values, and streams of events to results."""

from collections.abc import Iterable
from dataclasses import replace

from tandem.exceptions import InternalError
from tandem.models import (
    ATTEMPT_PHASES,
    AttemptTiming,
    Choice,
    FinishReason,
    Model,
    Result,
    Timing,
    Token,
    TokenEvent,
    TopToken,
    Usage,
)
from tandem.v1 import generation_pb2, sampling_pb2

FINISH_REASONS = {
    sampling_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    sampling_pb2.FINISH_REASON_EOS_TOKEN: FinishReason.EOS_TOKEN,
    sampling_pb2.FINISH_REASON_STOP_SEQUENCE: FinishReason.STOP_SEQUENCE,
    sampling_pb2.FINISH_REASON_CANCELLED: FinishReason.CANCELLED,
    sampling_pb2.FINISH_REASON_ERROR: FinishReason.ERROR,
}


class EventReader:
    """Turns the messages of one Generate stream into events. A message with several tokens becomes several events."""

    def __init__(self, num_choices: int) -> None:
        self._request_id = ""
        self._prompt_tokens: tuple[Token, ...] = ()
        self._echo: dict[int, str] = {}
        self._running = set(range(num_choices))

    def read(self, message: generation_pb2.GenerateResponse) -> list[TokenEvent]:
        """The events of one message."""
        index = message.index
        if message.HasField("prompt"):
            self._request_id = message.prompt.request_id
            self._prompt_tokens = tuple(map(token, message.prompt.tokens))
        if message.echo:
            self._echo[index] = message.echo
        tokens: list[Token | None] = [token(each) for each in message.tokens]
        if message.finish_reason and not tokens:
            tokens.append(None)
        events = [TokenEvent(index, each, self._request_id) for each in tokens]
        if events and (self._prompt_tokens or self._echo):
            events[0] = self._with_prompt(events[0])
        if message.finish_reason:
            self._running.discard(index)
            reason = FINISH_REASONS.get(message.finish_reason, FinishReason.UNKNOWN)
            took = timing(message.timing) if message.HasField("timing") else None
            events[-1] = replace(events[-1], finish_reason=reason, usage=usage(message.usage), timing=took)
        return events

    def check_complete(self) -> None:
        """Raise InternalError unless every choice has had its last event."""
        if self._running:
            raise InternalError(f"the stream of request {self._request_id!r} ended without a finish reason")

    def _with_prompt(self, event: TokenEvent) -> TokenEvent:
        """The stream's first event has the prompt's tokens, the first of each choice the echo."""
        prompt_tokens, self._prompt_tokens = self._prompt_tokens, ()
        return replace(event, echo=self._echo.pop(event.index, ""), prompt_tokens=prompt_tokens)


class ResultBuilder:
    """Collects the events of one stream."""

    def __init__(self) -> None:
        self._request_id = ""
        self._prompt_tokens: tuple[Token, ...] = ()
        self._texts: dict[int, list[str]] = {}
        self._tokens: dict[int, list[Token]] = {}
        self._choices: dict[int, Choice] = {}

    def add(self, event: TokenEvent) -> None:
        """Take one event in."""
        self._request_id = event.request_id
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
        """The answer; call it after the stream's end."""
        choices = tuple(choice for _, choice in sorted(self._choices.items()))
        return Result(self._request_id, choices, self._prompt_tokens)


def token(message: generation_pb2.Token) -> Token:
    """A token's value."""
    logprob = message.logprob if message.HasField("logprob") else None
    alternatives = message.top
    top = tuple(TopToken(entry.id, entry.text, entry.logprob) for entry in alternatives) if alternatives else ()
    return Token(message.id, message.text, logprob, message.special, top)


def usage(message: generation_pb2.Usage) -> Usage:
    """Token counts."""
    return Usage(message.prompt_tokens, message.completion_tokens, message.cached_tokens)


def timing(message: generation_pb2.Timing) -> Timing:
    """Where the time went."""
    attempts = tuple(map(_attempt_timing, message.attempts))
    return Timing(message.total_ms, message.prepare_ms, message.first_token_ms, attempts)


def _attempt_timing(message: generation_pb2.AttemptTiming) -> AttemptTiming:
    phases = {f"{name}_ms": getattr(message, f"{name}_ms") for name in ATTEMPT_PHASES}
    kv_transfer_ms = message.kv_transfer_ms if message.HasField("kv_transfer_ms") else None
    return AttemptTiming(kv_transfer_ms=kv_transfer_ms, **phases)


def models(messages: Iterable[generation_pb2.Model]) -> tuple[Model, ...]:
    """Served models."""
    return tuple(
        Model(
            name=message.name,
            max_input_tokens=message.max_input_tokens,
            max_total_tokens=message.max_total_tokens,
            vocab_size=message.vocab_size,
            eos_token_ids=tuple(message.eos_token_ids),
            has_chat_template=message.has_chat_template,
            tool_call_format=message.tool_call_format,
            ready=message.ready,
        )
        for message in messages
    )
