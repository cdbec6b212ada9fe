"""The body of POST /v1/responses, and its translation to a chat."""

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field, model_validator

from gateway.errors import InvalidField
from gateway.openai.chat_template import joined_turns, template_values
from gateway.openai.requests import ContentPart
from gateway.openai.responses.tools import (
    Tool,
    chat_choice,
    chat_tools,
    free_text_arguments,
    invalid_value,
    name_in_chat,
)
from gateway.schema import (
    MAX_MESSAGES,
    AnyJson,
    Body,
    Count,
    Few,
    Json,
    JsonObject,
    KeepPriority,
    Many,
    Name,
    Real,
    Seed,
    refuse_chat_structures,
    require_members,
)

NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format with tools": "text.format with tools",
}
"""Members that have another name in the chat."""

_AS_IN_CHATS = (
    *("stream", "temperature", "top_p", "seed", "priority", "ttft_target"),
    *("prompt_cache_key", "prompt_cache_retention", "keep_priority", "time_to_live"),
)
_LOGPROBS = "message.output_text.logprobs"
_TURN = ("reasoning_content", "content", "tool_calls")
"""Members of an assistant's message, in the order of their items."""

_MORE_TOOLS = "additional_tools"
_ITEMS = (
    *("message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output"),
    _MORE_TOOLS,
)
_MEMBERS = {
    **dict.fromkeys(("function_call", "custom_tool_call"), ("call_id", "name")),
    **dict.fromkeys(("function_call_output", "custom_tool_call_output"), ("call_id", "output")),
}
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal")


class Item(Body):
    """An item of `input`: a message, or a part of an earlier response."""

    type: Name = "message"
    role: Name = ""
    content: str | Many[ContentPart] | None = None
    summary: Many[ContentPart] | None = None
    call_id: Name = ""
    name: Name = ""
    namespace: Name = ""
    arguments: str = ""
    input: str = ""
    output: str | Many[ContentPart] = ""
    tools: Few[Tool] | None = None

    @model_validator(mode="after")
    def _has_its_members(self) -> "Item":
        is_prompting = self.type == "message" and self.role not in ("", "assistant")
        require_members(self, *(("content",) if is_prompting else _MEMBERS.get(self.type, ())))
        return self


class TextFormat(Body):
    """The structure that holds the answer."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Name | None = None
    strict: bool | None = None
    content: JsonObject | None = Field(default=None, alias="schema")


class TextConfig(Body):
    format: TextFormat = TextFormat()


class Reasoning(Body):
    """`effort` "none" turns reasoning off, if the chat template can. Others are for templates that know efforts."""

    effort: Name | None = None


class ResponsesBody(Body):
    """Body of POST /v1/responses. The last group is extensions."""

    model: Name = ""
    input: str | Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    instructions: str | None = None
    tools: Few[Tool] | None = None
    tool_choice: AnyJson = None
    parallel_tool_calls: bool | None = None
    text: TextConfig = TextConfig()
    reasoning: Reasoning = Reasoning()
    max_output_tokens: Count | None = None
    temperature: Real | None = None
    top_p: Real | None = None
    stream: bool = False
    metadata: JsonObject | None = None
    user: Name | None = None
    top_logprobs: Count | None = None
    include: Few[Name] | None = None

    previous_response_id: Name | None = None
    conversation: AnyJson = None
    background: bool = False
    prompt: AnyJson = None  # a template that OpenAI has stored

    seed: Seed | None = None
    priority: Literal["batch", "standard", "interactive"] | None = None
    ttft_target: Real | None = None
    prompt_cache_key: Name | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    keep_priority: KeepPriority | None = None
    time_to_live: Real | None = None
    chat_template_kwargs: JsonObject | None = None

    @model_validator(mode="before")
    @classmethod
    def _has_its_own_structure(cls, data: object) -> object:
        return refuse_chat_structures(data, "use text.format, or chat completions")

    @property
    def all_tools(self) -> list[Tool]:
        """The tools of the body, and those that items of its input add."""
        items = () if isinstance(self.input, str) else self.input
        added = (tool for item in items if item.type == _MORE_TOOLS for tool in item.tools or ())
        return [*(self.tools or ()), *added]


def check_stateless(body: ResponsesBody) -> None:
    """Raise InvalidField for members that need stored responses."""
    if body.previous_response_id is not None:
        message = (
            f"Previous response with id '{body.previous_response_id[:64]}' not found. "
            "Responses are not stored here: send the whole conversation as 'input'."
        )
        raise InvalidField(message, field="previous_response_id", code="previous_response_not_found")
    unsupported = {
        "conversation": body.conversation is not None,
        "background": body.background,
        "prompt": body.prompt is not None,
    }
    for name, is_used in unsupported.items():
        if is_used:
            message = f"Unsupported parameter: '{name}' is not supported with this model."
            raise InvalidField(message, field=name, code="unsupported_parameter")


def chat_of(body: ResponsesBody) -> Json:
    """Return the members of the chat's body; null means absent. Raises InvalidField."""
    instructions = [{"role": "system", "content": body.instructions}] if body.instructions else []
    has_logprobs = body.top_logprobs is not None or _LOGPROBS in (body.include or ())
    return {
        "model": body.model,
        "logprobs": has_logprobs,
        "top_logprobs": body.top_logprobs if has_logprobs else None,
        "messages": joined_turns([*instructions, *_messages(body.input)]),
        "tools": chat_tools(body.all_tools),
        "tool_choice": chat_choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _response_format(body.text.format),
        "chat_template_kwargs": template_values(body.reasoning.effort, body.chat_template_kwargs),
        "max_completion_tokens": body.max_output_tokens,
        **{name: getattr(body, name) for name in _AS_IN_CHATS},
    }


