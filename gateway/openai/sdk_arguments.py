"""Translates OpenAI's requests to arguments of the SDK."""

from dataclasses import asdict

from gateway.openai.chat_template import rendering_of
from gateway.openai.requests import ChatBody, CompletionBody, SamplingBody
from gateway.openai.tool_choice import ToolUse
from gateway.schema import Json, structure_arguments
from mesh.domain.json_text import parse_json
from tandem import GenerateArguments, InvalidRequest, Model, TokenizeArguments

_DEFAULT_TEMPERATURE = 1.0
_DAY_S = 24 * 3600.0
# Placeholders from clients that do not know the model's name: TGI's, TensorZero's, huggingface_hub's, LMI's. Hugging
# Face's client for JavaScript sends the server's own address.
_NO_NAMES = ("", "tgi", "TGI", "dummy", "lmi")
_ADDRESSES = ("http://", "https://")


def model_of(name: str) -> str | None:
    """Return the model's name for the SDK: None, the default model, for placeholder names."""
    return None if name in _NO_NAMES or name.startswith(_ADDRESSES) else name


def completion_arguments(body: CompletionBody, model: Model | None, max_prompts: int) -> list[GenerateArguments]:
    """Return the SDK arguments of each prompt. `model`: None if not known yet. Raises InvalidRequest."""
    if body.suffix:
        raise InvalidRequest("suffix is not supported")
    shared = _sampling(body, model)
    if body.best_of is not None and body.best_of != (body.n or 1):
        if body.stream:
            raise InvalidRequest("best_of cannot be streamed: the best choice is known at the end only")
        shared["best_of"] = body.best_of
    if body.scores_only and body.stream:
        raise InvalidRequest("max_tokens must be at least 1 in a stream")
    shared["max_new_tokens"] = 1 if body.scores_only else body.max_tokens
    shared["echo"] = body.echo
    shared["top_logprobs"] = body.logprobs
    shared["prompt_logprobs"] = body.echo and body.logprobs is not None
    shared["own_bytes"] = body.logprobs is not None or _may_stop(body, model)
    shared["truncate_prompt_tokens"] = _truncation(body, shared["max_new_tokens"], model)
    shared["add_special_tokens"] = None if body.add_special_tokens else False
    prompts = _prompts(body.prompt)
    if not 1 <= len(prompts) <= max_prompts:
        raise InvalidRequest(f"prompt: 1 to {max_prompts} prompts may be in one request, got {len(prompts)}")
    return [shared | prompt for prompt in prompts]


def chat_arguments(body: ChatBody, model: Model | None, tool_use: ToolUse | None) -> GenerateArguments:
    """Return the SDK arguments of a chat. `model`: None if not known yet. `tool_use` comes from parse_tool_use. Raises
    InvalidRequest.
    """
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs")
    is_forced = tool_use is not None and tool_use.is_forced
    if is_forced:  # as with OpenAI: response_format is for text, of which a forced call has none
        body = body.model_copy(update={"response_format": None})
    arguments = GenerateArguments(**_sampling(body, model), **rendering_of(body))
    arguments["max_new_tokens"] = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    arguments["top_logprobs"] = body.top_logprobs
    arguments["own_bytes"] = body.logprobs or _may_stop(body, model)
    arguments["truncate_prompt_tokens"] = _truncation(body, arguments["max_new_tokens"], model)
    if tool_use is not None and is_forced:
        if structure_arguments(body):
            raise InvalidRequest("tool_choice cannot force a call that has another structure: set it to auto")
        return arguments | tool_use.structure()
    if tool_use is not None and tool_use.has_control_marks and body.skip_special_tokens is None:
        arguments["skip_special_tokens"] = False
        arguments["include_eos"] = False  # which a client would not see without the others
    schema = _schema_of_answer(body)
    grammar = None if tool_use is None or schema is None else tool_use.calls_or_answer(schema)
    if grammar is not None:
        arguments = arguments | GenerateArguments(json_schema=None, json_object=None, grammar=grammar)
    return arguments


