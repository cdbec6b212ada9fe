"""TGI's requests: bodies with TGI's own ranges, and their translation to arguments of the SDK.

The router checks limits that depend on the model.
"""

import secrets
from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from gateway.schema import Body, JsonObject, Name
from mesh.domain.request import MAX_NUM_CHOICES, MAX_SEED
from tandem import GenerateArguments, InvalidRequest

Positive = Annotated[float, Field(gt=0, le=1e9)]
Whole = Annotated[int, Field(ge=1, lt=2**31)]
Texts = Annotated[tuple[str, ...], Field(max_length=256, fail_fast=True)]
# TGI requires less than 1. Clients of other servers send 1 for "off", which is accepted, too.
Fraction = Annotated[float, Field(gt=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class Parameters(Body):
    """Generation parameters. None means TGI's default."""

    best_of: Annotated[int, Field(ge=1, le=MAX_NUM_CHOICES)] | None = None
    temperature: Positive | None = None
    repetition_penalty: Positive | None = None
    frequency_penalty: Penalty | None = None
    top_k: Whole | None = None
    top_p: Fraction | None = None
    typical_p: Fraction | None = None
    do_sample: bool = False
    max_new_tokens: Whole | None = None
    return_full_text: bool | None = None
    stop: Texts = ()
    stop_sequences: Texts = ()
    truncate: Whole | None = None
    seed: Annotated[int, Field(ge=0, lt=MAX_SEED + 1)] | None = None
    top_n_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    details: bool = False
    decoder_input_details: bool = False
    watermark: bool = False
    grammar: JsonObject | None = None
    adapter_id: Name | None = None

    @property
    def needs_sampling(self) -> bool:
        """True if tokens are sampled: requested, or implied by a parameter that changes the distribution."""
        return self.do_sample or any(
            value not in (None, 1.0) for value in (self.temperature, self.top_k, self.top_p, self.typical_p)
        )

    @property
    def num_choices(self) -> int:
        """Number of choices. The answer has all of them, the best one first."""
        return self.best_of or 1

    @property
    def wants_details(self) -> bool:
        """True if the answer has details. `decoder_input_details` implies them: the prompt's tokens are a part."""
        return self.details or self.decoder_input_details


class GenerateBody(Body):
    """Body of POST /generate, /generate_stream and /. Without parameters, TGI samples."""

    inputs: str
    parameters: Parameters = Parameters(do_sample=True)
    stream: bool = False


class TokenizeBody(Body):
    """Body of a request to count tokens, POST /tokenize."""

    inputs: str


def generate_arguments(body: GenerateBody, *, stream: bool) -> GenerateArguments:
    """Return the SDK arguments. Raises InvalidRequest, in TGI's words where TGI has the same rule."""
    parameters = body.parameters
    if not body.inputs:
        raise InvalidRequest("`inputs` cannot be empty")
    if stream and parameters.decoder_input_details:
        raise InvalidRequest("`decoder_input_details` == true is not supported when streaming tokens")
    if parameters.watermark:
        raise InvalidRequest("`watermark` is not supported")
    _check_best_of(parameters, stream=stream)
    sampling = GenerateArguments(
        prompt=body.inputs,
        adapter=parameters.adapter_id,
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
        own_bytes=stream or parameters.wants_details,
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
