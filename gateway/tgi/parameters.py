"""Translates TGI requests to arguments of the SDK."""

import secrets
from collections.abc import Mapping

from gateway.tgi.schemas import GenerateBody, Parameters
from tandem import GenerateArguments, InvalidRequest


def generate_arguments(body: GenerateBody, *, stream: bool) -> GenerateArguments:
    """Return the SDK arguments. Raises InvalidRequest, in TGI's words where TGI has the same rule."""
    parameters = body.parameters
    if not body.inputs:
        raise InvalidRequest("`inputs` cannot be empty")
    if stream and parameters.decoder_input_details:
        raise InvalidRequest("`decoder_input_details` == true is not supported when streaming tokens")
    _refuse_unsupported(parameters)
    _check_best_of(parameters, stream=stream)
    sampling = GenerateArguments(
        prompt=body.inputs,
        max_new_tokens=parameters.max_new_tokens,
        temperature=(parameters.temperature or 1.0) if parameters.needs_sampling else 0.0,
        top_k=parameters.top_k,
        top_p=parameters.top_p,
        typical_p=parameters.typical_p,
        repetition_penalty=parameters.repetition_penalty,
        frequency_penalty=parameters.frequency_penalty,
        truncate_prompt_tokens=parameters.truncate,
        seed=seed_of(parameters),
        n=parameters.num_choices,
        best_of=parameters.best_of if parameters.num_choices > 1 else None,
        stop=[*parameters.stop, *parameters.stop_sequences],
        include_stop=True,
        top_logprobs=parameters.top_n_tokens,
        prompt_logprobs=parameters.decoder_input_details,
    )
    return sampling | _structure(parameters.grammar)


def seed_of(parameters: Parameters) -> int | None:
    """Return the client's seed or a random one, which the answer reports. None if decoding is greedy."""
    if not parameters.needs_sampling:
        return None
    return secrets.randbits(63) if parameters.seed is None else parameters.seed


def _check_best_of(parameters: Parameters, *, stream: bool) -> None:
    """Raise InvalidRequest where TGI refuses `best_of`, with TGI's messages."""
    if parameters.num_choices == 1:
        return
    if not parameters.needs_sampling:
        raise InvalidRequest("you must use sampling when `best_of` is > 1")
    if parameters.seed is not None:
        raise InvalidRequest("`seed` must not be set when `best_of` > 1")
    if stream:
        raise InvalidRequest("`best_of` != 1 is not supported when streaming tokens")


def _refuse_unsupported(parameters: Parameters) -> None:
    unsupported = {
        "watermark": parameters.watermark,
        "adapter_id": parameters.adapter_id is not None,
    }
    for name, is_used in unsupported.items():
        if is_used:
            raise InvalidRequest(f"`{name}` is not supported")


def _structure(grammar: Mapping[str, object] | None) -> GenerateArguments:
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
