"""Which functions a model may, must or must not call."""

from dataclasses import dataclass
from typing import Any, Literal

from gateway.openai.schemas import ChatBody
from gateway.openai.tool_parser import FORCED, ToolCallParser, ToolFormat
from gateway.schema import Body, check
from tandem import GenerateArguments, InvalidRequest

Json = dict[str, Any]

# Bounds what a model that finds no end can write.
_MOST_FORCED_CALLS = 16


class Function(Body):
    """What is known of a function. `parameters` is a JSON schema."""

    name: str
    parameters: Json | None = None


class Tool(Body):
    """An entry of `tools`, or the one that `tool_choice` names."""

    type: Literal["function"] = "function"
    function: Function


class _Tools(Body):
    """What is checked of a request, with the names that its members have there."""

    tools: tuple[Tool, ...] = ()
    tool_choice: Tool | None = None


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Functions of a request, how calls of them are found in what the model writes (None: they are not), and whether
    there must be one.
    """

    functions: tuple[Function, ...]
    style: ToolFormat | None
    is_forced: bool = False
    is_parallel: bool = True

    @property
    def num_id_chars(self) -> int:
        """How long ids of calls are: some templates want it just so."""
        return (self.style or FORCED).num_id_chars

    def parser(self) -> ToolCallParser | None:
        """For one answer."""
        style = FORCED if self.is_forced else self.style
        return None if style is None else ToolCallParser(style, [function.name for function in self.functions])

    def structure(self) -> GenerateArguments:
        """What forces the model to call."""
        if not self.is_forced:
            return GenerateArguments()
        return GenerateArguments(json_schema=_calls_schema(self))


def tool_use_of(body: ChatBody, style: ToolFormat | None) -> ToolUse | None:
    """None if nothing may be called. `style`: how the model writes calls, if that is known. Raises InvalidRequest."""
    if not body.tools or body.tool_choice == "none":
        if body.tool_choice not in (None, "auto", "none"):
            raise InvalidRequest("tool_choice needs tools")
        return None
    if body.tool_choice in (None, "auto") and style is None:
        return None  # what is in `tools` then is the template's affair
    functions = tuple(tool.function for tool in check(_Tools, {"tools": body.tools}).tools)
    is_parallel = body.parallel_tool_calls is not False
    if body.tool_choice in (None, "auto"):
        return ToolUse(functions, style)
    if body.tool_choice == "required":
        return ToolUse(functions, style, is_forced=True, is_parallel=is_parallel)
    if not isinstance(body.tool_choice, dict):
        raise InvalidRequest("tool_choice must be auto, none, required or the name of a function")
    choice = check(_Tools, {"tool_choice": body.tool_choice}).tool_choice
    wanted = choice.function.name if choice is not None else ""
    named = tuple(function for function in functions if function.name == wanted)
    if not named:
        raise InvalidRequest(f"tool_choice: there is no function {wanted[:64]!r} in tools")
    return ToolUse(named[:1], style, is_forced=True, is_parallel=False)


def _calls_schema(use: ToolUse) -> Json:
    """One call, or several. Schemas of parameters keep their own definitions, under $defs."""
    key = (use.style or FORCED).arguments_key
    definitions: Json = {}
    calls: list[Json] = []
    for place, function in enumerate(use.functions):
        home = f"#/$defs/{place}"
        definitions[str(place)] = _moved(function.parameters or {"type": "object"}, home)
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": function.name}, key: {"$ref": home}},
                "required": ["name", key],
                "additionalProperties": False,
            }
        )
    call = calls[0] if len(calls) == 1 else {"anyOf": calls}
    if use.is_parallel:
        call = {"type": "array", "items": call, "minItems": 1, "maxItems": _MOST_FORCED_CALLS}
    return {**call, "$defs": definitions}


def _moved(schema: Any, home: str) -> Any:
    """The schema with its references to itself as they have to be where it is put."""
    if isinstance(schema, list):
        return [_moved(each, home) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: home + value[1:]
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value, home)
        for key, value in schema.items()
    }
