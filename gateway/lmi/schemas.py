"""Bodies of LMI requests, as JSON, text or CSV."""

import csv
import io
from collections.abc import Iterator
from itertools import islice
from typing import Annotated, Any

from pydantic import Field

from gateway.errors import UnsupportedMediaType
from gateway.schema import (
    MAX_PROMPTS,
    AnyJson,
    Bias,
    Body,
    Choices,
    Count,
    Few,
    Many,
    Real,
    Seed,
    StructuredBody,
    read_json,
)
from tandem import InvalidRequest

_CSV_COLUMN = "inputs"
_MAX_COMMAS = 16_384


class Parameters(StructuredBody):
    """Generation parameters, under the names of all of LMI's backends. None means the default."""

    max_new_tokens: Count | None = None
    max_seq_len: Annotated[Count, Field(ge=1)] | None = None
    do_sample: bool | None = None
    temperature: Real | None = None
    top_k: Count | None = None
    top_p: Real | None = None
    min_p: Real | None = None
    typical_p: Real | None = None
    repetition_penalty: Real | None = None
    presence_penalty: Real | None = None
    frequency_penalty: Real | None = None
    num_beams: Count | None = None
    seed: Seed | None = None
    stop_sequences: Few[str] | str | None = None
    stop: Few[str] | str | None = None
    stop_token_ids: Few[Count] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos_token: bool | None = None
    ignore_eos: bool | None = None
    details: bool | None = None
    decoder_input_details: bool = False
    return_full_text: bool = False
    n: Choices | None = None
    best_of: Choices | None = None
    top_n_tokens: Count | None = None
    logprobs: Count | None = None
    prompt_logprobs: Count | None = None
    truncate: Annotated[Count, Field(ge=1)] | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    min_length: Count | None = None
    min_tokens: Count | None = None
    bad_sequences: Few[str] | str | None = None
    bad_words: Few[str] | str | None = None
    logit_bias: Bias | None = None

    @property
    def num_choices(self) -> int:
        """Number of choices. As in LMI, `best_of` alone returns all of them."""
        return self.n or self.best_of or 1

    @property
    def num_top(self) -> int:
        """Number of likeliest tokens per position. As in LMI, `logprobs: 1` asks for none."""
        return self.top_n_tokens or (self.logprobs if (self.logprobs or 0) > 1 else None) or 0

    @property
    def wants_prefill(self) -> bool:
        """True if the answer has the prompt's log-probs."""
        return self.decoder_input_details or self.prompt_logprobs is not None


class InvocationBody(Body):
    """Body of POST /invocations in LMI's own API."""

    inputs: str | Many[str]
    parameters: Parameters = Parameters()
    stream: bool = False
    adapters: AnyJson = None

    @property
    def prompts(self) -> list[str]:
        return [self.inputs] if isinstance(self.inputs, str) else self.inputs

    @property
    def can_stream(self) -> bool:
        """False for options that need a complete answer."""
        return isinstance(self.inputs, str) and not self.parameters.wants_prefill and self.parameters.num_choices == 1


def read_payload(body: bytes, content_type: str) -> dict[str, Any]:
    """Parse the body; text and CSV become {"inputs": ...}. Raises InvalidRequest or UnsupportedMediaType."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind in ("text/plain", "text/csv"):
        try:
            text = body.decode()
        except UnicodeDecodeError:
            raise InvalidRequest("the body is not UTF-8") from None
        return {"inputs": text if kind == "text/plain" else _csv_column(text)}
    payload = read_json(body)
    if kind not in ("", "application/json", "application/x-www-form-urlencoded", "application/octet-stream"):
        raise UnsupportedMediaType(f"content type {kind[:64]} is not supported")
    if not isinstance(payload, dict):
        raise InvalidRequest("the body must be a JSON object")
    return payload


def _csv_column(text: str) -> list[str]:
    """Return the strings of the column `inputs`. Raises InvalidRequest for more than `MAX_PROMPTS`."""
    rows = csv.DictReader(_lines(text))
    try:
        if _CSV_COLUMN not in (rows.fieldnames or ()):
            raise InvalidRequest(f"the CSV has no column {_CSV_COLUMN}")
        texts = [row[_CSV_COLUMN] or "" for row in islice(rows, MAX_PROMPTS + 1)]
    except csv.Error as error:
        raise InvalidRequest(f"the CSV cannot be read: {error}") from None
    if len(texts) > MAX_PROMPTS:
        raise InvalidRequest(f"the CSV has more than {MAX_PROMPTS} rows")
    return texts


def _lines(text: str) -> Iterator[str]:
    """Yield the lines. Raises InvalidRequest for a line that would take long to split."""
    for line in io.StringIO(text):
        if line.count(",") > _MAX_COMMAS:
            raise InvalidRequest(f"a line of the CSV has more than {_MAX_COMMAS:,} commas")
        yield line
