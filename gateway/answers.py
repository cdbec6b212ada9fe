"""Answers to HTTP clients: complete, from all events of a feed, or streamed as server-sent events or JSON lines.

The first event of a stream decides the HTTP status. If no event arrives within the ping interval, an SSE stream starts
anyway with status 200 and a comment, because proxies and clients drop silent connections. A later error is an event of
the stream. JSON lines have no comments, so they wait for the first event.

Framing is done here rather than by an SSE library: sse-starlette patches the server's shutdown and cuts streams, while
here running streams may finish within `grace_s`.
"""

import asyncio
import codecs
import json
import math
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import structlog
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

import tandem
from gateway.errors import Problem, is_ours
from gateway.exchange import Exchange
from gateway.feed import Feed
from gateway.schema import Json
from tandem import Choice, FinishReason, Timing, Token, TokenEvent, TopToken, Usage

log = structlog.get_logger(__name__)

_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_PING = b": ping\n\n"
_UNFINISHED = "an answer ended without a finish reason"


@dataclass(frozen=True, slots=True)
class Answer:
    """All choices of all prompts, in order.

    `prompt_tokens` maps a prompt's number to its tokens, if the request wants them. `in_reasoning` is true if a prompt
    ends inside a reasoning block.
    """

    choices: tuple[Choice, ...]
    prompt_tokens: dict[int, tuple[Token, ...]]
    in_reasoning: bool = False


async def collect(feed: Feed, num_choices: int = 1) -> Answer:
    """Read `feed` to its end and close it. Raises TandemError."""
    partial_choices: dict[int, _PartialChoice] = {}
    prompts: dict[int, tuple[Token, ...]] = {}
    in_reasoning = False
    try:
        async for events in feed.batches():
            for event in events:
                partial_choices.setdefault(event.index, _PartialChoice()).add(event)
                in_reasoning = in_reasoning or event.in_reasoning
                if event.prompt_tokens:
                    prompts[event.index // num_choices] = event.prompt_tokens
    finally:
        await feed.close()
    choices = tuple(_complete_choice(index, partial) for index, partial in sorted(partial_choices.items()))
    return Answer(choices, prompts, in_reasoning)


async def drain(feed: Feed, renderer: "Renderer") -> None:
    """Read `feed` to its end into a renderer that keeps the answer, and close it. Raises TandemError."""
    has_ended = False
    try:
        async for events in feed.batches():
            for event in events:
                has_ended = has_ended or event.finish_reason is not None
                for _ in renderer.event(event):
                    pass
    finally:
        await feed.close()
    if not has_ended:
        raise tandem.InternalError(_UNFINISHED)


def total_usage(choices: tuple[Choice, ...], num_choices: int) -> Usage:
    """Sum the token counts, counting each prompt once however many choices it has."""
    prompts = [choice.usage for choice in choices if choice.index % num_choices == 0]
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in prompts),
        completion_tokens=sum(choice.usage.completion_tokens for choice in choices),
        cached_tokens=sum(usage.cached_tokens for usage in prompts),
    )


@dataclass
class _PartialChoice:
    """A choice whose events are still arriving."""

    texts: list[str] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    usage: Usage = field(default_factory=Usage)
    timing: Timing | None = None

    def add(self, event: TokenEvent) -> None:
        self.texts.append(event.text)
        if event.token is not None:
            self.tokens.append(event.token)
        if event.finish_reason is not None:
            self.finish_reason, self.usage = event.finish_reason, event.usage or self.usage
            self.timing = event.timing


def _complete_choice(index: int, partial: _PartialChoice) -> Choice:
    if partial.finish_reason is None:
        raise tandem.InternalError(_UNFINISHED)
    text, tokens = "".join(partial.texts), tuple(partial.tokens)
    return Choice(index, text, tokens, partial.finish_reason, partial.usage, partial.timing)


def bytes_of(token: Token | TopToken) -> bytes:
    """Return a token's own bytes, which may begin or end within a character; by default those of its text."""
    return token.text.encode() if token.own_bytes is None else token.own_bytes


class OwnTexts:
    """Gives the tokens of one choice the texts that they add to it whatever becomes of stop strings, as TGI does: a
    character is that of its last token.
    """

    def __init__(self) -> None:
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def apply(self, token: Token, *, is_last: bool) -> Token:
        if token.own_bytes is None:
            return token
        return replace(token, text=self._decode(token.own_bytes, is_last))

    @classmethod
    def of(cls, tokens: Sequence[Token]) -> list[Token]:
        """Return all tokens of a choice with these texts."""
        texts, num_tokens = cls(), len(tokens)
        return [texts.apply(token, is_last=number == num_tokens) for number, token in enumerate(tokens, start=1)]


