"""POST /v1/chat/completions."""

from collections.abc import Iterable

from starlette.responses import JSONResponse, Response

from gateway.answers import Answer, collect, total_usage
from gateway.errors import Problem
from gateway.exchange import Exchange
from gateway.openai.envelope import Envelope, UsageOfStream, token_ids, usage_json, without_stops
from gateway.openai.errors import error_body
from gateway.openai.logprobs import TokensOfStream, chat_logprobs, shown_tokens
from gateway.openai.messages import deltas_of, message_of
from gateway.openai.parameters import chat_arguments
from gateway.openai.schemas import ChatBody
from gateway.openai.tool_choice import ToolUse, tool_use_of
from gateway.openai.tool_parser import FORMATS
from gateway.schema import parse
from gateway.streaming import SSE_DONE, Framing, Json, Streamer
from tandem import Choice, TokenEvent


async def chat_completions(exchange: Exchange) -> Response:
    """The handler."""
    return await answer_chat(exchange, parse(ChatBody, exchange.body), SSE_DONE)


async def answer_chat(exchange: Exchange, body: ChatBody, framing: Framing) -> Response:
    """Answer as a whole, or as a stream if the body wants one. Raises InvalidRequest."""
    envelope = Envelope.new("chat.completion", "chatcmpl", body.model or exchange.served_name)
    use = tool_use_of(body, FORMATS.get(exchange.tool_call_format(body.model)))
    feed = exchange.feed([chat_arguments(body, use)], body.n or 1)
    if body.stream:
        return await Streamer(framing, exchange).respond(feed, ChatChunks(body, envelope, use))
    return JSONResponse(chat_json(await collect(feed), body, envelope, use))


def chat_json(answer: Answer, body: ChatBody, envelope: Envelope, use: ToolUse | None) -> Json:
    """The whole answer."""
    usage = total_usage(without_stops(answer.choices), body.n or 1)
    return envelope.json([_choice(each, body, use) for each in answer.choices]) | {"usage": usage_json(usage)}


def _choice(choice: Choice, body: ChatBody, use: ToolUse | None) -> Json:
    tokens = shown_tokens(choice.tokens, choice.finish_reason)
    deltas = deltas_of(use)
    return {
        "index": choice.index,
        "message": message_of([*deltas.push(choice.text), *deltas.finish()]),
        "logprobs": chat_logprobs(tokens, body.top_logprobs or 0) if body.logprobs else None,
        "finish_reason": deltas.reason(choice.finish_reason),
    } | token_ids(body, choice.tokens)


class ChatChunks:
    """The answer as a stream: the role first, then text and calls, then the finish reason of each choice."""

    def __init__(self, body: ChatBody, envelope: Envelope, use: ToolUse | None) -> None:
        self._body = body
        self._deltas = [deltas_of(use) for _ in range(body.n or 1)]
        self._envelope = envelope.as_chunk()
        self._usage = UsageOfStream(body)
        self._tokens = TokensOfStream()

    def start(self) -> Iterable[Json]:
        """The role of each choice."""
        for index in range(self._body.n or 1):
            yield self._chunk(index, {"role": "assistant", "content": ""})

    def event(self, event: TokenEvent) -> Iterable[Json]:
        """Nothing for a token whose text is held back, unless its id is wanted."""
        self._usage.saw(event)
        tokens, deltas = self._tokens.shown_with(event), self._deltas[event.index]
        new = deltas.push(event.text)
        if (self._body.logprobs and tokens) or (self._body.return_token_ids and event.token):
            new = new or [{"content": ""}]
        for place, delta in enumerate(new):
            wants_logprobs = self._body.logprobs and place == 0
            logprobs = chat_logprobs(tokens, self._body.top_logprobs or 0) if wants_logprobs else None
            chunk = self._chunk(event.index, delta, logprobs)
            chunk["choices"][0] |= token_ids(self._body, (event.token,) if event.token and place == 0 else ())
            yield chunk
        if event.finish_reason is not None:
            yield from (self._chunk(event.index, delta) for delta in deltas.finish())
            yield self._chunk(event.index, {}, reason=deltas.reason(event.finish_reason))

    def end(self) -> Iterable[Json]:
        """The usage, if it was asked for."""
        return self._usage.last_chunk(self._envelope)

    def error(self, problem: Problem) -> Iterable[Json]:
        """One object, which clients raise as an error."""
        yield error_body(problem)

    def _chunk(self, index: int, delta: Json, logprobs: Json | None = None, reason: str | None = None) -> Json:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return self._envelope.json([choice]) | self._usage.of_chunk()
