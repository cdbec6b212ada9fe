"""Members of requests that vLLM, SGLang, llama.cpp and OpenAI know beside those of `requests.py`.

None is ignored in silence: it is another name of a member, has no effect on an answer, or is refused with a sentence
unless its value asks for nothing. docs/members.md has the same table.
"""

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from gateway.errors import InvalidField
from gateway.schema import Json

OTHER_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "n_predict": "max_tokens",
        "repeat_penalty": "repetition_penalty",
        "no_stop_trim": "include_stop_str_in_output",
        "session_id": "prompt_cache_key",
        "grammar": "guided_grammar",
        "ebnf": "guided_grammar",
        "regex": "guided_regex",
        "json_schema": "guided_json",
    }
)
"""Members that mean the same as one of ours, which may not be set, too."""

WITHOUT_EFFECT = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prediction", "verbosity", "moderation"),
        *("request_id", "rid", "custom_labels", "cache_prompt", "id_slot", "n_keep", "stream_interval"),
        *("guided_decoding_backend", "return_cached_tokens_details"),
    }
)
"""Members that are accepted and ignored: notes for the server's log, hints for speed, and features that this server
does not have and that clients send by habit, such as storing answers or moderating them."""

# Values that ask for nothing, beside null, and what to do instead. Here 0 is not false, and 1 is not true.
_OFF: tuple[object, ...] = (False, 0, "", [], {})
_PLACEMENT = "the router chooses workers"
REFUSED: Mapping[str, tuple[tuple[object, ...], str]] = MappingProxyType(
    {
        "echo": (_OFF, "use continue_final_message"),
        "best_of": ((1,), "use n, or best_of of /v1/completions"),
        "suffix": (_OFF, "there is no completion in the middle"),
        "functions": (_OFF, "use tools"),
        "function_call": ((*_OFF, "none"), "use tool_choice"),
        "modalities": (([], ["text"]), "answers are text"),
        "audio": (_OFF, "answers are text"),
        "web_search_options": ((), "the server searches nothing"),
        "prompt_logprobs": ((False,), "use echo and logprobs of /v1/completions"),
        "logprob_token_ids": (_OFF, "use top_logprobs"),
        "allowed_token_ids": (_OFF, "use guided_choice, or logit_bias"),
        "length_penalty": ((1,), "there is no beam search"),
        "early_stopping": (_OFF, "there is no beam search"),
        "truncation_side": (("left",), "truncate_prompt_tokens keeps the prompt's end"),
        "chat_template": (_OFF, "the model's own is used; chat_template_kwargs gives it values"),
        "documents": (_OFF, "use chat_template_kwargs"),
        "media_io_kwargs": (_OFF, "only text is served"),
        "mm_processor_kwargs": (_OFF, "only text is served"),
        "images_config": (_OFF, "only text is served"),
        "include_reasoning": ((True,), "drop reasoning_content"),
        "stream_reasoning": ((True,), "drop reasoning_content"),
        "reasoning_format": (("auto", "deepseek", "deepseek-legacy"), "use separate_reasoning"),
        "parse_tool_calls": ((True,), "use tool_choice none"),
        "thinking_token_budget": ((-1,), "use max_tokens"),
        "reasoning_budget_tokens": ((-1,), "use max_tokens"),
        "cache_salt": (_OFF, "prefix caches are separate for each API key"),
        "extra_key": (_OFF, "prefix caches are separate for each API key"),
        "return_tokens_as_token_ids": (_OFF, "use return_token_ids"),
        "return_prompt_token_ids": (_OFF, "use /tokenize"),
        "return_prompt_text": (_OFF, "use /tokenize"),
        "return_tokens": (_OFF, "use return_token_ids"),
        "return_hidden_states": (_OFF, "answers are text"),
        "return_routed_experts": (_OFF, "answers are text"),
        "return_meta_info": (_OFF, "usage has the counts"),
        "return_progress": (_OFF, "use stream_options.continuous_usage_stats"),
        "timings_per_token": (_OFF, "the SDK's timing has them"),
        "input_ids": (_OFF, "use the prompt of /v1/completions"),
        "lora_path": (_OFF, "model may be an adapter's name"),
        "lora": (_OFF, "model may be an adapter's name"),
        "stop_regex": (_OFF, "use stop or guided_regex"),
        "guided_whitespace_pattern": (_OFF, "use guided_grammar"),
        "custom_logit_processor": (_OFF, "nothing that a client sends is run"),
        "custom_params": (_OFF, "nothing that a client sends is run"),
        "session_params": (_OFF, "send the whole conversation; the prefix cache makes it cheap"),
        "vllm_xargs": (_OFF, "there are no such extensions"),
        "repetition_detection": (_OFF, "use repetition_penalty"),
        "watermarking": (_OFF, "answers are not marked"),
        "ngram_corpus_id": (_OFF, "there is no such corpus"),
        "kv_transfer_params": (_OFF, _PLACEMENT),
        "ec_transfer_params": (_OFF, _PLACEMENT),
        "bootstrap_host": (_OFF, _PLACEMENT),
        "bootstrap_port": (_OFF, _PLACEMENT),
        "bootstrap_room": (_OFF, _PLACEMENT),
        "routed_dp_rank": ((), _PLACEMENT),
        "data_parallel_rank": ((), _PLACEMENT),
        "disagg_prefill_dp_rank": ((), _PLACEMENT),
        "n_probs": (_OFF, "use logprobs"),
        "post_sampling_probs": (_OFF, "log-probs are the model's own"),
        "response_fields": (_OFF, "answers are whole"),
        "min_keep": (_OFF, "use top_k, top_p and min_p"),
        "samplers": (_OFF, "their order is fixed"),
        "repeat_last_n": ((-1,), "repetition_penalty counts the whole text"),
        "mirostat": (_OFF, "use top_p or min_p"),
        "dynatemp_range": (_OFF, "use temperature"),
        "xtc_probability": (_OFF, "use min_p or typical_p"),
        "dry_multiplier": (_OFF, "use repetition_penalty"),
        "top_n_sigma": ((-1, 0), "use min_p"),
        "adaptive_target": ((-1,), "use min_p"),
        "t_max_predict_ms": (_OFF, "use max_tokens"),
        "n_indent": (_OFF, "use guided_grammar"),
    }
)
"""Members that ask for what is not served, with the values that do not, and what to use instead."""


