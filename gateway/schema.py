"""Request bodies: JSON to checked values, with error messages that a client can act on.

An invalid body must not cost more than a valid one. The values of a large body are counted before it is parsed; every
list has a maximum length, and its check stops at the first invalid element; every number has a range. `parse` and
`check` may still take tens of milliseconds for a large body, so `Exchange` runs them on a thread.
"""

import codecs
import re
from collections.abc import Collection
from itertools import takewhile
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import from_json

from gateway.errors import InvalidField
from mesh.domain.request import MAX_LOGIT_BIAS, MAX_NUM_CHOICES, MAX_SEED
from tandem import GenerateArguments, InvalidRequest

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")

Json = dict[str, Any]
"""A JSON object."""

MAX_PROMPTS = 4096
MAX_MESSAGES = 2048
_MAX_NODES = 16_384

_MAX_SHOWN = 3
_MAX_ERRORS = 64
_MAX_SHOWN_CHARS = 300
# Members of a body. Not pydantic's names for the alternatives of a union, such as `list[str]`, nor long keys.
_MEMBER = re.compile(r"(?!(?:str|int|float|bool|dict|list)$)[a-z_]{1,64}")

# pydantic's name for an alternative with a validator of its own.
_VALIDATED = re.compile(r"function-after\[\w{1,64}\(\), ([\w\[\],]{1,64})\]")

# Maximum number of strings, lists and objects in a body, and of all its values. Only lists of token ids have a
# legitimate reason to be long: half a million ids are four times the longest prompt of today's models.
_MAX_COMPOUNDS = 65_536
_MAX_VALUES = 524_288
# Smaller bodies cannot hold enough values to be expensive.
SMALL_BODY_BYTES = 64 << 10


def _check_num_values(value: T) -> T:
    """Raise ValueError if JSON of any shape, such as a tool's schema, has more than `_MAX_NODES` values."""
    num_left = _MAX_NODES
    stack: list[object] = [value]
    while stack:
        node = stack.pop()
        children: Collection[object] = (
            node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
        )
        num_left -= len(children)
        if num_left < 0:
            raise ValueError(f"should have at most {_MAX_NODES:,} values")
        stack.extend(children)
    return value


def _check_num_entries(value: T) -> T:
    """Check the length before the entries: pydantic would collect two errors for each invalid one."""
    if isinstance(value, dict) and len(value) > MAX_LOGIT_BIAS:
        raise ValueError(f"has {len(value)} entries, at most {MAX_LOGIT_BIAS} are allowed")
    return value


def _check_digits(key: T) -> T:
    """Refuse other spellings that Python reads as a number, such as "1_2", " 12" and "012": two keys could be one
    token.
    """
    if isinstance(key, str) and not (key.isascii() and key.isdigit() and (key == "0" or key[0] != "0")):
        raise ValueError("should be the number of a token")
    return key


# Numbers in the range of the protocol's fields; the router checks narrower ranges.
Count = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Seed = Annotated[int, Field(ge=-(2**63), lt=MAX_SEED + 1)]
Real = Annotated[float, Field(ge=-1e9, le=1e9)]
Choices = Annotated[int, Field(ge=1, le=MAX_NUM_CHOICES)]
TokenId = Annotated[int, Field(ge=0, lt=2**32)]
Name = Annotated[str, Field(max_length=1024)]

# Generous: the router allows fewer stop strings, bad words and the like, and its error states the limit.
Few = Annotated[list[T], Field(max_length=256, fail_fast=True)]
Many = Annotated[list[T], Field(max_length=MAX_PROMPTS, fail_fast=True)]
TokenIds = Annotated[list[TokenId], Field(max_length=_MAX_VALUES, fail_fast=True)]
Bias = Annotated[dict[Annotated[TokenId, BeforeValidator(_check_digits)], Real], BeforeValidator(_check_num_entries)]
JsonObject = Annotated[dict[str, Any], AfterValidator(_check_num_values)]
AnyJson = Annotated[Any, AfterValidator(_check_num_values)]
KeepPriority = Literal["low", "normal", "high"]
# A JSON schema, as an object or as JSON text.
Schema = JsonObject | str


