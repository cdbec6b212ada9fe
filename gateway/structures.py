"""What an answer has to look like, in the words of OpenAI, vLLM and TGI. What can be kept to is the router's to say."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from gateway.schema import Body
from tandem import GenerateArguments, InvalidRequest

# What a schema is: an object, or JSON text.
Schema = dict[str, Any] | str


class NamedSchema(Body):
    """OpenAI's: a schema with a name. It is kept to whether it is `strict` or not."""

    name: str = ""
    content: Schema | None = Field(default=None, alias="schema")


class ResponseFormat(Body):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: NamedSchema | None = None


class StructuredOutputs(Body):
    """vLLM's `structured_outputs`."""

    json_content: Schema | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool = False


class StructuredBody(Body):
    """Members with which a request says it."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


def structure_arguments(body: StructuredBody) -> GenerateArguments:
    """One argument, or none. Raises InvalidRequest."""
    vllm = body.structured_outputs or StructuredOutputs()
    wanted = [
        *_response_format(body.response_format or ResponseFormat()),
        GenerateArguments(json_schema=vllm.json_content),
        GenerateArguments(json_schema=body.guided_json),
        GenerateArguments(json_object=vllm.json_object or None),
        GenerateArguments(regex=vllm.regex),
        GenerateArguments(regex=body.guided_regex),
        GenerateArguments(choice=vllm.choice),
        GenerateArguments(choice=body.guided_choice),
        GenerateArguments(grammar=vllm.grammar),
        GenerateArguments(grammar=body.guided_grammar),
    ]
    given = [each for each in wanted if any(value is not None for value in each.values())]
    if len(given) > 1:
        raise InvalidRequest("an answer can have one structure: response_format, structured_outputs or one of guided_*")
    return given[0] if given else GenerateArguments()


def _response_format(wanted: ResponseFormat) -> list[GenerateArguments]:
    if wanted.type == "json_object":
        return [GenerateArguments(json_object=True)]
    if wanted.type == "json_schema":
        if wanted.json_schema is None or wanted.json_schema.content is None:
            raise InvalidRequest("response_format.json_schema.schema is missing")
        return [GenerateArguments(json_schema=wanted.json_schema.content)]
    return []


def tgi_grammar(grammar: Mapping[str, Any] | None) -> GenerateArguments:
    """TGI's `grammar`: {type: json, json_schema or regex, value}. Raises InvalidRequest."""
    if grammar is None:
        return GenerateArguments()
    kind, value = grammar.get("type"), grammar.get("value")
    if kind == "regex" and isinstance(value, str):
        return GenerateArguments(regex=value)
    if kind == "json_schema" and isinstance(value, dict):
        value = value.get("schema")
    if kind in ("json", "json_schema") and isinstance(value, dict | str):
        return GenerateArguments(json_schema=value)
    raise InvalidRequest("`grammar` must have a `type` of json, json_schema or regex, and a `value` that fits it")
