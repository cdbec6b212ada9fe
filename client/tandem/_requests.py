"""Converts keyword arguments to request messages. Checks names and types; the server checks ranges."""

import json
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, TypedDict

from tandem._fields import elements, extend_field, set_field, set_seconds, update_map, wrong_value
from tandem.exceptions import InvalidRequest
from tandem.models import KeepPriority, Priority
from tandem.v1 import cache_pb2, generation_pb2, mesh_pb2, sampling_pb2

_ROLES = {"prefill": mesh_pb2.WORKER_ROLE_PREFILL, "decode": mesh_pb2.WORKER_ROLE_DECODE}

_SAMPLING_SCALARS = tuple(
    field.name
    for field in sampling_pb2.SamplingParams.DESCRIPTOR.fields
    if field.message_type is None and not field.is_repeated
)
_OUTPUT = tuple(field.name for field in generation_pb2.OutputOptions.DESCRIPTOR.fields)
STRUCTURES = ("json_schema", "json_object", "regex", "choice", "grammar")
_INPUTS = ("prompt", "token_ids", "messages")


class TokenizeArguments(TypedDict, total=False):
    """Arguments of `tokenize`. Pass exactly one of prompt, messages and token_ids.

    With `add_special_tokens` false a prompt gets none of the tokens that the tokenizer puts around a text. With
    `skip_special_tokens` false the text of special tokens is their name, else it is empty.

    A message has `role` and `content`. Its other members, `tools`, and the members of `chat_template_kwargs` are passed
    to the chat template unchanged. With `continue_final_message` the answer continues the last message. With
    `add_generation_prompt=False` the prompt does not start the assistant's turn.
    """

    prompt: str | None
    messages: Iterable[Mapping[str, Any]] | None
    token_ids: Sequence[int] | None
    add_special_tokens: bool | None
    skip_special_tokens: bool | None
    tools: Sequence[Mapping[str, Any]] | None
    chat_template_kwargs: Mapping[str, Any] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    model: str | None
    timeout: float | None


class GenerateArguments(TokenizeArguments, total=False):
    """Arguments of `generate` and `stream`. Pass exactly one of prompt, token_ids and messages.

    None means the default of the server: greedy, one choice, as many tokens as the limit of the model allows. With
    `best_of`, that many choices are generated, and the `n` with the highest mean log-prob are returned at the end, best
    first. `timeout` is in seconds and covers all retries. `ttft_target` is the latest useful time of the first token,
    in seconds per attempt: the server raises Overloaded as soon as it predicts that it will miss it. `priority` must
    not exceed the priority of your API key. At most one of json_schema (an object or its JSON text), json_object,
    regex, choice (texts) and grammar (Lark or GBNF) constrains the generated text. `adapter` is the name of a LoRA
    adapter of the model; its name as `model` means the same. `own_bytes` asks for Token.own_bytes.

    `session_id`, `keep_priority` and `time_to_live` (seconds) tell workers how long the KV of this request is worth
    keeping for later prompts that begin alike. They change no answer.
    """

    max_new_tokens: int | None
    min_new_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    bad_words: Sequence[str] | None
    bad_word_ids: Sequence[Sequence[int]] | None
    truncate_prompt_tokens: int | None
    json_schema: Mapping[str, Any] | str | None
    json_object: bool | None
    regex: str | None
    choice: Sequence[str] | None
    grammar: str | None
    top_logprobs: int | None
    prompt_logprobs: bool | None
    echo: bool | None
    include_stop: bool | None
    spaces_between_special_tokens: bool | None
    include_eos: bool | None
    own_bytes: bool | None
    n: int | None
    best_of: int | None
    client_request_id: str | None
    priority: Priority | str | None
    ttft_target: float | None
    adapter: str | None
    session_id: str | None
    keep_priority: KeepPriority | str | None
    time_to_live: float | None


