"""Bodies of TGI requests, with TGI's own ranges. The router checks limits that depend on the model."""

from typing import Annotated

from pydantic import Field

from gateway.schema import Body, JsonObject, Name
from mesh.domain.request import MAX_CHOICES, MAX_SEED

Positive = Annotated[float, Field(gt=0, le=1e9)]
Whole = Annotated[int, Field(ge=1, lt=2**31)]
Texts = Annotated[tuple[str, ...], Field(max_length=256, fail_fast=True)]
# TGI requires less than 1. Clients of other servers send 1 for "off", which is accepted, too.
Share = Annotated[float, Field(gt=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class Parameters(Body):
    """Generation parameters. None means TGI's default."""

    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Positive | None = None
    repetition_penalty: Positive | None = None
    frequency_penalty: Penalty | None = None
    top_k: Whole | None = None
    top_p: Share | None = None
    typical_p: Share | None = None
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
    """Body of POST /tokenize."""

    inputs: str
