"""Bodies of LMI requests, and the content types they come in."""

import csv
import io
import json
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from gateway.errors import UnsupportedMediaType
from gateway.schema import Body
from gateway.structures import StructuredBody
from tandem import InvalidRequest

_CSV_COLUMN = "inputs"


class Parameters(StructuredBody):
    """How to generate: the names of all backends of LMI. None is the default."""

    max_new_tokens: int | None = None
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    length_penalty: float | None = None
    early_stopping: bool | None = None
    num_beams: int | None = None
    seed: int | None = None
    stop_sequences: list[str] | str | None = None
    stop: list[str] | str | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos_token: bool | None = None
    ignore_eos: bool | None = None
    details: bool | None = None
    decoder_input_details: bool = False
    return_full_text: bool = False
    n: int | None = Field(default=None, ge=1)
    best_of: int | None = Field(default=None, ge=1)
    top_n_tokens: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    truncate: int | None = Field(default=None, ge=1)
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    min_length: int | None = None
    min_tokens: int | None = None
    bad_sequences: list[str] | str | None = None
    bad_words: list[str] | str | None = None
    logit_bias: dict[int, float] | None = None

    @property
    def num_choices(self) -> int:
        """As LMI has it, `best_of` alone asks for all of them."""
        return self.n or self.best_of or 1

    @property
    def num_top(self) -> int:
        """Likeliest tokens to show at each place: LMI always computes one, so `logprobs: 1` asks for none."""
        return self.top_n_tokens or (self.logprobs if (self.logprobs or 0) > 1 else None) or 0

    @property
    def wants_prefill(self) -> bool:
        """True if the prompt's log-probs are to be shown."""
        return self.decoder_input_details or self.prompt_logprobs is not None


class InvocationBody(Body):
    """`inputs` with parameters."""

    inputs: str | list[str]
    parameters: Parameters = Parameters()
    stream: bool = False
    adapters: Any = None

    @property
    def prompts(self) -> list[str]:
        """One or many."""
        return [self.inputs] if isinstance(self.inputs, str) else self.inputs


def read_payload(body: bytes, content_type: str) -> dict[str, Any]:
    """The JSON object of a request, or what stands for it. Raises InvalidRequest."""
    kind = content_type.partition(";")[0].strip().lower()
    try:
        if kind == "text/plain":
            return {"inputs": body.decode()}
        if kind == "text/csv":
            return {"inputs": _csv_column(body.decode())}
        payload = json.loads(body)
    except ValueError:
        raise InvalidRequest(
            "the body is not valid JSON" if kind != "text/plain" else "the body is not UTF-8"
        ) from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    if kind not in ("", "application/json", "application/x-www-form-urlencoded", "application/octet-stream"):
        raise UnsupportedMediaType(f"content type {kind[:64]} is not read here")
    if not isinstance(payload, dict):
        raise InvalidRequest("the body must be a JSON object")
    return payload


def unknown_parameters(payload: Mapping[str, Any]) -> list[str]:
    """Parameters that LMI, too, would drop with a warning."""
    parameters = payload.get("parameters")
    return sorted(set(parameters) - set(Parameters.model_fields)) if isinstance(parameters, dict) else []


def _csv_column(text: str) -> list[str]:
    rows = csv.DictReader(io.StringIO(text))
    if _CSV_COLUMN not in (rows.fieldnames or ()):
        raise InvalidRequest(f"the CSV has no column {_CSV_COLUMN}")
    return [row[_CSV_COLUMN] or "" for row in rows]
