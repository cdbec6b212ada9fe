"""Translates LMI requests to arguments of the SDK."""

import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import structlog

from gateway.exchange import Exchange
from gateway.lmi.schemas import InvocationBody, Parameters
from gateway.schema import structure_arguments
from tandem import GenerateArguments, InvalidRequest, TokenizeArguments

log = structlog.get_logger(__name__)

_DEFAULT_MAX_NEW_TOKENS = 30
_MAX_LOGGED = 16
_MAX_LOGGED_CHARS = 64
_NO_BEAMS = "there is no beam search"
# LMI parameters that are accepted without effect, and the reason, which is logged.
_WITHOUT_EFFECT: Mapping[str, str] = MappingProxyType({"length_penalty": _NO_BEAMS, "early_stopping": _NO_BEAMS})


def invocation_arguments(body: InvocationBody, *, model: str, sampling_by_default: bool) -> GenerateArguments:
    """Return the arguments that all inputs share, without a prompt. Raises InvalidRequest."""
    parameters = body.parameters
    _refuse_unsupported(body)
    stop = parameters.stop_sequences if parameters.stop is None else parameters.stop
    max_new_tokens = parameters.max_new_tokens
    if max_new_tokens is None and parameters.max_seq_len is None:
        max_new_tokens = _DEFAULT_MAX_NEW_TOKENS
    ignore_eos = parameters.ignore_eos_token if parameters.ignore_eos is None else parameters.ignore_eos
    bad_words = parameters.bad_sequences if parameters.bad_words is None else parameters.bad_words
    sampling = GenerateArguments(
        model=model or None,
        max_new_tokens=max_new_tokens,
        min_new_tokens=parameters.min_length if parameters.min_tokens is None else parameters.min_tokens,
        temperature=temperature_of(parameters, sampling_by_default=sampling_by_default),
        top_k=max(0, parameters.top_k or 0),
        top_p=parameters.top_p or None,  # TensorRT-LLM's clients send 0 for "off"
        min_p=parameters.min_p,
        typical_p=parameters.typical_p or None,
        repetition_penalty=parameters.repetition_penalty,
        presence_penalty=parameters.presence_penalty,
        frequency_penalty=parameters.frequency_penalty,
        logit_bias=parameters.logit_bias,
        bad_words=[bad_words] if isinstance(bad_words, str) else bad_words,
        truncate_prompt_tokens=parameters.truncate,
        seed=parameters.seed,
        stop=stop,
        stop_token_ids=parameters.stop_token_ids,
        include_stop=parameters.include_stop_str_in_output,
        ignore_eos=ignore_eos,
        n=parameters.num_choices,
        best_of=parameters.best_of if (parameters.best_of or 1) > 1 else None,
        skip_special_tokens=parameters.skip_special_tokens,
        spaces_between_special_tokens=parameters.spaces_between_special_tokens,
        top_logprobs=parameters.num_top,
        prompt_logprobs=parameters.wants_prefill,
    )
    return sampling | structure_arguments(parameters)


def temperature_of(parameters: Parameters, *, sampling_by_default: bool) -> float:
    """Return the temperature: 0 (greedy) unless the request enables sampling in one of LMI's ways."""
    if parameters.do_sample is False:
        return 0.0
    if parameters.temperature is not None:
        return parameters.temperature
    return 1.0 if parameters.do_sample or sampling_by_default else 0.0


async def within_total(exchange: Exchange, arguments: GenerateArguments, max_seq_len: int) -> GenerateArguments:
    """Limit max_new_tokens so that prompt and new tokens are at most `max_seq_len`. Raises InvalidRequest.

    Without max_new_tokens the answer may fill the rest: FasterTransformer's clients set no other limit.
    """
    tokenize_arguments = TokenizeArguments(
        prompt=arguments.get("prompt"), model=arguments.get("model"), timeout=exchange.settings.request_timeout_s
    )
    num_prompt = min(
        len(await exchange.client.tokenize(**tokenize_arguments)),
        arguments.get("truncate_prompt_tokens") or sys.maxsize,
    )
    if num_prompt >= max_seq_len:
        raise InvalidRequest(f"max_seq_len ({max_seq_len}) must be greater than the prompt's tokens ({num_prompt})")
    num_left = max_seq_len - num_prompt
    requested = arguments.get("max_new_tokens")
    return arguments | GenerateArguments(max_new_tokens=num_left if requested is None else min(num_left, requested))


def log_dropped(payload: Mapping[str, Any], request_id: str) -> None:
    """Log the parameters that have no effect in one line, as LMI does."""
    parameters = payload.get("parameters")
    if not isinstance(parameters, dict):
        return
    unknown = sorted(parameters.keys() - Parameters.model_fields.keys())[:_MAX_LOGGED]
    if unknown:
        reasons = {name[:_MAX_LOGGED_CHARS]: _WITHOUT_EFFECT.get(name, "unknown") for name in unknown}
        log.warning("parameters have no effect", request_id=request_id, dropped=reasons)


def _refuse_unsupported(body: InvocationBody) -> None:
    parameters = body.parameters
    unsupported = {
        "adapters": bool(body.adapters),
        "num_beams": parameters.num_beams not in (None, 1),
    }
    for name, is_used in unsupported.items():
        if is_used:
            raise InvalidRequest(f"{name} is not supported")
