"""Bodies of OpenAI requests, with vLLM's extensions, and validation errors in OpenAI's words.

OpenAI's own ranges are checked here, with OpenAI's messages and codes. The router checks everything else. Its messages
use internal names (`num_choices`, `max_new_tokens`), which are translated to the names in the client's request.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import Field, model_validator

from gateway.errors import CONTEXT_LENGTH_EXCEEDED, InvalidField, Problem
from gateway.openai.foreign_members import translate_members
from gateway.schema import (
    MAX_MESSAGES,
    AnyJson,
    Bias,
    Body,
    Count,
    Few,
    JsonObject,
    KeepPriority,
    Many,
    Name,
    Real,
    StructuredBody,
    TokenIds,
    check,
    require_members,
)
from mesh.domain.request import MAX_NUM_CHOICES, MAX_SEED, MAX_TOP_LOGPROBS
from tandem import InvalidRequest

_MAX_DIGITS = 24
_RANGES: Mapping[str, tuple[int, int | None]] = MappingProxyType(
    {
        "temperature": (0, 2),
        "top_p": (0, 1),
        "presence_penalty": (-2, 2),
        "frequency_penalty": (-2, 2),
        "n": (1, MAX_NUM_CHOICES),
        "best_of": (1, MAX_NUM_CHOICES),
        "max_tokens": (1, None),
        "max_completion_tokens": (1, None),
        "max_output_tokens": (1, None),
        "logprobs": (0, MAX_TOP_LOGPROBS),
        "top_logprobs": (0, MAX_TOP_LOGPROBS),
        "seed": (-(2**63), MAX_SEED),
    }
)
_LENGTH_LIMITS = ("max_total_tokens", "max_input_length")
_CONTEXT = "the model's context length"
# The member at the beginning of one of the router's messages.
_SUBJECT = re.compile(r"(?:each of |each |the )?(([a-z_]+)(?:\[\d+\]|\.[a-z_]+)*)")
_REFUSED = " cannot be used: "
_NAME = re.compile(r"(?<![.\w])(?:chat\.messages|[a-z_]+)")


# Wide enough that check_ranges reports a seed out of range, in OpenAI's words.
_Seed = Annotated[int, Field(ge=-(2**127), lt=2**127)]


class StreamOptions(Body):
    """The reports of usage in a stream: in a final chunk, or in every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class SamplingBody(StructuredBody):
    """Members of both kinds of request. The first group is OpenAI's, the second is extensions. Those that only other
    servers know are in `foreign_members.py`.
    """

    model: Name = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Count | None = None
    temperature: Real | None = None
    top_p: Real | None = None
    presence_penalty: Real | None = None
    frequency_penalty: Real | None = None
    logit_bias: Bias | None = None
    seed: _Seed | None = None
    stop: str | Few[str] | None = None
    prompt_cache_key: Name | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None

    top_k: Count | None = None
    min_p: Real | None = None
    repetition_penalty: Real | None = None
    min_tokens: Count | None = None
    stop_token_ids: Few[Count] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    typical_p: Real | None = None
    bad_words: Few[str] | None = None
    truncate_prompt_tokens: Count | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    use_beam_search: bool = False
    priority: Literal["batch", "standard", "interactive"] | None = None
    ttft_target: Real | None = None
    keep_priority: KeepPriority | None = None
    time_to_live: Real | None = None
    return_token_ids: bool = False

    @model_validator(mode="before")
    @classmethod
    def _with_our_names(cls, data: object) -> object:
        return translate_members(data, cls.model_fields) if isinstance(data, dict) else data


class CompletionBody(SamplingBody):
    prompt: str | Many[str] | TokenIds | Many[TokenIds]
    max_tokens: Count | None = 16
    echo: bool = False
    logprobs: Count | None = None
    suffix: str | None = None
    best_of: Count | None = None
    add_special_tokens: bool = True

    @property
    def scores_only(self) -> bool:
        """True if the request only scores its prompt: the prompt is echoed, and nothing is generated."""
        return self.max_tokens == 0 and self.echo

    @property
    def can_stream(self) -> bool:
        """False for options that need a complete answer: scores only, and best_of."""
        return not self.scores_only and self.best_of in (None, self.n or 1)