def translate_members(body: Mapping[str, Any], own: Collection[str]) -> Json:
    """Return the body under our names, without nulls. `own` are the members that this kind of body has. Raises
    InvalidField for a member that is refused.
    """
    translated = {name: value for name, value in body.items() if value is not None}
    for name in (translated.keys() & REFUSED.keys()).difference(own):
        off, instead = REFUSED[name]
        if not _is_one_of(off, translated[name]):
            raise InvalidField(f"{name} is not supported: {instead}", field=name)
    _read_no_limit(translated, is_chat="messages" in own)
    for name in translated.keys() & OTHER_NAMES.keys():
        ours, value = OTHER_NAMES[name], translated[name]
        if translated.setdefault(ours, value) != value:
            raise InvalidField(f"{name} and {ours} mean the same: set one of them", field=name)
    if translated.get("priority") == 0:
        del translated["priority"]  # the default of servers whose priorities are numbers
    return translated


def _read_no_limit(body: Json, *, is_chat: bool) -> None:
    """Drop llama.cpp's -1 for "no limit", the default of chats. Raises InvalidField for other negative numbers."""
    limit = body.get("n_predict")
    if type(limit) is not int or limit >= 0:
        return
    if not (is_chat and limit == -1):
        raise InvalidField(f"n_predict must be at least 1, or -1 in chats for no limit, got {limit}", field="n_predict")
    del body["n_predict"]


def _is_one_of(values: Collection[object], value: object) -> bool:
    """True if one of the values equals this one and both are booleans or neither is."""
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in values)
