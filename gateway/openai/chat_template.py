"""Arguments of the chat template: a chat's messages and tools, and values for reasoning."""

import json
from collections.abc import Iterable

from gateway.errors import InvalidField
from gateway.openai.requests import ChatBody, Message
from gateway.schema import Json
from tandem import TokenizeArguments

_SYSTEM = ("system", "developer")
# OpenAI's newer role names, as chat templates know them.
_ROLES = {"developer": "system"}
_WITH_CONTENT = ("user", *_SYSTEM)
_EXTRAS = ("tool_calls", "tool_call_id", "name", "reasoning_content")


def rendering_of(body: ChatBody) -> TokenizeArguments:
    """Return the arguments of the chat template. Raises InvalidRequest."""
    return TokenizeArguments(
        messages=messages_of(body),
        tools=None if body.tool_choice == "none" else body.tools,
        chat_template_kwargs=template_values(body.reasoning_effort, body.chat_template_kwargs),
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
    )


def messages_of(body: ChatBody) -> list[Json]:
    """The messages that the chat template receives. Raises InvalidRequest for content that is not text."""
    return [_message(message, f"messages[{index}]") for index, message in enumerate(body.messages)]


def _message(message: Message, path: str) -> Json:
    """An empty list of calls counts as none. Other servers answer with it and clients send it back, and templates would
    show calls in place of the content.
    """
    extra = {name: value for name in _EXTRAS if (value := getattr(message, name)) not in (None, [])}
    if isinstance(message.reasoning, str):
        extra.setdefault("reasoning_content", message.reasoning)
    for call in extra.get("tool_calls", ()):
        _read_arguments(call)
    return extra | {"role": _ROLES.get(message.role, message.role), "content": _text(message, path)}


def _read_arguments(call: Json) -> None:
    """Replace JSON text by the parsed object, because templates serialise arguments themselves. Empty or missing text
    becomes an empty object. Invalid JSON, and values that JSON cannot hold (NaN, half a surrogate pair), stay text.
    """
    function = call.get("function")
    if isinstance(function, dict) and isinstance(function.get("arguments") or "", str):
        try:
            value = json.loads(function.get("arguments") or "{}")
            json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
        except (ValueError, RecursionError):
            return
        if isinstance(value, dict):
            call["function"] = {**function, "arguments": value}


def _text(message: Message, path: str) -> str:
    """The text of a message; `path` names it in errors. Only turns of assistants and tools may have none."""
    if message.content is None and message.role in _WITH_CONTENT:
        code = "missing_required_parameter"
        raise InvalidField(f"Missing required parameter: '{path}.content'.", field=f"{path}.content", code=code)
    if not isinstance(message.content, list):
        return message.content or ""
    for part in message.content:
        if part.type not in ("text", "refusal"):
            raise InvalidField(f"content of type {part.type[:64]!r} is not supported: only text is", field="messages")
    return "\n".join(part.shown for part in message.content)


def joined_turns(messages: Iterable[Json]) -> list[Json]:
    """Join system messages at the beginning, and consecutive user messages. A system message later in the conversation
    becomes a user message, because many templates refuse or drop it. Agents send all of these.
    """
    joined: list[Json] = []
    for message in messages:
        role = message["role"]
        if role in _SYSTEM:
            role = "system" if all(each["role"] == "system" for each in joined) else "user"
        if joined and role == joined[-1]["role"] and role in ("system", "user"):
            joined[-1] = {"role": role, "content": f"{joined[-1]['content']}\n{message['content']}"}
        else:
            joined.append({**message, "role": role})
    return joined


def template_values(effort: str | None, own_values: Json | None) -> Json | None:
    """Values for the template; the client's own take precedence. Some templates can only turn reasoning off, others
    know its effort.
    """
    if effort is None:
        return own_values
    is_on = effort != "none"
    values: Json = {"enable_thinking": is_on} | ({"reasoning_effort": effort} if is_on else {})
    return values | (own_values or {})
