"""`tools` and `tool_choice` of /v1/responses: what the model is offered under which names, and what its calls are.

A chat knows functions only. Functions of a group (`namespace`) have its name before theirs. A tool that takes free
text (`custom`) is a function of one string. Tools of other types are run by OpenAI, or have calls of their own form:
they are left out, and refused only where the client offers or demands nothing else.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, Self

from pydantic import model_validator

from gateway.errors import InvalidField
from gateway.openai.call_arguments import parsed_arguments
from gateway.schema import Body, Few, Json, JsonObject, Name, check, require_members

_CALLABLE = ("function", "custom")
_SERVED = (*_CALLABLE, "namespace")
_INPUT = "input"
_FREE_TEXT: Json = {"type": "object", "properties": {_INPUT: {"type": "string"}}, "required": [_INPUT]}


class InputFormat(Body):
    """The format of a custom tool's text. The model reads it in the tool's description; nothing enforces it."""

    type: Name = "text"
    syntax: Name | None = None
    definition: str | None = None


class CallableTool(Body):
    """A function, whose `parameters` are a JSON schema, or a tool that takes a text."""

    type: Name
    name: Name = ""
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None
    format: InputFormat | None = None

    @model_validator(mode="after")
    def _has_its_name(self) -> Self:
        if self.type in _CALLABLE:
            require_members(self, "name")
        return self

    def shown(self) -> Json:
        """The tool as a response repeats it."""
        if self.type == "function":
            return self.model_dump(exclude={"format"})
        return self.model_dump(exclude_none=True)


class Tool(CallableTool):
    """An entry of `tools`: one of these, a group of them, or a tool that is not served."""

    tools: Few[CallableTool] | None = None

    @property
    def offered(self) -> list[CallableTool]:
        """The tools that the model is offered in its place."""
        tools = (self.tools or ()) if self.type == "namespace" else (self,)
        return [tool for tool in tools if tool.type in _CALLABLE]

    def shown(self) -> Json:
        if self.type != "namespace":
            return CallableTool.model_validate(self.model_dump()).shown()
        group = {"type": self.type, "name": self.name, "description": self.description or ""}
        return group | {"tools": [tool.shown() for tool in self.offered]}


class _AllowedTool(Body):
    type: Name
    name: Name = ""
    namespace: Name = ""


class _Allowed(Body):
    mode: Literal["auto", "required"]
    tools: Few[_AllowedTool]


class _AllowedTools(Body):
    """Validates the member under its own name, so that errors name it."""

    tool_choice: _Allowed


@dataclass(frozen=True, slots=True)
class Callee:
    """The tool that a function of the chat stands for."""

    name: str
    namespace: str = ""
    is_custom: bool = False

    @property
    def members(self) -> Json:
        """The members that name it in items and events."""
        return {"name": self.name} | ({"namespace": self.namespace} if self.namespace else {})


def name_in_chat(name: str, namespace: str) -> str:
    return f"{namespace}__{name}" if namespace else name


def free_text_arguments(text: str) -> str:
    """The arguments of the function that stands for a custom tool."""
    return json.dumps({_INPUT: text}, ensure_ascii=False)


def free_text_of(arguments: str) -> str:
    """The text for a custom tool; all that the model wrote, if it did not use the argument's name."""
    text = parsed_arguments(arguments).get(_INPUT)
    return text if isinstance(text, str) else arguments


def callees(tools: Iterable[Tool]) -> dict[str, Callee]:
    """Return the tools by their names in the chat."""
    return {
        name_in_chat(tool.name, namespace): Callee(tool.name, namespace, is_custom=tool.type == "custom")
        for namespace, tool in _offered(tools)
    }


def chat_tools(tools: list[Tool]) -> list[Json] | None:
    """Return the chat's tools, or None without tools. Raises InvalidField if no tool of the request is served."""
    functions = {name_in_chat(tool.name, namespace): _function(tool, namespace) for namespace, tool in _offered(tools)}
    unserved = [number for number, tool in enumerate(tools) if tool.type not in _SERVED]
    if unserved and not functions:
        raise invalid_value(tools[unserved[0]].type, _SERVED, f"tools[{unserved[0]}].type")
    return list(functions.values()) or None


def chat_choice(choice: object) -> object:
    """Translate `tool_choice`: a chat names a function inside `function`, this API beside `type`."""
    if not isinstance(choice, dict):
        return choice
    kind = choice.get("type")
    if kind == "allowed_tools":
        allowed = check(_AllowedTools, {"tool_choice": choice}).tool_choice
        tools = [_named(tool) for tool in allowed.tools if tool.type in _CALLABLE]
        return {"type": kind, "allowed_tools": {"mode": allowed.mode, "tools": tools}}
    if kind not in _CALLABLE:
        raise invalid_value(str(kind), (*_CALLABLE, "allowed_tools"), "tool_choice.type")
    return _named(check(_Chosen, {"tool_choice": choice}).tool_choice)


class _Chosen(Body):
    tool_choice: _AllowedTool


def invalid_value(value: str, supported: Iterable[str], field: str) -> InvalidField:
    names = ", ".join(f"'{name}'" for name in supported)
    message = f"Invalid value: '{value[:64]}'. Supported values are: {names}."
    return InvalidField(message, field=field, code="invalid_value")


def _offered(tools: Iterable[Tool]) -> Iterator[tuple[str, CallableTool]]:
    """Yield each tool with its namespace, "" outside of groups."""
    for entry in tools:
        for tool in entry.offered:
            yield "" if tool is entry else entry.name, tool


def _named(tool: _AllowedTool) -> Json:
    return {"type": "function", "function": {"name": name_in_chat(tool.name, tool.namespace)}}


def _function(tool: CallableTool, namespace: str) -> Json:
    is_custom = tool.type == "custom"
    members = {
        "name": name_in_chat(tool.name, namespace),
        "description": _with_format(tool) if is_custom else tool.description,
        "parameters": _FREE_TEXT if is_custom else tool.parameters,
    }
    return {"type": "function", "function": {name: value for name, value in members.items() if value is not None}}


def _with_format(tool: CallableTool) -> str | None:
    """The description, followed by the grammar of the text if there is one."""
    if tool.format is None or not tool.format.definition:
        return tool.description
    grammar = f"`{_INPUT}` must fit this grammar ({tool.format.syntax or 'lark'}):\n{tool.format.definition}"
    return "\n\n".join(part for part in (tool.description, grammar) if part)
