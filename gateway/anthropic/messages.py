"""POST /v1/messages and /v1/messages/count_tokens. A request is a chat (gateway/openai) with another form of answer."""

from collections.abc import Iterable
from uuid import uuid4

from starlette.responses import JSONResponse, Response

from gateway.answers import SSE_NAMED_PING, drain, stream_answer
from gateway.anthropic.requests import NAMES, MessagesBody, PromptBody, chat_of
from gateway.errors import Problem, anthropic_error_body
from gateway.exchange import Exchange
from gateway.openai.answer_parser import AnswerFormat, Block, BlockAdded, BlockBegun, BlockParser, BlockStep, plan_chat
from gateway.openai.call_arguments import parsed_arguments
from gateway.openai.requests import ChatBody, ClientFieldNames, check_numbers
from gateway.openai.sdk_arguments import tokenize_arguments
from gateway.schema import Json
from tandem import FinishReason, TokenEvent, Usage

_REASONS = {"tool_calls": "tool_use", "length": "max_tokens"}


async def messages(exchange: Exchange) -> Response:
    """Answer as one message, or as events if the request says so. Raises InvalidRequest."""
    body = await exchange.parse(MessagesBody)
    check_numbers(body)
    chat = await exchange.check(ChatBody, chat_of(body))
    field_names = ClientFieldNames.of(chat).renamed(NAMES, MessagesBody)
    with field_names.translating_errors():
        arguments, answer_format = await plan_chat(exchange, chat)
        renderer = MessageEvents(
            body.model or exchange.served_name, answer_format, body.stop_sequences or (), field_names
        )
        feed = exchange.feed([arguments])
        if body.stream:
            return await stream_answer(exchange, feed, renderer, SSE_NAMED_PING)
        await drain(feed, renderer)
        return JSONResponse(renderer.message())


async def count_tokens(exchange: Exchange) -> Response:
    """Count the tokens of the prompt, which the chat template makes of messages, system and tools."""
    body = await exchange.parse(PromptBody)
    chat = await exchange.check(ChatBody, chat_of(body))
    with ClientFieldNames.of(chat).renamed(NAMES, PromptBody).translating_errors():
        arguments = tokenize_arguments(chat, exchange.settings.request_timeout_s)
        return JSONResponse({"input_tokens": len(await exchange.client.tokenize(**arguments))})


class MessageEvents:
    """Renders a stream, and keeps its message. The router includes stop sequences in the text; they are cut off here,
    because an answer names the one that ended it.
    """

    def __init__(
        self, model: str, answer_format: AnswerFormat, stop_sequences: Iterable[str], field_names: ClientFieldNames
    ) -> None:
        self._id = f"msg_{uuid4().hex}"
        self._model = model
        self._stop_sequences = tuple(stop_sequences)
        self._field_names = field_names
        self._answer = BlockParser(answer_format)
        self._num_prompt_tokens: int | None = None
        self._stop_sequence: str | None = None
        self._stop_reason: str | None = None

    def start(self) -> Iterable[Json]:
        return ()

    def event(self, event: TokenEvent) -> Iterable[Json]:
        if self._num_prompt_tokens is None:
            self._num_prompt_tokens = event.num_prompt_tokens
            yield {"type": "message_start", "message": self.message()}
        for step in self._answer.read(event, self._visible_text(event)):
            yield _block_event(step)
        if event.finish_reason is not None:
            self._stop_reason = self._reason(event.finish_reason)
            ending = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
            yield {"type": "message_delta", "delta": ending, "usage": self._usage()}

    def end(self) -> Iterable[Json]:
        yield {"type": "message_stop"}

    def error(self, problem: Problem) -> Iterable[Json]:
        yield anthropic_error_body(self._field_names.translate(problem))

    def message(self) -> Json:
        """The message so far; at the end of the stream, the whole one."""
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [_block_json(block, block.text) for block in self._answer.blocks],
            "stop_reason": self._stop_reason,
            "stop_sequence": self._stop_sequence,
            "usage": self._usage(),
        }

    def _visible_text(self, event: TokenEvent) -> str:
        if event.finish_reason is not FinishReason.STOP_SEQUENCE:
            return event.text
        matches = [stop for stop in self._stop_sequences if event.text.endswith(stop)]
        self._stop_sequence = max(matches, key=len, default=None)
        return event.text.removesuffix(self._stop_sequence or "")

    def _reason(self, reason: FinishReason) -> str:
        reason_of_chat = self._answer.reason
        if reason_of_chat in _REASONS:
            return _REASONS[reason_of_chat]
        # Without sequences of the request, it was one of the model's own, which ends a turn.
        is_stopped = reason is FinishReason.STOP_SEQUENCE and self._stop_sequences
        return "stop_sequence" if is_stopped else "end_turn"

    def _usage(self) -> Json:
        """Tokens of the prompt that came from the prefix cache are counted apart from its other tokens."""
        usage = self._answer.usage if self._answer.reason else Usage(prompt_tokens=self._num_prompt_tokens or 0)
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": self._answer.num_reasoning_tokens},
        }


def _block_event(step: BlockStep) -> Json:
    index = step.block.index
    if isinstance(step, BlockBegun):
        return {"type": "content_block_start", "index": index, "content_block": _block_json(step.block, "")}
    if not isinstance(step, BlockAdded):
        return {"type": "content_block_stop", "index": index}
    if step.block.kind == "reasoning":
        delta = {"type": "thinking_delta", "thinking": step.text}
    elif step.block.kind == "text":
        delta = {"type": "text_delta", "text": step.text}
    else:
        delta = {"type": "input_json_delta", "partial_json": step.text}
    return {"type": "content_block_delta", "index": index, "delta": delta}


def _block_json(block: Block, text: str) -> Json:
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    if block.kind == "text":
        return {"type": "text", "text": text}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": parsed_arguments(text)}
