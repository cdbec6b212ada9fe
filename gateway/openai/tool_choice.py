"""`tools` and `tool_choice` of a chat: which functions the model may or must call, and the schema that forces it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import Field

from gateway.openai.harmony import HARMONY_FORMATS, HarmonyFormat, HarmonyParser
from gateway.openai.requests import ChatBody
from gateway.openai.tagged_calls import TaggedCallParser
from gateway.openai.tagged_formats import TAGGED_FORMATS, TaggedFormat
from gateway.openai.tool_parser import FORCED_FORMAT, TOOL_FORMATS, ToolCallParser, ToolFormat
from gateway.schema import Body, Json, Name, check
from tandem import GenerateArguments, InvalidRequest

CallFormat = ToolFormat | TaggedFormat | HarmonyFormat
CallParser = ToolCallParser | TaggedCallParser | HarmonyParser
CALL_FORMATS: Mapping[str, CallFormat] = MappingProxyType({**TOOL_FORMATS, **TAGGED_FORMATS, **HARMONY_FORMATS})
"""The formats that a chat template, or the operator, may name."""

# A bound for models that would never end the list.
_MAX_FORCED_CALLS = 16
# As in answers whose only structure is a schema: white space between JSON tokens is one blank or none.
_COMPACT = {"x-guidance": {"whitespace_pattern": " ?"}}
# Keywords by which a schema itself, or another schema, determines the allowed properties.
_COMBINING = frozenset(
    {"additionalProperties", "unevaluatedProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref"}
)
# Keywords whose members are named by the client, and keywords whose values are no schemas.
_BY_NAME = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependentRequired", "dependencies"}
)
_VALUES = frozenset({"enum", "const"})
_ANNOTATIONS = frozenset({"title", "description", "examples", "default", "$comment"})
# Keywords in whose schemas properties are forbidden, too.
_CLOSED = frozenset({"properties", "$defs", "definitions", "items", "prefixItems"})


class Function(Body):
    """A function that the model may call. `parameters` is a JSON schema."""

    name: Annotated[Name, Field(min_length=1)]
    parameters: Json | None = None


class Tool(Body):
    """An entry of `tools`, or the value of `tool_choice`."""

    type: Literal["function"] = "function"
    function: Function


class _Tools(Body):
    """Validates the two members under their own names, so that errors name them."""

    tools: Annotated[tuple[Tool, ...], Field(fail_fast=True)] = ()
    tool_choice: Tool | None = None


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The functions of a request, and how the model may call them.

    `style`: the format in which the model writes calls, None if its text is not parsed for calls. `is_forced`: the
    answer must be a call. `is_parallel`: it may be several.
    """

    functions: tuple[Function, ...]
    style: CallFormat | None
    is_forced: bool = False
    is_parallel: bool = True

    @property
    def num_id_chars(self) -> int:
        """Length of call ids. Some chat templates require a fixed length."""
        return (self.style or FORCED_FORMAT).num_id_chars

    @property
    def has_control_marks(self) -> bool:
        """True if unforced calls have marks that may be control tokens."""
        return self.style is not None and self.style.has_control_marks

    def parser(self) -> CallParser | None:
        """Return a new parser for one answer, or None if its text is not parsed for calls. In harmony even an answer
        without tools needs a parser, so it is not made here.
        """
        style = FORCED_FORMAT if self.is_forced else self.style
        if isinstance(style, TaggedFormat):
            return TaggedCallParser(style, {function.name: function.parameters or {} for function in self.functions})
        if isinstance(style, ToolFormat):
            return ToolCallParser(style, [function.name for function in self.functions])
        return None

    def structure(self) -> GenerateArguments:
        """Return the structured-output argument that forces a call, or nothing."""
        if not self.is_forced:
            return GenerateArguments()
        return GenerateArguments(json_schema=_calls_schema(self, is_list=self.is_parallel))

    def calls_or_answer(self, schema: Json) -> str | None:
        """Return a grammar, in Lark's notation, for calls as the model writes them, or else JSON that fits the schema.
        None if the model's format cannot be written in one.
        """
        if not isinstance(self.style, ToolFormat) or self.style.around is None:
            return None
        first, between, last = (f"{json.dumps(mark)} " if mark else "" for mark in self.style.around)
        more = f"({between}call){{0,{_MAX_FORCED_CALLS - 1}}} " if self.is_parallel else ""
        call = in_lark(_calls_schema(self, is_list=False))
        answer = in_lark(place_schema(schema, "", "#", is_open=True))
        return f"start: answer | {first}call {more}{last}\nanswer: {answer}\ncall: {call}\n"