def _schema_of_answer(body: ChatBody) -> Json | None:
    """The schema of an answer that must be JSON; None for other answers, and for text that is no schema."""
    structure = structure_arguments(body)
    if structure.get("json_object"):
        return {"type": "object"}
    schema = structure.get("json_schema")
    try:
        schema = parse_json(schema) if isinstance(schema, str) else schema
    except ValueError:
        return None
    return schema if isinstance(schema, dict) else None


def _with_recommended(body: SamplingBody, model: Model | None) -> SamplingBody:
    """Return the body with the model's recommended sampling where the client sets none, as in vLLM."""
    recommended = {} if model is None else asdict(model.sampling_defaults)
    missing = {name: value for name, value in recommended.items() if value is not None and getattr(body, name) is None}
    return body.model_copy(update=missing) if missing else body


def _sampling(body: SamplingBody, model: Model | None) -> GenerateArguments:
    if body.use_beam_search:
        raise InvalidRequest("use_beam_search is not supported: use sampling or greedy decoding")
    body = _with_recommended(body, model)
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
        seed=None if body.seed is None else body.seed % 2**64,  # OpenAI's seeds may be negative
        stop=body.stop,
        stop_token_ids=body.stop_token_ids,
        min_new_tokens=body.min_tokens,
        ignore_eos=body.ignore_eos,
        bad_words=body.bad_words,
        skip_special_tokens=body.skip_special_tokens,
        spaces_between_special_tokens=body.spaces_between_special_tokens,
        include_stop=body.include_stop_str_in_output,
        priority=body.priority,
        ttft_target=body.ttft_target,
    )
    return sampling | structure_arguments(body) | _cache_hints(body)


def _may_stop(body: SamplingBody, model: Model | None) -> bool:
    """True if a stop string may end the answer. Then the bytes of tokens are needed to tell which are part of it."""
    return bool(body.stop) or (model is not None and bool(model.stop_strings))


def _truncation(body: SamplingBody, max_new_tokens: int | None, model: Model | None) -> int | None:
    """Return how many tokens of the prompt to keep. -1 means all that fit, as in vLLM."""
    if body.truncate_prompt_tokens != -1:
        return body.truncate_prompt_tokens
    if model is None:
        return None
    return max(1, min(model.max_input_tokens, model.max_total_tokens - (max_new_tokens or 1)))


def _cache_hints(body: SamplingBody) -> GenerateArguments:
    """Tandem's own members take precedence. OpenAI's "24h" stands for a high priority and a day."""
    is_long = body.prompt_cache_retention == "24h"
    return GenerateArguments(
        session_id=body.prompt_cache_key,
        keep_priority=body.keep_priority or ("high" if is_long else None),
        time_to_live=_DAY_S if body.time_to_live is None and is_long else body.time_to_live,
    )


def _top_k(body: SamplingBody) -> int | None:
    """Return top_k: 1 for a `top_p` of 0, which OpenAI allows and means greedy. -1 and 0 mean off."""
    if body.top_p == 0:
        return 1
    return 0 if body.top_k == -1 else body.top_k


def _prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> list[GenerateArguments]:
    """Return one element per prompt. The four forms: a string, strings, token ids, lists of token ids."""
    if isinstance(prompt, str):
        return [GenerateArguments(prompt=prompt)]
    if prompt and isinstance(prompt[0], int):
        return [GenerateArguments(token_ids=[token_id for token_id in prompt if isinstance(token_id, int)])]
    return [
        GenerateArguments(prompt=item) if isinstance(item, str) else GenerateArguments(token_ids=item)
        for item in prompt
        if not isinstance(item, int)
    ]


def tokenize_arguments(body: ChatBody, timeout_s: float) -> TokenizeArguments:
    """Return the SDK arguments that tokenise a chat's prompt. Raises InvalidRequest."""
    return rendering_of(body) | TokenizeArguments(model=model_of(body.model), timeout=timeout_s)
