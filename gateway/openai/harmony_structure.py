"""Structures of answers in harmony (harmony.py): grammars, because an answer is more than its final message."""

import json
import re
from collections.abc import Iterator

from gateway.openai.tool_choice import ToolUse, arguments_schema, in_lark, place_schema
from mesh.domain.json_text import parse_json
from tandem import GenerateArguments, InvalidRequest

_STRUCTURES = ("json_schema", "json_object", "regex", "choice", "grammar")
_FINAL = '<|channel|> "final" <|message|>'
_THOUGHT = r'<|channel|> "analysis" <|message|> /(.|\n)+/ <|end|> <|start|> "assistant"'
_SLASH = re.compile(r"\\.|/|\n", re.DOTALL)


def in_harmony(arguments: GenerateArguments, tool_use: ToolUse | None) -> GenerateArguments:
    """Arguments for a model that answers in harmony: with its marks, and with a structure around them if the arguments
    have one. Raises InvalidRequest for a structure that is a grammar.
    """
    arguments = arguments | GenerateArguments(skip_special_tokens=False, include_eos=False)
    rules: list[str] = []
    is_forced = tool_use is not None and tool_use.is_forced
    if not is_forced:
        if (answer := _answer(arguments)) is None:
            return arguments
        rules.append(f"{_FINAL} {answer}")
    rules += _calls(tool_use) if tool_use is not None else ()
    grammar = f"start: thought? message\nthought: {_THOUGHT}\nmessage: " + "\n    | ".join(rules) + "\n"
    without: GenerateArguments = dict.fromkeys(_STRUCTURES)  # type: ignore[assignment]
    return arguments | without | GenerateArguments(grammar=grammar)


def _answer(arguments: GenerateArguments) -> str | None:
    """The structure of the final message, in Lark's notation; None for any text."""
    if arguments.get("grammar") is not None:
        raise InvalidRequest("this model answers in harmony, which a grammar does not fit: use json_schema or regex")
    if (choice := arguments.get("choice")) is not None:
        return "(" + " | ".join(map(json.dumps, choice)) + ")"
    if (regex := arguments.get("regex")) is not None:
        return "/" + _SLASH.sub(lambda part: {"/": r"\/", "\n": r"\n"}.get(part[0], part[0]), regex) + "/"
    schema: object = {"type": "object"} if arguments.get("json_object") else arguments.get("json_schema")
    if schema is None:
        return None
    try:
        schema = parse_json(schema) if isinstance(schema, str) else schema
    except ValueError:
        raise InvalidRequest("the JSON schema is not valid JSON") from None
    return in_lark(place_schema(schema, "", "#", is_open=True))


def _calls(use: ToolUse) -> Iterator[str]:
    """One call of any of the functions: after it the model waits for the result."""
    for function in use.functions:
        arguments = in_lark(arguments_schema(function, "#"))
        head = json.dumps(f"commentary to=functions.{function.name} ")
        yield f'<|channel|> {head} <|constrain|> "json" <|message|> {arguments}'