class ContentPart(Body):
    """A part of a message's content. Only text is supported, and what a model has said in refusal."""

    type: Name
    text: str = ""
    refusal: str = ""

    @model_validator(mode="after")
    def _has_its_text(self) -> "ContentPart":
        if self.type.endswith("text"):
            require_members(self, "text")
        return self

    @property
    def shown(self) -> str:
        """The text that the chat template gets."""
        return self.refusal if self.type == "refusal" else self.text


class Message(Body):
    """One turn of the conversation. `reasoning` is another name of `reasoning_content`, if it is a text."""

    role: Name
    content: str | Many[ContentPart] | None = None
    tool_calls: Few[JsonObject] | None = None
    tool_call_id: Name | None = None
    name: Name | None = None
    reasoning_content: str | None = None
    reasoning: AnyJson = None


class _Function(Body):
    name: Name


class _Tool(Body):
    type: Literal["function"] = "function"
    function: _Function


class _Allowed(Body):
    mode: Literal["auto", "required"]
    tools: Few[_Tool]


class _AllowedChoice(Body):
    allowed_tools: _Allowed


class _AllowedTools(Body):
    """Validates the member under its own name, so that errors name it."""

    tool_choice: _AllowedChoice


class ChatBody(SamplingBody):
    messages: Annotated[list[Message], Field(max_length=MAX_MESSAGES, fail_fast=True)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Count | None = None
    tools: Few[JsonObject] | None = None
    tool_choice: AnyJson = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: JsonObject | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    separate_reasoning: bool = True
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    add_special_tokens: Literal[False] = False  # the chat template decides

    @model_validator(mode="before")
    @classmethod
    def _with_allowed_tools(cls, data: object) -> object:
        """Leave the tools of a tool_choice "allowed_tools", and its mode."""
        choice = data.get("tool_choice") if isinstance(data, dict) else None
        if not isinstance(data, dict) or not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
            return data
        allowed = check(_AllowedTools, {"tool_choice": choice}).tool_choice.allowed_tools
        tools = data.get("tools")
        tools = {_function_name(tool): tool for tool in tools} if isinstance(tools, list) else {}
        if missing := [tool.function.name for tool in allowed.tools if tool.function.name not in tools]:
            message = f"tool_choice: there is no function {missing[0][:64]!r} in tools"
            raise InvalidField(message, field="tool_choice")
        return data | {"tools": [tools[tool.function.name] for tool in allowed.tools], "tool_choice": allowed.mode}


def _function_name(tool: object) -> object:
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def check_ranges(body: SamplingBody) -> None:
    """Raise InvalidField for values that OpenAI refuses."""
    if body.stream_options is not None and not body.stream:
        message = "The 'stream_options' parameter is only allowed when 'stream' is enabled."
        raise InvalidField(message, field="stream_options")
    if isinstance(body, ChatBody) and not body.messages:
        message = "Invalid 'messages': empty array. Expected an array with minimum length 1."
        raise InvalidField(message, field="messages", code="empty_array")
    check_numbers(body)


def check_numbers(body: Body) -> None:
    """Raise InvalidField for numbers that are out of OpenAI's ranges."""
    for name, (low, high) in _RANGES.items():
        value = getattr(body, name, None)
        if value is None or isinstance(value, bool):
            continue
        low = 0 if name == "max_tokens" and isinstance(body, CompletionBody) and body.echo else low
        if value < low:
            raise _out_of_range(name, value, "below minimum", f">= {low}")
        if high is not None and value > high:
            raise _out_of_range(name, value, "above maximum", f"<= {high}")


def _out_of_range(name: str, value: float, side: str, expected: str) -> InvalidField:
    kind = "integer" if isinstance(value, int) else "decimal"
    value_text = str(value)[:_MAX_DIGITS] if isinstance(value, int) else f"{value:g}"
    message = f"Invalid '{name}': {kind} {side} value. Expected a value {expected}, but got {value_text} instead."
    code = f"{kind}_{side.replace('imum', '').replace(' ', '_')}_value"
    return InvalidField(message, field=name, code=code)


@dataclass(frozen=True, slots=True)
class ClientFieldNames:
    """Translates names in the router's messages to the members of one request. `members` are the body's own."""

    names: Mapping[str, str]
    members: frozenset[str]

    @classmethod
    def of(cls, body: SamplingBody) -> "ClientFieldNames":
        """Build the translation for a body. A structure has the name of the member that requested it."""
        limit = "max_tokens"
        if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
            limit = "max_completion_tokens"
        names = {
            "num_choices": "n",
            "max_new_tokens": limit,
            "min_new_tokens": "min_tokens",
            "chat.messages": "messages",
            "token_ids": "prompt",
            "prompt_logprobs": "echo",
            "max_total_tokens": _CONTEXT,
            "max_input_length": _CONTEXT,
            "session_id": "prompt_cache_key",
            **_names_of_structure(body),
        }
        if isinstance(body, CompletionBody):
            names["top_logprobs"] = "logprobs"
        return cls(names, frozenset(type(body).model_fields))

    def renamed(self, names: Mapping[str, str], body: type[Body]) -> "ClientFieldNames":
        """Translate to the members of `body`, from which the chat was made. `names`: from the chat's members."""
        translated = {inner: names.get(name, name) for inner, name in self.names.items()}
        # A chat's prompt is made of its messages. The `prompt` of /v1/responses is another thing: a stored template.
        return ClientFieldNames({**names, **translated}, frozenset(body.model_fields) - {"prompt"})

    def translate(self, problem: Problem) -> Problem:
        """Translate a problem that is the client's fault; return any other unchanged."""
        if problem.field is not None or problem.row.openai.status != 400:
            return problem
        code = CONTEXT_LENGTH_EXCEEDED if any(name in problem.message for name in _LENGTH_LIMITS) else problem.code
        # A compiler's message about a structure quotes the structure, whose words must stay.
        head, refused, reason = problem.message.partition(_REFUSED)
        message = _NAME.sub(lambda match: self.names.get(match[0], match[0]), head) + refused + reason
        return replace(problem, message=message, field=self._field(message), code=code)

    @contextmanager
    def translating_errors(self) -> Iterator[None]:
        """Re-raise the router's InvalidRequest inside the block as a translated InvalidField."""
        try:
            yield
        except InvalidRequest as error:
            translated = self.translate(Problem.of(error))
            raise InvalidField(translated.message, field=translated.field, code=translated.code) from error

    def _field(self, message: str) -> str | None:
        match = _SUBJECT.match(message)
        if match is None:
            return None
        path, name = match[1], match[2]
        if name == "prompt" and "prompt" not in self.members:
            return self.names.get("chat.messages")
        return path if name in self.members else None


def _names_of_structure(body: SamplingBody) -> dict[str, str]:
    """Map the router's json_schema, regex, choice and grammar to the members that requested them."""
    guided = {"json_schema": "guided_json", "regex": "guided_regex", "choice": "guided_choice"}
    guided["grammar"] = "guided_grammar"
    if body.structured_outputs is not None:
        return dict.fromkeys(guided, "structured_outputs")
    if isinstance(body, ChatBody) and body.tools and body.tool_choice not in (None, "auto", "none"):
        return {"json_schema": "tools"}
    if body.response_format is not None:
        names = dict.fromkeys(("json_schema", "json_object"), "response_format")
        return names | {"grammar": "response_format with tools"}  # of both, if the model may call some
    return {kind: name for kind, name in guided.items() if getattr(body, name) is not None}
