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
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

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
    """Decodes the text of each token of one choice, as TGI shows it: nothing is held back for stop strings, and a
    character belongs to the last of its tokens.
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


async def stream_answer(
    exchange: Exchange,
    feed: Feed,
    renderer: Renderer,
    framing: Framing,
    *,
    raise_early: bool = True,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Return a streaming response, which owns `feed`, once its status is known.

    `raise_early`: an error before the first event decides the HTTP status, and is raised with `feed` closed; otherwise
    every error is an event. `headers` are the dialect's own.
    """
    silence_s = exchange.settings.ping_interval_s if framing.ping else None
    try:
        await feed.wait(silence_s)
        if raise_early:
            feed.raise_early_error()
    except BaseException:
        await feed.close()
        raise
    body = _body(exchange, feed, renderer, framing, silence_s)
    return ClosingResponse(body, feed.close, media_type=framing.media_type, headers={**_HEADERS, **(headers or {})})


async def _body(
    exchange: Exchange, feed: Feed, renderer: Renderer, framing: Framing, silence_s: float | None
) -> AsyncIterator[bytes]:
    frame, ping = framing.frame, framing.ping
    max_silence_s = math.inf if silence_s is None else silence_s
    now_s = asyncio.get_running_loop().time
    sent_s, opening = now_s(), b""
    try:
        opening = b"".join(map(frame, renderer.start()))
        async for events in feed.batches(silence_s):
            chunk = b"".join(frame(content) for event in events for content in renderer.event(event))
            if opening and events:
                chunk, opening = opening + chunk, b""
            # Tokens that are held back, as a call's arguments may be, are silence for proxies.
            if chunk or not events or now_s() - sent_s >= max_silence_s:
                yield chunk or ping
                sent_s = now_s()
        chunk = opening + b"".join(map(frame, renderer.end())) + framing.last
    except Exception as error:
        if is_ours(error):
            log.exception("a stream failed", request_id=exchange.request_id)
        else:
            kind, message = type(error).__name__, str(error)
            log.warning("a stream failed", request_id=exchange.request_id, error=kind, message=message)
        chunk = opening + _failure(exchange, error, renderer, framing)
    if chunk:
        yield chunk


def failed_stream(
    exchange: Exchange, error: Exception, renderer: Renderer, framing: Framing, headers: Mapping[str, str]
) -> Response:
    """Return a stream with status 200 whose only event is an error."""
    content = _failure(exchange, error, renderer, framing)
    return Response(content, media_type=framing.media_type, headers={**_HEADERS, **headers})


def _failure(exchange: Exchange, error: Exception, renderer: Renderer, framing: Framing) -> bytes:
    """The end of a stream that fails."""
    problem = Problem.of(error)
    exchange.progress.failed(problem)
    return b"".join(map(framing.frame, renderer.error(problem))) + framing.last


class ClosingResponse(StreamingResponse):
    """Awaits `close` when the response ends, even by an error or cancellation. `options` are StreamingResponse's."""

    def __init__(self, body: AsyncIterator[bytes], close: Callable[[], Awaitable[None]], **options: Any) -> None:
        super().__init__(body, **options)
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._close()
