"""Structured output as OpenAI, vLLM and TGI request it. The router checks whether a structure is supported."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from gateway.errors import InvalidField
from gateway.schema import Body, JsonObject, Many, Name
from tandem import GenerateArguments, InvalidRequest

# A JSON schema, as an object or as JSON text.
Schema = JsonObject | str


class NamedSchema(Body):
    """OpenAI's `json_schema`. The schema is enforced whether `strict` is set or not."""

    name: Name = ""
    strict: bool = False
    content: Schema | None = Field(default=None, alias="schema")


class ResponseFormat(Body):
    """OpenAI's `response_format`. A `schema` beside json_object is llama.cpp's extension."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    content: Schema | None = Field(default=None, alias="schema")


class StructuredOutputs(Body):
    json_content: Schema | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Many[str] | None = None
    grammar: str | None = None
    json_object: bool = False


class StructuredBody(Body):
    """All members that request a structure; at most one may be used."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Many[str] | None = None
    guided_grammar: str | None = None


def structure_arguments(body: StructuredBody) -> GenerateArguments:
    """Return the one SDK argument that requests a structure, or none. Raises InvalidRequest for more than one."""
    vllm = body.structured_outputs or StructuredOutputs()
    candidates = [
        *_response_format(body.response_format),
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
    requested = [arguments for arguments in candidates if any(value is not None for value in arguments.values())]
    if len(requested) > 1:
        raise InvalidRequest("an answer can have one structure: response_format, structured_outputs or one of guided_*")
    return requested[0] if requested else GenerateArguments()


def _response_format(response_format: ResponseFormat | None) -> list[GenerateArguments]:
    if response_format is None or response_format.type == "text":
        return []
    if response_format.type == "json_object" and response_format.content is not None:
        return [GenerateArguments(json_schema=response_format.content)]
    if response_format.type == "json_object":
        return [GenerateArguments(json_object=True)]
    if response_format.json_schema is None or response_format.json_schema.content is None:
        message = "Missing required parameter: 'response_format.json_schema.schema'."
        raise InvalidField(message, field="response_format.json_schema.schema", code="missing_required_parameter")
    return [GenerateArguments(json_schema=response_format.json_schema.content)]


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
