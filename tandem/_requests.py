"""Keyword arguments to request messages. Names and types are checked here; ranges are the server's to check."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

from tandem.exceptions import InvalidRequest
from tandem.models import Priority
from tandem.v1 import generation_pb2, sampling_pb2

_SCALARS = (
    "max_new_tokens",
    "min_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "ignore_eos",
    "truncate_prompt_tokens",
)
_OUTPUT = (
    "top_logprobs",
    "prompt_logprobs",
    "echo",
    "include_stop",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)
_STRUCTURES = ("json_schema", "json_object", "regex", "choice", "grammar")
_INPUTS = ("prompt", "token_ids", "messages")


class TokenizeArguments(TypedDict, total=False):
    """Arguments of `tokenize`: one of prompt and messages.

    A message has `role` and `content`; what else it has, and `tools`, goes to the model's chat template as it is.
    """

    prompt: str | None
    messages: Iterable[Mapping[str, Any]] | None
    tools: Sequence[Mapping[str, Any]] | None
    model: str | None
    timeout: float | None


class GenerateArguments(TokenizeArguments, total=False):
    """Arguments of `generate` and `stream`. Give one of prompt, token_ids and messages.

    None means the server's default: greedy, one choice, as many tokens as the model's limit allows. With `best_of` so
    many choices are generated, and the `n` with the highest mean log-prob come at the end, best first. `timeout` is in
    seconds and covers all retries. A first token later than `ttft_target` (seconds, for each try) is of no use to you:
    the server raises Overloaded as soon as it sees that it will come too late. `priority` may be at most that of your
    API key. What the text has to look like, one of json_schema (an object, or its JSON text), json_object, regex,
    choice (texts) and grammar (Lark) may say.
    """

    token_ids: Sequence[int] | None
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
    skip_special_tokens: bool | None
    spaces_between_special_tokens: bool | None
    n: int | None
    best_of: int | None
    client_request_id: str | None
    priority: Priority | str | None
    ttft_target: float | None


def generate_request(arguments: GenerateArguments) -> generation_pb2.GenerateRequest:
    """The message for `generate` and `stream`. Raises InvalidRequest, and TypeError for unknown names."""
    given = _given(arguments, GenerateArguments)
    request = generation_pb2.GenerateRequest()
    _set_input(request, given, _INPUTS)
    _set(request, "model", given.get("model"))
    _set(request, "client_request_id", given.get("client_request_id"))
    _set(request, "num_choices", given.get("n"), shown="n")
    _set(request, "best_of", given.get("best_of"))
    _set(request, "priority", _priority(given.get("priority")))
    _set_seconds(request, "ttft_target", given.get("ttft_target"))
    request.sampling.SetInParent()
    _set_sampling(request.sampling, given)
    for name in _OUTPUT:
        _set(request.output, name, given.get(name))
    return request


def tokenize_request(arguments: TokenizeArguments) -> generation_pb2.TokenizeRequest:
    """The message for `tokenize`. Raises InvalidRequest, and TypeError for unknown names."""
    given = _given(arguments, TokenizeArguments)
    request = generation_pb2.TokenizeRequest()
    _set_input(request, given, ("prompt", "messages"))
    _set(request, "model", given.get("model"))
    return request


def _given(arguments: Mapping[str, Any], known: Any) -> dict[str, Any]:
    """The arguments that are not None."""
    unknown = sorted(arguments.keys() - known.__annotations__.keys())
    if unknown:
        raise TypeError(f"unexpected keyword argument {unknown[0]!r}")
    return {name: value for name, value in arguments.items() if value is not None}


def _set_input(request: Any, given: Mapping[str, Any], inputs: Sequence[str]) -> None:
    present = [name for name in inputs if name in given]
    if len(present) != 1:
        found = f"got {' and '.join(present)}" if present else "got none"
        raise InvalidRequest(f"give exactly one of {', '.join(inputs)}: {found}")
    name = present[0]
    value = given[name]
    if name == "messages":
        request.chat.SetInParent()
        request.chat.messages.extend(_message(turn) for turn in value)
        if given.get("tools"):
            request.chat.tools_json = _json("tools", list(given["tools"]))
    elif name == "token_ids":
        request.token_ids.SetInParent()
        _extend(request.token_ids.ids, value, name)
    else:
        _set(request, name, value)


def _message(turn: Mapping[str, Any]) -> generation_pb2.ChatMessage:
    if not isinstance(turn, Mapping) or not turn.keys() >= {"role", "content"}:
        raise InvalidRequest('each of messages must be {"role": ..., "content": ...}')
    message = generation_pb2.ChatMessage()
    _set(message, "role", turn["role"])
    _set(message, "content", turn["content"])
    extra = {name: value for name, value in turn.items() if name not in ("role", "content")}
    if extra:
        message.extra_json = _json("messages", extra)
    return message


def _json(name: str, value: Any) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{name}: {error}") from error


def _set_sampling(sampling: sampling_pb2.SamplingParams, given: Mapping[str, Any]) -> None:
    for name in _SCALARS:
        _set(sampling, name, given.get(name))
    stop = given.get("stop", ())
    _extend(sampling.stop, (stop,) if isinstance(stop, str) else stop, "stop")
    _extend(sampling.stop_token_ids, given.get("stop_token_ids", ()), "stop_token_ids")
    words = given.get("bad_words", ())
    _extend(sampling.bad_words, (words,) if isinstance(words, str) else words, "bad_words")
    for ids in given.get("bad_word_ids", ()):
        _extend(sampling.bad_word_ids.add().ids, ids, "bad_word_ids")
    try:
        sampling.logit_bias.update(given.get("logit_bias", {}))
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"logit_bias: {error}") from error
    _set_structure(sampling, given)


def _set_structure(sampling: sampling_pb2.SamplingParams, given: Mapping[str, Any]) -> None:
    present = [name for name in _STRUCTURES if name in given]
    if len(present) > 1:
        raise InvalidRequest(f"give at most one of {', '.join(_STRUCTURES)}: got {' and '.join(present)}")
    for name in present:
        value = given[name]
        if name == "choice":
            sampling.structure.choice.SetInParent()
            _extend(sampling.structure.choice.texts, value, name)
        elif name == "json_schema" and not isinstance(value, str):
            sampling.structure.json_schema = _json(name, value)
        else:
            _set(sampling.structure, name, value)


def _set(message: Any, name: str, value: Any, *, shown: str | None = None) -> None:
    """Set one field; None leaves it absent."""
    if value is None:
        return
    try:
        setattr(message, name, value)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{shown or name}: {error}") from error


def _priority(name: str | None) -> int | None:
    if name is None:
        return None
    if name not in list(Priority):
        raise InvalidRequest(f"priority must be one of {', '.join(Priority)}, got {name!r}")
    return generation_pb2.Priority.Value(f"PRIORITY_{Priority(name).name}")


def _set_seconds(message: Any, name: str, seconds: float | None) -> None:
    """Set a Duration; None leaves it absent."""
    if seconds is None:
        return
    try:
        getattr(message, name).FromMicroseconds(round(seconds * 1_000_000))
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"{name}: {error}") from error


def _extend(field: Any, values: Any, name: str) -> None:
    try:
        field.extend(values)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{name}: {error}") from error
