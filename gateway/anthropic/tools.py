"""`tools` and `tool_choice` of Anthropic's requests.

Tools of Anthropic's own types have no schema in the request. The client runs two of them, whose schemas are here.
Anthropic runs the others, or they need pictures: they are left out, and refused only if the client offers or demands
nothing else.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from pydantic import model_validator

from gateway.schema import Body, Json, JsonObject, Name, require_members
from tandem import InvalidRequest

_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_EMPTY: Json = {"type": "object", "properties": {}}
_TEXT: Json = {"type": "string"}
_LINE: Json = {"type": "integer"}
_OF_CLIENTS: Mapping[str, tuple[str, Json]] = MappingProxyType(
    {
        "bash_": (
            "Runs a command in a shell that keeps its state, and returns what it prints. `restart` begins a new shell.",
            {"type": "object", "properties": {"command": _TEXT, "restart": {"type": "boolean"}}},
        ),
        "text_editor_": (
            "Views and edits files. `view` shows a file or a folder, or the lines of `view_range`; `create` writes "
            "`file_text`; `str_replace` replaces `old_str`, which must occur once, by `new_str`; `insert` puts "
            "`insert_text` behind line `insert_line`.",
            {
                "type": "object",
                "properties": {
                    "command": {"type": "string", "enum": ["view", "create", "str_replace", "insert"]},
                    "path": _TEXT,
                    "view_range": {"type": "array", "items": _LINE},
                    **dict.fromkeys(("file_text", "old_str", "new_str", "insert_text"), _TEXT),
                    "insert_line": _LINE,
                },
                "required": ["command", "path"],
            },
        ),
    }
)
"""Descriptions and schemas, by the beginnings of types: the rest is a date."""


class CacheControl(Body):
    """A mark: the prompt up to here is worth caching for `ttl`. Tandem applies it to the whole prompt."""

    ttl: Literal["5m", "1h"] = "5m"


class Tool(Body):
    """A function that the model may call. `input_schema` is a JSON schema."""

    type: Name = "custom"
    name: Name
    description: str | None = None
    input_schema: JsonObject | None = None
    cache_control: CacheControl | None = None

    def in_chat(self) -> Json | None:
        """The chat's function; None for a tool that is not served."""
        if self.type == "custom":
            description, schema = self.description or "", self.input_schema or _EMPTY
        else:
            known = [entry for prefix, entry in _OF_CLIENTS.items() if self.type.startswith(prefix)]
            if not known:
                return None
            description, schema = known[0]
        function = {"name": self.name, "description": description, "parameters": schema}
        return {"type": "function", "function": function}


class ToolChoice(Body):
    """Whether the model may call functions (auto, none), must call one (any), or must call the named one (tool)."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name = ""
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _has_its_name(self) -> "ToolChoice":
        if self.type == "tool":
            require_members(self, "name")
        return self


def chat_tools(tools: list[Tool], choice: ToolChoice) -> Json:
    """The chat's members about tools. Raises InvalidRequest."""
    functions = [function for tool in tools if (function := tool.in_chat()) is not None]
    demanded = [tool for tool in tools if not functions or (choice.type == "tool" and tool.name == choice.name)]
    if refused := [tool for tool in demanded if tool.in_chat() is None]:
        raise InvalidRequest(f"tools: type {refused[0].type[:64]!r} is not supported: only tools of your own are")
    named_tool = {"type": "function", "function": {"name": choice.name}}
    return {
        "tools": functions or None,
        "tool_choice": named_tool if choice.type == "tool" else _TOOL_CHOICES[choice.type],
        "parallel_tool_calls": False if choice.disable_parallel_tool_use else None,
    }