class Renderer(Protocol):
    """Renders token events as the JSON objects of one dialect. Stateful: one renderer per answer."""

    def start(self) -> Iterable[Json]:
        """Objects before the first event."""
        ...

    def event(self, event: TokenEvent) -> Iterable[Json]:
        """Objects for one event; may be none."""
        ...

    def end(self) -> Iterable[Json]:
        """Objects after the last event."""
        ...

    def error(self, problem: Problem) -> Iterable[Json]:
        """Objects that end a failed stream."""
        ...


def encode(content: object) -> bytes:
    """Encode as compact JSON on one line. Raises ValueError for NaN and infinity."""
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True)
class Framing:
    """The separation of objects in a body. `last` ends every stream, failed ones too. `ping` is sent during silence."""

    media_type: str
    frame: Callable[[Json], bytes]
    ping: bytes = b""
    last: bytes = b""


def _sse_frame(content: Json) -> bytes:
    return b"data: " + encode(content) + b"\n\n"


def _named_sse_frame(content: Json) -> bytes:
    """Name the event after its `type`."""
    return b"event: " + content["type"].encode() + b"\n" + _sse_frame(content)


def _json_line(content: Json) -> bytes:
    return encode(content) + b"\n"


SSE = Framing("text/event-stream", _sse_frame, ping=_PING)
SSE_DONE = Framing("text/event-stream", _sse_frame, ping=_PING, last=b"data: [DONE]\n\n")
SSE_NAMED = Framing("text/event-stream", _named_sse_frame, ping=_PING)
SSE_NAMED_PING = Framing("text/event-stream", _named_sse_frame, ping=_named_sse_frame({"type": "ping"}))
JSON_LINES = Framing("application/jsonlines", _json_line)


@dataclass(frozen=True, slots=True)
class Streamer:
    """Makes the streaming response of an exchange.

    `raise_early`: an error before the first event decides the HTTP status; otherwise every error is an event. `extra`:
    additional headers of the dialect.
    """

    framing: Framing
    exchange: Exchange
    raise_early: bool = True
    extra: Mapping[str, str] = field(default_factory=dict)

    async def respond(self, feed: Feed, renderer: Renderer) -> Response:
        """Return a response, which owns `feed`, once its status is known. Raises early errors with `feed` closed."""
        try:
            await feed.wait(self._silence_s)
            if self.raise_early:
                feed.raise_early_error()
        except BaseException:
            await feed.close()
            raise
        return _FeedResponse(feed, self._body(feed, renderer), self.framing.media_type, self.headers)

    @property
    def headers(self) -> Mapping[str, str]:
        return {**_HEADERS, **self.extra}

    @property
    def _silence_s(self) -> float | None:
        return self.exchange.settings.ping_interval_s if self.framing.ping else None

    async def _body(self, feed: Feed, renderer: Renderer) -> AsyncIterator[bytes]:
        frame, ping = self.framing.frame, self.framing.ping
        silence_s = math.inf if self._silence_s is None else self._silence_s
        now_s = asyncio.get_running_loop().time
        sent_s, opening = now_s(), b""
        try:
            opening = b"".join(map(frame, renderer.start()))
            async for events in feed.batches(self._silence_s):
                chunk = b"".join(frame(content) for event in events for content in renderer.event(event))
                if opening and events:
                    chunk, opening = opening + chunk, b""
                # Tokens that are held back, as a call's arguments may be, are silence for proxies.
                if chunk or not events or now_s() - sent_s >= silence_s:
                    yield chunk or ping
                    sent_s = now_s()
            chunk = opening + b"".join(map(frame, renderer.end())) + self.framing.last
        except Exception as error:
            problem = Problem.of(error)
            self.exchange.progress.failed(problem)
            _log(error, self.exchange.request_id)
            chunk = opening + b"".join(map(frame, renderer.error(problem))) + self.framing.last
        if chunk:
            yield chunk


def failed_stream(streamer: Streamer, error: Exception, renderer: Renderer) -> Response:
    """Return a stream with status 200 whose only event is an error."""
    problem = Problem.of(error)
    streamer.exchange.progress.failed(problem)
    content = b"".join(map(streamer.framing.frame, renderer.error(problem))) + streamer.framing.last
    return Response(content, media_type=streamer.framing.media_type, headers=streamer.headers)


class _FeedResponse(StreamingResponse):
    """Closes the feed when the response ends, even by an error or cancellation."""

    def __init__(self, feed: Feed, body: AsyncIterator[bytes], media_type: str, headers: Mapping[str, str]) -> None:
        super().__init__(body, media_type=media_type, headers=headers)
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._feed.close()


def _log(error: Exception, request_id: str) -> None:
    if is_ours(error):
        log.exception("a stream failed", request_id=request_id)
    else:
        log.warning("a stream failed", request_id=request_id, error=type(error).__name__, message=str(error))
