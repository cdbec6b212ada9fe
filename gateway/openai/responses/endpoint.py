"""POST /v1/responses, and its input_tokens. A request is a chat (gateway/openai) with another form of answer."""

import time
from collections.abc import Iterable
from uuid import uuid4

from starlette.responses import JSONResponse, Response

from gateway.answers import SSE_NAMED, drain, stream_answer
from gateway.errors import Problem, openai_error_body
from gateway.exchange import Exchange
from gateway.openai.answer_parser import AnswerFormat, Block, BlockAdded, BlockBegun, BlockParser, BlockStep, plan_chat
from gateway.openai.requests import ChatBody, ClientFieldNames, check_numbers
from gateway.openai.responses.logprobs import TextLogprobs
from gateway.openai.responses.requests import NAMES, ResponsesBody, chat_of, check_stateless
from gateway.openai.responses.tools import callees, free_text_of
from gateway.openai.sdk_arguments import tokenize_arguments
from gateway.schema import Json
from tandem import TokenEvent

_PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc", "custom": "ctc"}
_TEXT_EVENTS = {
    "reasoning": "response.reasoning_text",
    "text": "response.output_text",
    "call": "response.function_call_arguments",
    "custom": "response.custom_tool_call_input",
}


async def create_response(exchange: Exchange) -> Response:
    """Answer as one response, or as events if the request says so. Raises InvalidRequest."""
    body, chat = await _read(exchange)
    field_names = ClientFieldNames.of(chat).renamed(NAMES, ResponsesBody)
    with field_names.translating_errors():
        arguments, answer_format = await plan_chat(exchange, chat)
        applied = {name: arguments.get(name) for name in ("temperature", "top_p") if getattr(body, name) is None}
        body = body.model_copy(update=applied)  # the response says what the server has chosen
        logprobs = TextLogprobs(chat)
        renderer = ResponseEvents(body, body.model or exchange.served_name, answer_format, field_names, logprobs)
        feed = exchange.feed([arguments])
        if body.stream:
            return await stream_answer(exchange, feed, renderer, SSE_NAMED)
        await drain(feed, renderer)
        return JSONResponse(renderer.response())


async def count_input_tokens(exchange: Exchange) -> Response:
    """Count the tokens of the prompt, as the response's `usage` would. Raises InvalidRequest."""
    _, chat = await _read(exchange)
    with ClientFieldNames.of(chat).renamed(NAMES, ResponsesBody).translating_errors():
        arguments = tokenize_arguments(chat, exchange.settings.request_timeout_s)
        num_tokens = len(await exchange.client.tokenize(**arguments))
        return JSONResponse({"object": "response.input_tokens", "input_tokens": num_tokens})


async def _read(exchange: Exchange) -> tuple[ResponsesBody, ChatBody]:
    """Return the body and its chat. Raises InvalidRequest."""
    body = await exchange.parse(ResponsesBody)
    check_stateless(body)
    check_numbers(body)
    return body, await exchange.check(ChatBody, chat_of(body))


