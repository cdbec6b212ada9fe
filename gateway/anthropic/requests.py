"""Bodies of Anthropic's requests, and their translation to a chat."""

import json
from collections.abc import Iterable, Iterator
from typing import Annotated, Literal

from pydantic import Field, model_validator

from gateway.anthropic.tools import CacheControl, Tool, ToolChoice, chat_tools
from gateway.errors import InvalidField
from gateway.openai.chat_template import joined_turns
from gateway.openai.requests import ContentPart
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
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "response_format with tools": "output_config.format with tools",
    "prompt_cache_key": "session_id",
}
"""Members that have another name in the chat."""

_MEMBERS = {"text": ("text",), "tool_use": ("id", "name"), "tool_result": ("tool_use_id",)}
_TTL_S = {"5m": 300.0, "1h": 3600.0}


class Block(Body):
    """A content block: text, thinking, tool_use or tool_result."""

    cache_control: CacheControl | None = None
    type: Name
    text: str = ""
    thinking: str = ""
    id: Name = ""
    name: Name = ""
    input: JsonObject | None = None
    tool_use_id: Name = ""
    content: str | Many[ContentPart] | None = None

    @model_validator(mode="after")
    def _has_its_members(self) -> "Block":
        require_members(self, *_MEMBERS.get(self.type, ()))
        return self


class SystemPart(ContentPart):
    cache_control: CacheControl | None = None


class Turn(Body):
    """One turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Many[Block]

    @property
    def blocks(self) -> list[Block]:
        return [Block(type="text", text=self.content)] if isinstance(self.content, str) else self.content


class Thinking(Body):
    """Whether the model reasons before it answers. Budgets have no effect."""

    type: Literal["enabled", "adaptive", "disabled"]


class OutputFormat(Body):
    """The structure that holds the answer."""

    type: Literal["json_schema"]
    content: JsonObject = Field(alias="schema")


class OutputConfig(Body):
    """Options of the answer. `effort` has no effect."""

    format: OutputFormat | None = None


class PromptBody(Body):
    """Body of POST /v1/messages/count_tokens. `chat_template_kwargs` is an extension."""

    model: Name = ""
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: str | Many[SystemPart] | None = None
    tools: Few[Tool] | None = None
    tool_choice: ToolChoice | None = None
    mcp_servers: AnyJson = None  # whose tools Anthropic's server would call
    container: AnyJson = None  # in which Anthropic's server would run code, with its skills
    thinking: Thinking | None = None
    cache_control: CacheControl | None = None
    chat_template_kwargs: JsonObject | None = None


class MessagesBody(PromptBody):
    """Body of POST /v1/messages. The second group is extensions."""

    max_tokens: Count
    stop_sequences: Few[str] | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # what output_config.format was called in Anthropic's beta
    stream: bool = False
    temperature: Real | None = None
    top_p: Real | None = None
    top_k: Count | None = None

    seed: Seed | None = None
    priority: Literal["batch", "standard", "interactive"] | None = None
    ttft_target: Real | None = None
    session_id: Name | None = None
    keep_priority: KeepPriority | None = None
    time_to_live: Real | None = None

    @model_validator(mode="before")
    @classmethod
    def _has_its_own_structure(cls, data: object) -> object:
        return refuse_chat_structures(data, "use output_config.format, or OpenAI's chat completions")


def chat_of(body: PromptBody) -> Json:
    """Return the members of the chat's body; null means absent. Raises InvalidRequest."""
    last = body.messages[-1]
    chat: Json = {
        "model": body.model,
        "messages": joined_turns([*_system(body), *(message for turn in body.messages for message in _messages(turn))]),
        # Anthropic continues a conversation that ends with the assistant's text.
        "continue_final_message": last.role == "assistant" or None,
        "chat_template_kwargs": _template_values(body),
        **chat_tools(body.tools or [], body.tool_choice or ToolChoice(type="auto")),
    }
    if body.mcp_servers and chat["tools"] is None:
        raise InvalidField("mcp_servers is not supported: only tools of your own are", field="mcp_servers")
    if body.container:
        raise InvalidField("container is not supported: the server runs no code", field="container")
    if isinstance(body, MessagesBody):
        stop = body.stop_sequences or None
        chat |= {"max_tokens": body.max_tokens, "stop": stop, "include_stop_str_in_output": stop and True}
        structure = (body.output_config and body.output_config.format) or body.output_format
        if structure is not None:
            chat["response_format"] = {"type": "json_schema", "json_schema": {"schema": structure.content}}
        shared = ("stream", "temperature", "top_p", "top_k", "seed", "priority", "ttft_target")
        chat |= {name: getattr(body, name) for name in shared} | _cache_hints(body)
    return chat