def generate_request(arguments: GenerateArguments) -> generation_pb2.GenerateRequest:
    """The message for `generate` and `stream`. Raises InvalidRequest, and TypeError for unknown names."""
    values = _without_none(arguments, GenerateArguments)
    request = generation_pb2.GenerateRequest()
    _set_input(request, values)
    set_field(request, "model", values.get("model"))
    set_field(request, "adapter", values.get("adapter"))
    set_field(request, "client_request_id", values.get("client_request_id"))
    set_field(request, "num_choices", values.get("n"), shown_name="n")
    set_field(request, "best_of", values.get("best_of"))
    set_field(request, "add_special_tokens", values.get("add_special_tokens"))
    set_field(request, "priority", _number("priority", values.get("priority"), Priority, generation_pb2.Priority))
    set_seconds(request, "ttft_target", values.get("ttft_target"))
    _set_cache_hints(request, values)
    request.sampling.SetInParent()
    _set_sampling(request.sampling, values)
    for name in _OUTPUT:
        set_field(request.output, name, values.get(name))
    return request


def tokenize_request(arguments: TokenizeArguments) -> generation_pb2.TokenizeRequest:
    """The message for `tokenize`. Raises InvalidRequest, and TypeError for unknown names."""
    values = _without_none(arguments, TokenizeArguments)
    request = generation_pb2.TokenizeRequest()
    _set_input(request, values)
    for name in ("model", "add_special_tokens", "skip_special_tokens"):
        set_field(request, name, values.get(name))
    return request


def switch_role_request(worker_id: str, role: str) -> mesh_pb2.SwitchRoleRequest:
    """Raises InvalidRequest for an unknown role."""
    if not isinstance(role, str) or role not in _ROLES:
        raise wrong_value("role", " or ".join(_ROLES), role)
    request = mesh_pb2.SwitchRoleRequest(role=_ROLES[role])
    set_field(request, "worker_id", worker_id)
    return request


def set_traffic_request(name: str, shares: Mapping[str, float]) -> mesh_pb2.SetTrafficRequest:
    request = mesh_pb2.SetTrafficRequest()
    request.traffic.SetInParent()
    set_field(request.traffic, "name", name)
    update_map(request.traffic, "shares", shares)
    return request


def tokenizer_request(name: str) -> generation_pb2.GetTokenizerRequest:
    request = generation_pb2.GetTokenizerRequest()
    set_field(request, "model", name, shown_name="name")
    return request


def model_request(name: str) -> generation_pb2.GetModelRequest:
    request = generation_pb2.GetModelRequest()
    set_field(request, "model", name, shown_name="name")
    return request


def set_draining_request(worker_id: str, *, draining: bool) -> mesh_pb2.SetDrainingRequest:
    request = mesh_pb2.SetDrainingRequest(draining=draining)
    set_field(request, "worker_id", worker_id)
    return request


def history_request(span_s: float | None) -> mesh_pb2.GetHistoryRequest:
    request = mesh_pb2.GetHistoryRequest()
    set_seconds(request, "span", span_s, shown_name="span_s")
    return request


def _without_none(arguments: Mapping[str, object], signature: type) -> dict[str, Any]:
    """The arguments that are not None. Raises TypeError for names that `signature` does not have."""
    unknown = sorted(arguments.keys() - signature.__annotations__.keys())
    if unknown:
        raise TypeError(f"unexpected keyword argument {unknown[0]!r}")
    return {name: value for name, value in arguments.items() if value is not None}


def _set_input(request: Any, arguments: Mapping[str, Any]) -> None:
    present = [name for name in _INPUTS if name in arguments]
    if len(present) != 1:
        received = f"got {' and '.join(present)}" if present else "got none"
        raise InvalidRequest(f"give exactly one of {', '.join(_INPUTS)}: {received}")
    name = present[0]
    value = arguments[name]
    if name == "messages":
        request.chat.SetInParent()
        if isinstance(value, Mapping):  # its keys would be the messages
            raise wrong_value(name, "a list of messages", value)
        request.chat.messages.extend(_message(index, turn) for index, turn in enumerate(elements(value, name)))
        _set_rendering(request.chat, arguments)
    elif name == "token_ids":
        request.token_ids.SetInParent()
        extend_field(request.token_ids, "ids", value, shown_name=name)
    else:
        set_field(request, name, value)