def parse_tool_use(body: ChatBody, style: CallFormat | None) -> ToolUse | None:
    """Return None if no function may be called. `style`: the model's call format, if known. Raises InvalidRequest."""
    functions = tuple(tool.function for tool in check(_Tools, {"tools": body.tools}).tools)
    if not functions or body.tool_choice == "none":
        if body.tool_choice not in (None, "auto", "none"):
            raise InvalidRequest("tool_choice needs tools")
        return None
    if body.tool_choice in (None, "auto") and style is None:
        return None  # `tools` still goes to the chat template
    is_parallel = body.parallel_tool_calls is not False
    if body.tool_choice in (None, "auto"):
        return ToolUse(functions, style, is_parallel=is_parallel)
    if body.tool_choice == "required":
        return ToolUse(functions, style, is_forced=True, is_parallel=is_parallel)
    if not isinstance(body.tool_choice, dict):
        raise InvalidRequest("tool_choice must be auto, none, required or the name of a function")
    choice = check(_Tools, {"tool_choice": body.tool_choice}).tool_choice
    name = choice.function.name if choice is not None else ""
    chosen = tuple(function for function in functions if function.name == name)
    if not chosen:
        raise InvalidRequest(f"tool_choice: there is no function {name[:64]!r} in tools")
    return ToolUse(chosen[:1], style, is_forced=True, is_parallel=False)


def in_lark(schema: object) -> str:
    """The schema as a grammar embeds it, for compact JSON. A `%json` in it would look like another schema."""
    compact = {**schema, **_COMPACT} if isinstance(schema, dict) else schema
    return "%json " + json.dumps(compact, separators=(",", ":")).replace("%", r"\u0025")


def _calls_schema(use: ToolUse, *, is_list: bool) -> Json:
    """Return the JSON schema of one call, or of a list of calls. Each function's parameters are under $defs."""
    key = (use.style or FORCED_FORMAT).arguments_key
    definitions: Json = {}
    calls: list[Json] = []
    for number, function in enumerate(use.functions):
        home = f"#/$defs/{number}"
        definitions[str(number)] = arguments_schema(function, home)
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": function.name}, key: {"$ref": home}},
                "required": ["name", key],
                "additionalProperties": False,
            }
        )
    call = calls[0] if len(calls) == 1 else {"anyOf": calls}
    if is_list:
        call = {"type": "array", "items": call, "minItems": 1, "maxItems": _MAX_FORCED_CALLS}
    return {**call, "$defs": definitions}


def arguments_schema(function: Function, home: str) -> object:
    """The schema of a function's arguments, moved to `home`: without `$id`, to which its references would lead."""
    parameters = function.parameters or {"type": "object", "properties": {}}
    base = str(parameters.get("$id", "")).rstrip("#")
    return place_schema({key: part for key, part in parameters.items() if key != "$id"}, base, home)


def place_schema(schema: object, base: str, home: str, *, is_open: bool = False) -> object:
    """Move a schema, or a part of it, to the place `home` of another one: its references to itself, with its `base` or
    without, are rewritten. Annotations are dropped, which only take room.

    Properties that it does not name are forbidden unless it allows them or `is_open`: a weak model would add some
    without end. Branches of a combination stay open, because each may name properties of the others.
    """
    if isinstance(schema, list):
        return [place_schema(item, base, home, is_open=is_open) for item in schema]
    if not isinstance(schema, dict):
        return schema
    placed: Json = {}
    for key, value in schema.items():
        is_part_open = is_open or key not in _CLOSED
        if key in _BY_NAME and isinstance(value, dict):
            placed[key] = {name: place_schema(part, base, home, is_open=is_part_open) for name, part in value.items()}
        elif key == "$ref" and isinstance(value, str):
            own = value.removeprefix(base) or "#"
            placed[key] = home + own[1:] if own == "#" or own.startswith("#/") else value
        elif key in _VALUES:
            placed[key] = value
        elif key not in _ANNOTATIONS:
            placed[key] = place_schema(value, base, home, is_open=is_part_open)
    if not is_open and isinstance(placed.get("properties"), dict) and not _COMBINING & placed.keys():
        placed["additionalProperties"] = False
    return placed
