"""POST /v1/chat/completions."""

from collections.abc import Iterable
from dataclasses import dataclass

from starlette.responses import JSONResponse, Response

from gateway.answers import SSE_DONE, Answer, Framing, Streamer, collect, total_usage
from gateway.errors import Problem, openai_error_body
from gateway.exchange import Exchange
from gateway.openai.messages import Deltas, ReasoningReader, build_message, make_deltas
from gateway.openai.parameters import chat_arguments
from gateway.openai.requests import ChatBody, ClientFieldNames, check_ranges
from gateway.openai.responses import (
    Envelope,
    StreamTokens,
    StreamUsage,
    chat_logprobs,
    token_ids,
    usage_json,
    visible_tokens,
    without_stop_tokens,
)
from gateway.openai.tool_choice import ToolUse, parse_tool_use
from gateway.openai.tool_parser import TOOL_FORMATS
from gateway.schema import Json, structure_arguments
from tandem import Choice, TokenEvent


async def chat_completions(exchange: Exchange) -> Response:
    return await answer_chat(exchange, await exchange.parse(ChatBody), SSE_DONE)


async def answer_chat(exchange: Exchange, body: ChatBody, framing: Framing) -> Response:
    """Answer as one body, or as a stream if the request says so. Raises InvalidRequest."""
    check_ranges(body)
    field_names = ClientFieldNames.of(body)
    envelope = Envelope.new("chat.completion", "chatcmpl", body.model or exchange.served_name)
    with field_names.translating_errors():
        tool_use = parse_tool_use(body, TOOL_FORMATS.get(exchange.tool_call_format(body.model)))
        reading = Reading(tool_use, _reasoning_parser(exchange, body, tool_use))
        feed = exchange.feed([chat_arguments(body, tool_use)], body.n or 1)
        if body.stream:
            return await Streamer(framing, exchange).respond(feed, ChatChunks(body, envelope, reading, field_names))
        return JSONResponse(chat_json(await collect(feed), body, envelope, reading))


def _reasoning_parser(exchange: Exchange, body: ChatBody, tool_use: ToolUse | None) -> str:
    """Return the parser to use: none for structured output, which has no reasoning before it."""
    if not body.separate_reasoning or structure_arguments(body) or (tool_use is not None and tool_use.is_forced):
        return "none"
    return exchange.reasoning_parser(body.model)


@dataclass(frozen=True, slots=True)
class Reading:
    """The parsers of the model's text: for tool calls, and for reasoning."""

    tool_use: ToolUse | None
    reasoning_parser: str

    def deltas(self, *, in_reasoning: bool = False) -> Deltas:
        """Return a new parser for one choice. `in_reasoning`: the prompt ends inside a reasoning block."""
        if self.reasoning_parser == "none":
            return make_deltas(self.tool_use)
        begins_within = in_reasoning or self.reasoning_parser == "deepseek_r1"
        return make_deltas(self.tool_use, ReasoningReader(begins_within=begins_within))


def chat_json(answer: Answer, body: ChatBody, envelope: Envelope, reading: Reading) -> Json:
    usage = total_usage(without_stop_tokens(answer.choices), body.n or 1)
    choices = [_choice(choice, body, reading.deltas(in_reasoning=answer.in_reasoning)) for choice in answer.choices]
    return envelope.json(choices) | {"usage": usage_json(usage)}


def _choice(choice: Choice, body: ChatBody, deltas: Deltas) -> Json:
    tokens = visible_tokens(choice.tokens, choice.finish_reason)
    return {
        "index": choice.index,
        "message": build_message([*deltas.push(choice.text), *deltas.finish()]),
        "logprobs": chat_logprobs(tokens, body),
        "finish_reason": deltas.reason(choice.finish_reason),
    } | token_ids(body, choice.tokens)


class ChatChunks:
    """Renders a stream: per choice the role, then text and tool calls, then the finish reason."""

    def __init__(self, body: ChatBody, envelope: Envelope, reading: Reading, field_names: ClientFieldNames) -> None:
        self._body = body
        self._field_names = field_names
        self._reading = reading
        self._deltas = [reading.deltas() for _ in range(body.n or 1)]
        self._envelope = envelope.as_chunk()
        self._usage = StreamUsage(body)
        self._tokens = StreamTokens()

    def start(self) -> Iterable[Json]:
        for index in range(self._body.n or 1):
            yield self._chunk(index, {"role": "assistant", "content": ""})

    def event(self, event: TokenEvent) -> Iterable[Json]:
        """Render one event. A token whose text is held back gives no chunk, unless token ids are requested."""
        self._usage.add(event)
        if event.in_reasoning:  # set on the first event only, and true for all choices
            self._deltas = [self._reading.deltas(in_reasoning=True) for _ in self._deltas]
        tokens, deltas = self._tokens.take(event), self._deltas[event.index]
        new_deltas = deltas.push(event.text)
        if (self._body.logprobs and tokens) or (self._body.return_token_ids and event.token):
            new_deltas = new_deltas or [{"content": ""}]
        for number, delta in enumerate(new_deltas):
            logprobs = chat_logprobs(tokens, self._body) if number == 0 else None
            chunk = self._chunk(event.index, delta, logprobs)
            chunk["choices"][0] |= token_ids(self._body, (event.token,) if event.token and number == 0 else ())
            yield chunk
        if event.finish_reason is not None:
            yield from (self._chunk(event.index, delta) for delta in deltas.finish())
            yield self._chunk(event.index, {}, reason=deltas.reason(event.finish_reason))

    def end(self) -> Iterable[Json]:
        return self._usage.last_chunk(self._envelope)

    def error(self, problem: Problem) -> Iterable[Json]:
        yield openai_error_body(self._field_names.translate(problem))

    def _chunk(self, index: int, delta: Json, logprobs: Json | None = None, reason: str | None = None) -> Json:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return self._envelope.json([choice]) | self._usage.chunk_member()