def _messages(items: str | Iterable[Item]) -> list[Json]:
    """One message for each turn: the items of an assistant's turn (reasoning, text, calls) are joined."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[Json] = []
    for number, item in enumerate(items):
        field = f"input[{number}]"
        if item.type in ("function_call_output", "custom_tool_call_output"):
            content = _text(item.output, f"{field}.output")
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
        elif item.type == "message" and item.role != "assistant":
            messages.append({"role": item.role, "content": _text(item.content, f"{field}.content")})
        elif item.type != _MORE_TOOLS:
            _add_to_turn(messages, *_part_of_turn(item, field))
    return messages


def _part_of_turn(item: Item, field: str) -> tuple[str, object]:
    """Return the member of the assistant's message that an item becomes, and its value."""
    if item.type == "message":
        return "content", _text(item.content, f"{field}.content")
    if item.type == "reasoning":
        return "reasoning_content", _text(item.content or item.summary, f"{field}.content")
    if item.type in ("function_call", "custom_tool_call"):
        arguments = item.arguments if item.type == "function_call" else free_text_arguments(item.input)
        function = {"name": name_in_chat(item.name, item.namespace), "arguments": arguments}
        return "tool_calls", {"id": item.call_id, "type": "function", "function": function}
    raise invalid_value(item.type, _ITEMS, f"{field}.type")


def _add_to_turn(messages: list[Json], member: str, value: object) -> None:
    """Add to the assistant's last message, or begin one if nothing may follow what is there already."""
    is_open = bool(messages) and messages[-1]["role"] == "assistant"
    if is_open and member == "tool_calls":
        messages[-1][member] = [*messages[-1].get(member, ()), value]
        return
    if not is_open or any(name in messages[-1] for name in _TURN[_TURN.index(member) :]):
        messages.append({"role": "assistant"})
    messages[-1][member] = [value] if member == "tool_calls" else value


def _text(content: str | Iterable[ContentPart] | None, field: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for number, part in enumerate(content):
        if part.type not in _TEXTS:
            raise invalid_value(part.type, _TEXTS[:2], f"{field}[{number}].type")
        texts.append(part.shown)
    return "\n".join(texts)


def _response_format(text_format: TextFormat) -> Json | None:
    if text_format.type == "text":
        return None
    if text_format.type == "json_object":
        return {"type": "json_object"}
    if text_format.content is None:
        message = "Missing required parameter: 'text.format.schema'."
        raise InvalidField(message, field="text.format.schema", code="missing_required_parameter")
    return {"type": "json_schema", "json_schema": {"schema": text_format.content}}