class ResponseEvents:
    """Renders a stream, and keeps its response. Each block of the answer is an output item."""

    def __init__(
        self,
        body: ResponsesBody,
        model: str,
        answer_format: AnswerFormat,
        field_names: ClientFieldNames,
        logprobs: TextLogprobs,
    ) -> None:
        self._body = body
        self._model = model
        self._field_names = field_names
        self._logprobs = logprobs
        self._callees = callees(body.all_tools)
        self._answer = BlockParser(answer_format)
        self._created_s = int(time.time())
        self._id = f"resp_{uuid4().hex}"
        self._item_ids: list[str] = []
        self._num_events = 0
        self._error: Json | None = None

    def start(self) -> Iterable[Json]:
        for kind in ("created", "in_progress"):
            yield self._numbered(f"response.{kind}", response=self.response())

    def event(self, event: TokenEvent) -> Iterable[Json]:
        self._logprobs.begin_event(event)
        for step in self._answer.read(event, event.text):
            yield from self._item_events(step)

    def end(self) -> Iterable[Json]:
        response = self.response()
        yield self._numbered(f"response.{response['status']}", response=response)

    def error(self, problem: Problem) -> Iterable[Json]:
        """A failed response for clients that read events, and the error for those that raise it."""
        error = openai_error_body(self._field_names.translate(problem))["error"]
        self._error = {"code": "server_error", "message": problem.message}
        yield self._numbered("response.failed", response=self.response())
        own = {name: error[name] for name in ("code", "message", "param")}  # the event's, as the API documents it
        yield self._numbered("error", **own, error=error)

    def response(self) -> Json:
        """The response so far; at the end of the stream, the whole one."""
        status = self._status()
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_s,
            "status": status,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._model,
            "output": [self._item(block, is_done=True) for block in self._answer.blocks],
            "usage": self._usage() if self._answer.reason else None,
            "store": False,
            "previous_response_id": None,
            **_request_members(self._body),
        }

    def _status(self) -> str:
        if self._error is not None:
            return "failed"
        if not self._answer.reason:
            return "in_progress"
        return "incomplete" if self._answer.reason == "length" else "completed"

    def _item_events(self, step: BlockStep) -> Iterable[Json]:
        """The input of a custom tool comes as one delta, when all of it is there."""
        block, kind = step.block, self._kind(step.block)
        position = {"output_index": block.index}
        if isinstance(step, BlockBegun):
            self._item_ids.append(f"{_PREFIXES[kind]}_{uuid4().hex}")
            yield self._numbered("response.output_item.added", item=self._item(block, is_done=False), **position)
        item_id = self._item_ids[block.index]
        inside = position | {"item_id": item_id} | ({} if block.kind == "call" else {"content_index": 0})
        if isinstance(step, BlockBegun):
            if block.kind != "call":
                yield self._numbered("response.content_part.added", part=_part(block, "", []), **inside)
        elif isinstance(step, BlockAdded):
            entries = self._logprobs.of_step(step)
            logprobs: Json = {"logprobs": entries} if kind == "text" else {}
            if kind != "custom":
                yield self._numbered(f"{_TEXT_EVENTS[kind]}.delta", delta=step.text, **inside, **logprobs)
        else:
            logprobs = {"logprobs": self._logprobs.of_block(block)} if kind == "text" else {}
            content = self._called(block) if block.kind == "call" else {"text": block.text}
            if kind == "custom":
                yield self._numbered(f"{_TEXT_EVENTS[kind]}.delta", delta=content["input"], **inside)
            yield self._numbered(f"{_TEXT_EVENTS[kind]}.done", **content, **inside, **logprobs)
            if block.kind != "call":
                yield self._numbered("response.content_part.done", part=self._whole(block), **inside)
            yield self._numbered("response.output_item.done", item=self._item(block, is_done=True), **position)

    def _kind(self, block: Block) -> str:
        return "custom" if block.kind == "call" and self._callees[block.name].is_custom else block.kind

    def _called(self, block: Block) -> Json:
        """The members of a call that name its tool and hold its arguments or text."""
        callee = self._callees[block.name]
        content = {"input": free_text_of(block.text)} if callee.is_custom else {"arguments": block.text}
        return callee.members | content

    def _numbered(self, kind: str, **members: object) -> Json:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **members}

    def _item(self, block: Block, *, is_done: bool) -> Json:
        """Render an output item, empty unless `is_done`. The length limit leaves the last item incomplete."""
        is_last = block is self._answer.blocks[-1]
        status = "in_progress"
        if is_done:
            status = "incomplete" if is_last and self._answer.reason == "length" else "completed"
        item: Json = {"id": self._item_ids[block.index], "status": status}
        content = [self._whole(block)] if is_done else []
        if block.kind == "reasoning":
            return item | {"type": "reasoning", "summary": [], "content": content}
        if block.kind == "text":
            return item | {"type": "message", "role": "assistant", "content": content}
        called = self._called(block)
        if not is_done:
            called |= {name: "" for name in ("arguments", "input") if name in called}
        kind = "custom_tool_call" if "input" in called else "function_call"
        return item | {"type": kind, "call_id": block.call_id, **called}

    def _whole(self, block: Block) -> Json:
        return _part(block, block.text, self._logprobs.of_block(block))

    def _usage(self) -> Json:
        usage = self._answer.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._answer.num_reasoning_tokens},
            "total_tokens": usage.total_tokens,
        }


def _part(block: Block, text: str, logprobs: list[Json]) -> Json:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _request_members(body: ResponsesBody) -> Json:
    """Members of the request that its response repeats."""
    tools = [tool.shown() for tool in body.all_tools if tool.offered]
    text_format = body.text.format.model_dump(by_alias=True, exclude_none=True)
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": body.reasoning.effort, "summary": None},
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": text_format},
        "tool_choice": body.tool_choice or "auto",
        "tools": tools,
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }
