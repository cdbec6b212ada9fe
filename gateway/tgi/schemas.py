"""Bodies of TGI requests. `parameters` has TGI's own ranges; what only the router can know is checked there."""

from typing import Annotated, Any

from pydantic import Field

from gateway.schema import Body

Positive = Annotated[float, Field(gt=0)]
MAX_BEST_OF = 8
# TGI wants less than 1; clients for other servers send 1 for "off", which harms nobody.
Share = Annotated[float, Field(gt=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class Parameters(Body):
    """How to generate. None is TGI's default."""

    best_of: Annotated[int, Field(ge=1, le=MAX_BEST_OF)] | None = None
    temperature: Positive | None = None
    repetition_penalty: Positive | None = None
    frequency_penalty: Penalty | None = None
    top_k: Annotated[int, Field(ge=1)] | None = None
    top_p: Share | None = None
    typical_p: Share | None = None
    do_sample: bool = False
    max_new_tokens: Annotated[int, Field(ge=1)] | None = None
    return_full_text: bool | None = None
    stop: tuple[str, ...] = ()
    stop_sequences: tuple[str, ...] = ()
    truncate: Annotated[int, Field(ge=1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    top_n_tokens: Annotated[int, Field(ge=0)] | None = None
    details: bool = False
    decoder_input_details: bool = False
    watermark: bool = False
    grammar: dict[str, Any] | None = None
    adapter_id: str | None = None

    @property
    def samples(self) -> bool:
        """True if tokens are drawn: asked for, or implied by anything that changes the distribution."""
        return self.do_sample or any(
            value not in (None, 1.0) for value in (self.temperature, self.top_k, self.top_p, self.typical_p)
        )

    @property
    def num_choices(self) -> int:
        """All are shown, the best as the answer itself."""
        return self.best_of or 1

    @property
    def wants_details(self) -> bool:
        """The prompt's tokens are a part of the details."""
        return self.details or self.decoder_input_details


class GenerateBody(Body):
    """POST /generate, /generate_stream and /. Without parameters, TGI samples."""

    inputs: str
    parameters: Parameters = Parameters(do_sample=True)
    stream: bool = False


class TokenizeBody(Body):
    """POST /tokenize."""

    inputs: str
