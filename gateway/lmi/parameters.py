"""LMI requests to arguments of the SDK."""

from gateway.lmi.schemas import InvocationBody, Parameters
from gateway.structures import structure_arguments
from tandem import GenerateArguments, InvalidRequest

_DEFAULT_MAX_NEW_TOKENS = 30


def invocation_arguments(body: InvocationBody, *, model: str, samples_by_default: bool) -> GenerateArguments:
    """Without a prompt: that is each input's own. Raises InvalidRequest."""
    parameters = body.parameters
    _refuse_unsupported(body)
    stop = parameters.stop_sequences if parameters.stop is None else parameters.stop
    max_new_tokens = parameters.max_new_tokens
    ignore_eos = parameters.ignore_eos_token if parameters.ignore_eos is None else parameters.ignore_eos
    bad_words = parameters.bad_sequences if parameters.bad_words is None else parameters.bad_words
    sampling = GenerateArguments(
        model=model or None,
        max_new_tokens=_DEFAULT_MAX_NEW_TOKENS if max_new_tokens is None else max_new_tokens,
        min_new_tokens=parameters.min_length if parameters.min_tokens is None else parameters.min_tokens,
        temperature=temperature_of(parameters, samples_by_default=samples_by_default),
        top_k=max(0, parameters.top_k or 0),
        top_p=parameters.top_p or None,  # 0 is how TensorRT-LLM's users say "off"
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


def temperature_of(parameters: Parameters, *, samples_by_default: bool) -> float:
    """0, which is greedy, unless sampling is asked for, in one of the ways that LMI has had for it."""
    if parameters.do_sample is False:
        return 0.0
    if parameters.temperature is not None:
        return parameters.temperature
    return 1.0 if parameters.do_sample or samples_by_default else 0.0


def _refuse_unsupported(body: InvocationBody) -> None:
    parameters = body.parameters
    wanted = {
        "adapters": bool(body.adapters),
        "num_beams": parameters.num_beams not in (None, 1),
    }
    for name, is_wanted in wanted.items():
        if is_wanted:
            raise InvalidRequest(f"{name} is not supported")
