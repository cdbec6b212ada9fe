"""POST /v1/chat/completions."""

from collections.abc import Iterable

from starlette.responses import JSONResponse, Response

from gateway.answers import SSE_DONE, Answer, Framing, collect, stream_answer, total_usage
from gateway.errors import Problem, openai_error_body
from gateway.exchange import Exchange
from gateway.openai.answer_parser import AnswerFormat, AnswerParser, plan_chat
from gateway.openai.call_reader import CallArguments, CallBegun, Piece, Text, Thought
from gateway.openai.completion_members import (
    Envelope,
    StreamTokens,
    StreamUsage,
    chat_logprobs,
    token_ids,
    usage_json,
    visible_tokens,
    without_stop_tokens,
)
from gateway.openai.requests import ChatBody, ClientFieldNames, check_ranges
from gateway.schema import Json
from tandem import Choice, TokenEvent


async def chat_completions(exchange: Exchange) -> Response:
    return await answer_chat(exchange, await exchange.parse(ChatBody), SSE_DONE)


async def answer_chat(exchange: Exchange, body: ChatBody, framing: Framing) -> Response:
    """Answer as one body, or as a stream if the request says so. Raises InvalidRequest."""
    check_ranges(body)
    field_names = ClientFieldNames.of(body)
    envelope = Envelope.new("chat.completion", "chatcmpl", body.model or exchange.served_name)
    with field_names.translating_errors():
        arguments, answer_format = await plan_chat(exchange, body)
        feed = exchange.feed([arguments], body.n or 1)
        if body.stream:
            renderer = ChatChunks(body, envelope, answer_format, field_names)
            return await stream_answer(exchange, feed, renderer, framing)
        return JSONResponse(chat_json(await collect(feed), body, envelope, answer_format))


def chat_json(answer: Answer, body: ChatBody, envelope: Envelope, answer_format: AnswerFormat) -> Json:
    usage = total_usage(without_stop_tokens(answer.choices), body.n or 1)
    choices = [
        _choice(choice, body, answer_format.parser(in_reasoning=answer.in_reasoning)) for choice in answer.choices
    ]
    return envelope.json(choices) | {"usage": usage_json(usage)}


def _choice(choice: Choice, body: ChatBody, parser: AnswerParser) -> Json:
    tokens = visible_tokens(choice)
    return {
        "index": choice.index,
        "message": build_message([*parser.push(choice.text), *parser.finish(choice.finish_reason)]),
        "logprobs": chat_logprobs(tokens, body),
        "finish_reason": parser.reason(choice.finish_reason),
    } | token_ids(body, choice.tokens)


def build_message(pieces: Iterable[Piece]) -> Json:
    """The message of a whole answer."""
    text = reasoning = ""
    calls: dict[int, Json] = {}
    for piece in pieces:
        if isinstance(piece, Text):
            text += piece.text
        elif isinstance(piece, Thought):
            reasoning += piece.text
        elif isinstance(piece, CallBegun):
            calls[piece.index] = _call_json(piece)
        else:
            calls[piece.index]["function"]["arguments"] += piece.text
    content = text if text or not (calls or reasoning) else None
    message: Json = {"role": "assistant", "content": content, "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    return message | ({"tool_calls": list(calls.values())} if calls else {})


def _call_json(call: CallBegun) -> Json:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": ""}}


def delta_json(piece: Piece) -> Json:
    """A piece as the `delta` of a chunk."""
    if isinstance(piece, Text):
        return {"content": piece.text}
    if isinstance(piece, Thought):
        return {"reasoning_content": piece.text}
    if isinstance(piece, CallArguments):
        return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}
    return {"tool_calls": [{"index": piece.index} | _call_json(piece)]}


class ChatChunks:
    """Renders a stream: per choice the role, then text and tool calls, then the finish reason."""

    def __init__(
        self, body: ChatBody, envelope: Envelope, answer_format: AnswerFormat, field_names: ClientFieldNames
    ) -> None:
        self._body = body
        self._field_names = field_names
        self._format = answer_format
        self._parsers = [answer_format.parser() for _ in range(body.n or 1)]
        self._envelope = envelope.as_chunk()
        self._usage = StreamUsage(body)
        self._tokens = StreamTokens()
        self._shows_roles_late = self._usage.is_continuous  # with the first event, which tells the prompt's tokens

    def start(self) -> Iterable[Json]:
        return () if self._shows_roles_late else self._roles()

    def _roles(self) -> Iterable[Json]:
        use = self._format.tool_use
        # As with OpenAI: an empty text begins a part of text in clients such as the AI SDK, and a forced call has none.
        content = None if use is not None and use.is_forced else ""
        for index in range(self._body.n or 1):
            yield self._chunk(index, {"role": "assistant", "content": content})

    def event(self, event: TokenEvent) -> Iterable[Json]:
        """Render one event. A token whose text is held back gives no chunk, unless token ids are requested."""
        self._usage.add_prompt(event)
        if self._shows_roles_late:
            self._shows_roles_late = False
            yield from self._roles()
        self._usage.add(event)
        if event.in_reasoning:  # set on the first event only, and true for all choices
            self._parsers = [self._format.parser(in_reasoning=True) for _ in self._parsers]
        tokens, parser = self._tokens.take(event), self._parsers[event.index]
        deltas = list(map(delta_json, parser.push(event.text)))
        if (self._body.logprobs and tokens) or (self._body.return_token_ids and event.token):
            deltas = deltas or [{"content": ""}]
        for number, delta in enumerate(deltas):
            logprobs = chat_logprobs(tokens, self._body) if number == 0 else None
            chunk = self._chunk(event.index, delta, logprobs)
            chunk["choices"][0] |= token_ids(self._body, (event.token,) if event.token and number == 0 else ())
            yield chunk
        if event.finish_reason is not None:
            yield from (self._chunk(event.index, delta_json(piece)) for piece in parser.finish(event.finish_reason))
            yield self._chunk(event.index, {}, reason=parser.reason(event.finish_reason))

    def end(self) -> Iterable[Json]:
        return self._usage.last_chunk(self._envelope)

    def error(self, problem: Problem) -> Iterable[Json]:
        yield openai_error_body(self._field_names.translate(problem))

    def _chunk(self, index: int, delta: Json, logprobs: Json | None = None, reason: str | None = None) -> Json:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return self._envelope.json([choice]) | self._usage.chunk_member()
