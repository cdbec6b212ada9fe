"""TGI requests to arguments of the SDK."""

import secrets

from gateway.structures import tgi_grammar
from gateway.tgi.schemas import GenerateBody, Parameters
from tandem import GenerateArguments, InvalidRequest


def generate_arguments(body: GenerateBody, *, stream: bool) -> GenerateArguments:
    """Raises InvalidRequest."""
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
        temperature=(parameters.temperature or 1.0) if parameters.samples else 0.0,
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
    return sampling | tgi_grammar(parameters.grammar)


def seed_of(parameters: Parameters) -> int | None:
    """The client's, or one of ours: answers tell it. None if nothing is drawn."""
    if not parameters.samples:
        return None
    return secrets.randbits(63) if parameters.seed is None else parameters.seed


def _check_best_of(parameters: Parameters, *, stream: bool) -> None:
    """TGI's own rules, in its words."""
    if parameters.num_choices == 1:
        return
    if not parameters.samples:
        raise InvalidRequest("you must use sampling when `best_of` is > 1")
    if parameters.seed is not None:
        raise InvalidRequest("`seed` must not be set when `best_of` > 1")
    if stream:
        raise InvalidRequest("`best_of` != 1 is not supported when streaming tokens")


def _refuse_unsupported(parameters: Parameters) -> None:
    wanted = {
        "watermark": parameters.watermark,
        "adapter_id": parameters.adapter_id is not None,
    }
    for name, is_wanted in wanted.items():
        if is_wanted:
            raise InvalidRequest(f"`{name}` is not supported")