class Body(BaseModel):
    """Base of all bodies. Unknown members are ignored: clients of newer servers send them. Null means absent."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: object) -> object:
        return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data


_CHAT_STRUCTURES = (
    *("response_format", "structured_outputs"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
)


def refuse_chat_structures(data: object, instead: str) -> object:
    """Return the body, for use in validators. Raise InvalidField for members that only chats have: ignoring a requested
    structure would let the answer be any text.
    """
    members = data if isinstance(data, dict) else {}
    for name in _CHAT_STRUCTURES:
        if members.get(name) is not None:
            raise InvalidField(f"{name} is not supported here: {instead}", field=name)
    return data


def require_members(body: Body, *names: str) -> None:
    """Raise ValueError, for use in validators, if a member is absent that only this type of body needs."""
    if missing := [name for name in names if name not in body.model_fields_set]:
        raise ValueError(f"should have {missing[0]}")


def parse(schema: type[M], body: bytes) -> M:
    """Parse and check a JSON body. Raises InvalidRequest that names the invalid members."""
    return check(schema, read_json(body))


def read_json(body: bytes) -> object:
    """Parse JSON of any shape. Raises InvalidRequest if it is invalid or has too many values."""
    if len(body) > SMALL_BODY_BYTES:
        _check_size(body)
    try:
        return from_json(body.removeprefix(codecs.BOM_UTF8), allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None


def check(schema: type[M], payload: object) -> M:
    """Check a parsed payload. Raises InvalidRequest that names the invalid members."""
    if not isinstance(payload, dict):
        raise InvalidRequest("the body must be a JSON object")
    try:
        return schema.model_validate(payload)
    except ValidationError as error:
        raise _explain(error) from None


def _check_size(body: bytes) -> None:
    """Count structure without parsing: 25 ms for 8 MiB of the worst body, which takes 1 s to parse."""
    unescaped = body.replace(rb"\\", b"").replace(rb"\"", b"")
    num_compounds = unescaped.count(b'"') // 2
    if num_compounds <= _MAX_COMPOUNDS:
        structure = b"".join(unescaped.split(b'"')[::2])  # everything outside of strings
        num_compounds += structure.count(b"[") + structure.count(b"{")
        if structure.count(b",") > _MAX_VALUES:
            raise InvalidRequest(f"the body has more than {_MAX_VALUES:,} values")
    if num_compounds > _MAX_COMPOUNDS:
        raise InvalidRequest(f"the body has more than {_MAX_COMPOUNDS:,} strings, lists and objects")


def _explain(error: ValidationError) -> InvalidField:
    """Describe the first errors without quoting the input, which may be long or secret."""
    if error.error_count() > _MAX_ERRORS:
        return InvalidField(f"the body has {error.error_count():,} errors")
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    messages: dict[str, str] = {}
    for problem in problems:
        path = _VALIDATED.sub(r"\1", ".".join(map(str, problem["loc"])))[:_MAX_SHOWN_CHARS]
        message = str(problem["msg"])[:_MAX_SHOWN_CHARS]
        messages.setdefault(path, f"{path}: {message}" if path else message)
    return InvalidField("; ".join(list(messages.values())[:_MAX_SHOWN]), field=_member_path(problems[0]["loc"]))


def _member_path(path: tuple[int | str, ...]) -> str | None:
    """The path of a member in the body, such as messages[0].role."""
    parts = takewhile(lambda part: isinstance(part, int) or _MEMBER.fullmatch(part), path)
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return name.removeprefix(".") or None


class NamedSchema(Body):
    """OpenAI's `json_schema`. The schema is enforced whether `strict` is set or not."""

    name: Name = ""
    strict: bool = False
    content: Schema | None = Field(default=None, alias="schema")


class ResponseFormat(Body):
    """OpenAI's `response_format`. With json_object llama.cpp's clients send a `schema`; TGI's send it as `value`, and
    huggingface_hub makes that of OpenAI's json_schema.
    """

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    content: Schema | None = Field(default=None, validation_alias=AliasChoices("schema", "value"))


class StructuredOutputs(Body):
    """vLLM's member. Unlike elsewhere, unknown members are refused: they may be the structure. The last group has no
    effect: there is one backend, and its JSON is compact.
    """

    model_config = ConfigDict(extra="forbid")

    json_content: Schema | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Many[str] | None = None
    grammar: str | None = None
    json_object: bool = False

    disable_fallback: bool = False
    disable_any_whitespace: bool = False
    disable_additional_properties: Literal[False] = False

    def arguments(self) -> list[GenerateArguments]:
        """Return the SDK arguments of its structures. Raises InvalidField for none: the answer would be free text."""
        candidates = [
            GenerateArguments(json_schema=self.json_content),
            GenerateArguments(json_object=self.json_object or None),
            GenerateArguments(regex=self.regex),
            GenerateArguments(choice=self.choice),
            GenerateArguments(grammar=self.grammar),
        ]
        requested = [arguments for arguments in candidates if None not in arguments.values()]
        if not requested:
            message = "structured_outputs must have json, regex, choice, grammar or json_object: it has no structure"
            raise InvalidField(message, field="structured_outputs")
        return requested


class StructuredBody(Body):
    """All members that request a structured output, as OpenAI, vLLM and TGI name them; at most one may be used.

    The router checks whether a structure is supported.
    """

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Many[str] | None = None
    guided_grammar: str | None = None


def structure_arguments(body: StructuredBody) -> GenerateArguments:
    """Return the one SDK argument that requests a structure, or none. Raises InvalidRequest for more than one."""
    candidates = [
        *_response_format(body.response_format),
        *(body.structured_outputs.arguments() if body.structured_outputs is not None else ()),
        GenerateArguments(json_schema=body.guided_json),
        GenerateArguments(regex=body.guided_regex),
        GenerateArguments(choice=body.guided_choice),
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