def _cache_hints(body: MessagesBody) -> Json:
    """Tandem's own members take precedence over `cache_control`, whose longest lifetime counts."""
    system = body.system if isinstance(body.system, list) else []
    marks = [
        body.cache_control,
        *(part.cache_control for part in system),
        *(tool.cache_control for tool in body.tools or ()),
        *(block.cache_control for turn in body.messages for block in turn.blocks),
    ]
    seconds = max((_TTL_S[mark.ttl] for mark in marks if mark is not None), default=None)
    return {
        "prompt_cache_key": body.session_id,
        "keep_priority": body.keep_priority or ("high" if seconds else None),
        "time_to_live": seconds if body.time_to_live is None else body.time_to_live,
    }


def _system(body: PromptBody) -> list[Json]:
    text = body.system if isinstance(body.system, str) else _joined(body.system or (), "system")
    return [{"role": "system", "content": text}] if text else []


def _template_values(body: PromptBody) -> Json | None:
    """Translate `thinking` for templates of models with optional reasoning. The client's own values take precedence."""
    if body.thinking is None:
        return body.chat_template_kwargs
    return {"enable_thinking": body.thinking.type != "disabled"} | (body.chat_template_kwargs or {})


def _messages(turn: Turn) -> Iterator[Json]:
    if not turn.content and turn.role != "assistant":
        raise InvalidField(f"messages: a turn of the {turn.role} has no content", field="messages")
    return _assistant(turn.blocks) if turn.role == "assistant" else _prompting(turn.role, turn.blocks)


def _prompting(role: str, blocks: Iterable[Block]) -> Iterator[Json]:
    """A turn of the user or the system: one message for each tool_result, and one for the texts between them."""
    texts: list[str] = []
    for block in blocks:
        if block.type == "text":
            texts.append(block.text)
        elif block.type == "tool_result":
            if texts:
                yield {"role": role, "content": "\n".join(texts)}
                texts = []
            content = block.content if isinstance(block.content, str) else _joined(block.content or (), "messages")
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
        else:
            raise _unsupported(block.type, "messages")
    if texts:
        yield {"role": role, "content": "\n".join(texts)}


def _assistant(blocks: Iterable[Block]) -> Iterator[Json]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Json] = []
    for block in blocks:
        if block.type == "text":
            texts.append(block.text)
        elif block.type == "thinking":
            thoughts.append(block.thinking)
        elif block.type == "tool_use":
            function = {"name": block.name, "arguments": json.dumps(block.input or {}, ensure_ascii=False)}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif block.type != "redacted_thinking":
            raise _unsupported(block.type, "messages")
    yield {
        "role": "assistant",
        "content": "\n".join(texts),
        "reasoning_content": "\n".join(thoughts) or None,
        "tool_calls": calls or None,
    }


def _joined(parts: Iterable[ContentPart], field: str) -> str:
    texts = []
    for part in parts:
        if part.type != "text":
            raise _unsupported(part.type, field)
        texts.append(part.text)
    return "\n".join(texts)


def _unsupported(kind: str, field: str) -> InvalidField:
    return InvalidField(f"{field}: content of type {kind[:64]!r} is not supported: only text is", field=field)
