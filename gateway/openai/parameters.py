"""OpenAI requests to arguments of the SDK."""

import json
from typing import Any

from gateway.openai.schemas import ChatBody, CompletionBody, ContentPart, Message, SamplingBody
from gateway.openai.tool_choice import ToolUse
from gateway.structures import structure_arguments
from tandem import GenerateArguments, InvalidRequest

_DEFAULT_TEMPERATURE = 1.0
# What clients that do not know the model's name send for it: TGI's, huggingface_hub's, LMI's.
_NO_NAMES = ("", "tgi", "dummy", "lmi")
# A newer name for the same.
_ROLES = {"developer": "system"}


def model_of(name: str) -> str | None:
    """The model's name as the SDK takes it; None for names that stand for any."""
    return None if name in _NO_NAMES else name


def completion_arguments(body: CompletionBody, max_prompts: int) -> list[GenerateArguments]:
    """One for each prompt. Raises InvalidRequest."""
    if body.suffix:
        raise InvalidRequest("suffix is not supported")
    shared = _sampling(body)
    if body.best_of is not None and body.best_of != (body.n or 1):
        if body.stream:
            raise InvalidRequest("best_of cannot be streamed: what is best is known at the end")
        shared["best_of"] = body.best_of
    if body.scores_only and body.stream:
        raise InvalidRequest("max_tokens must be at least 1 in a stream")
    shared["max_new_tokens"] = 1 if body.scores_only else body.max_tokens
    shared["echo"] = body.echo
    shared["top_logprobs"] = body.logprobs
    shared["prompt_logprobs"] = body.echo and body.logprobs is not None
    prompts = _prompts(body.prompt)
    if not 1 <= len(prompts) <= max_prompts:
        raise InvalidRequest(f"prompt: 1 to {max_prompts} prompts may be in one request, got {len(prompts)}")
    return [shared | prompt for prompt in prompts]


def chat_arguments(body: ChatBody, use: ToolUse | None = None) -> GenerateArguments:
    """`use`: what tool_use_of says of the body. Raises InvalidRequest."""
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs")
    arguments = _sampling(body)
    arguments["messages"] = messages_of(body)
    arguments["tools"] = tools_of(body)
    arguments["max_new_tokens"] = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    arguments["top_logprobs"] = body.top_logprobs
    if use is not None and use.is_forced:
        if structure_arguments(body):
            raise InvalidRequest("an answer that must be a call cannot have another structure: leave tool_choice auto")
        arguments |= use.structure()
    return arguments


def _sampling(body: SamplingBody) -> GenerateArguments:
    if body.use_beam_search:
        raise InvalidRequest("use_beam_search is not supported: tokens are drawn, or the likeliest is taken")
    sampling = GenerateArguments(
        model=model_of(body.model),
        n=body.n,
        temperature=_DEFAULT_TEMPERATURE if body.temperature is None else body.temperature,
        top_p=body.top_p or None,
        top_k=_top_k(body),
        min_p=body.min_p,
        typical_p=body.typical_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=body.logit_bias,
        seed=body.seed,
        stop=body.stop,
        stop_token_ids=body.stop_token_ids,
        min_new_tokens=body.min_tokens,
        ignore_eos=body.ignore_eos,
        bad_words=body.bad_words,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        skip_special_tokens=body.skip_special_tokens,
        spaces_between_special_tokens=body.spaces_between_special_tokens,
        include_stop=body.include_stop_str_in_output,
        priority=body.priority,
        ttft_target=body.ttft_target,
    )
    return sampling | structure_arguments(body)


def _top_k(body: SamplingBody) -> int | None:
    """With a `top_p` of 0, which OpenAI allows, only the likeliest token is left. -1 means off, as 0 does."""
    if body.top_p == 0:
        return 1
    return max(0, body.top_k) if body.top_k is not None else None


def _prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> list[GenerateArguments]:
    """The four forms: a text, texts, token ids, lists of token ids."""
    if isinstance(prompt, str):
        return [GenerateArguments(prompt=prompt)]
    if prompt and isinstance(prompt[0], int):
        return [GenerateArguments(token_ids=[each for each in prompt if isinstance(each, int)])]
    return [
        GenerateArguments(prompt=each) if isinstance(each, str) else GenerateArguments(token_ids=each)
        for each in prompt
        if not isinstance(each, int)
    ]


def tools_of(body: ChatBody) -> list[dict[str, Any]] | None:
    """What the chat template is shown."""
    return None if body.tool_choice == "none" else body.tools


def messages_of(body: ChatBody) -> list[dict[str, Any]]:
    """The turns. Raises InvalidRequest for content that is not text."""
    return [_message(each) for each in body.messages]


def _message(message: Message) -> dict[str, Any]:
    extra = message.model_dump(include={"tool_calls", "tool_call_id", "name"}, exclude_none=True)
    for call in extra.get("tool_calls", ()):
        _read_arguments(call)
    return extra | {"role": _ROLES.get(message.role, message.role), "content": _text(message.content)}


def _read_arguments(call: dict[str, Any]) -> None:
    """Templates write arguments as JSON themselves, so they are shown the object."""
    function = call.get("function")
    if isinstance(function, dict) and isinstance(function.get("arguments"), str):
        try:
            value = json.loads(function["arguments"])
        except (ValueError, RecursionError):
            return
        if isinstance(value, dict):
            call["function"] = {**function, "arguments": value}


def _text(content: str | list[ContentPart] | None) -> str:
    if isinstance(content, list):
        for part in content:
            if part.type != "text":
                raise InvalidRequest(f"content of type {part.type!r} is not supported: only text is")
        return "".join(part.text for part in content)
    return content or ""