def _set_rendering(chat: generation_pb2.Chat, arguments: Mapping[str, Any]) -> None:
    """Set the inputs of the chat template other than the messages."""
    if tools := arguments.get("tools"):
        chat.tools_json = _json("tools", _tools(tools))
    if kwargs := arguments.get("chat_template_kwargs"):
        if not isinstance(kwargs, Mapping):
            raise wrong_value("chat_template_kwargs", "a mapping from names to values", kwargs)
        chat.template_kwargs_json = _json("chat_template_kwargs", dict(kwargs))
    set_field(chat, "add_generation_prompt", arguments.get("add_generation_prompt"))
    set_field(chat, "continue_final_message", arguments.get("continue_final_message"))


def _tools(tools: Any) -> list[Mapping[str, object]]:
    if isinstance(tools, Mapping):  # its keys would be the tools
        raise wrong_value("tools", "a list of objects", tools)
    tools = elements(tools, "tools")
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise wrong_value(f"tools[{index}]", "an object", tool)
    return tools


def _message(index: int, turn: Mapping[str, object]) -> generation_pb2.ChatMessage:
    if not isinstance(turn, Mapping) or not turn.keys() >= {"role", "content"}:
        raise InvalidRequest('each of messages must be {"role": ..., "content": ...}')
    message = generation_pb2.ChatMessage()
    set_field(message, "role", turn["role"], shown_name=f"messages[{index}].role")
    set_field(message, "content", turn["content"], shown_name=f"messages[{index}].content")
    extra = {name: value for name, value in turn.items() if name not in ("role", "content")}
    if extra:
        message.extra_json = _json("messages", extra)
    return message


def _json(name: str, value: object) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{name}: {error}") from error


def _set_sampling(sampling: sampling_pb2.SamplingParams, arguments: Mapping[str, Any]) -> None:
    for name in _SAMPLING_SCALARS:
        set_field(sampling, name, arguments.get(name))
    for name in ("stop", "bad_words"):
        texts = arguments.get(name, ())
        extend_field(sampling, name, (texts,) if isinstance(texts, str) else texts)
    extend_field(sampling, "stop_token_ids", arguments.get("stop_token_ids", ()))
    for index, ids in enumerate(elements(arguments.get("bad_word_ids", ()), "bad_word_ids")):
        extend_field(sampling.bad_word_ids.add(), "ids", ids, shown_name=f"bad_word_ids[{index}]")
    update_map(sampling, "logit_bias", arguments.get("logit_bias", {}))
    _set_structure(sampling, arguments)


def has_structure(name: str, arguments: Mapping[str, Any]) -> bool:
    """True if the arguments request this structure: also with an empty schema, but not with `json_object=False`."""
    value = arguments.get(name)
    return value is not None and not (name == "json_object" and not value)


def _set_structure(sampling: sampling_pb2.SamplingParams, arguments: Mapping[str, Any]) -> None:
    present = [name for name in STRUCTURES if has_structure(name, arguments)]
    if len(present) > 1:
        raise InvalidRequest(f"give at most one of {', '.join(STRUCTURES)}: got {' and '.join(present)}")
    for name in present:
        value = arguments[name]
        if name == "choice":
            if isinstance(value, str):  # its characters would be the choices
                raise InvalidRequest("choice must be a list of texts, not a single text")
            sampling.structure.choice.SetInParent()
            extend_field(sampling.structure.choice, "texts", value, shown_name=name)
        elif name == "json_schema" and not isinstance(value, str):
            sampling.structure.json_schema = _json(name, value)
        else:
            set_field(sampling.structure, name, value)


def _number(field: str, name: str | None, names: type[StrEnum], numbers: Any) -> int | None:
    """The number of a name in the enum of a message."""
    if name is None:
        return None
    if name not in list(names):
        raise InvalidRequest(f"{field} must be one of {', '.join(names)}, got {name!r}")
    number: int = numbers.Value(f"{field}_{name}".upper())
    return number


def _set_cache_hints(request: generation_pb2.GenerateRequest, arguments: Mapping[str, Any]) -> None:
    if not arguments.keys() & {"session_id", "keep_priority", "time_to_live"}:
        return
    set_field(request.cache_hints, "session_id", arguments.get("session_id"))
    set_seconds(request.cache_hints, "time_to_live", arguments.get("time_to_live"))
    keep_priority = _number("keep_priority", arguments.get("keep_priority"), KeepPriority, cache_pb2.KeepPriority)
    set_field(request.cache_hints, "keep_priority", keep_priority)
