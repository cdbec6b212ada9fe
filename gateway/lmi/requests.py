"""LMI's requests: bodies in JSON, text or CSV, and their translation to arguments of the SDK."""

import csv
import io
from collections.abc import Iterator, Mapping
from itertools import islice
from types import MappingProxyType
from typing import Annotated

import structlog
from pydantic import Field

from gateway.errors import UnsupportedMediaType
from gateway.schema import (
    MAX_PROMPTS,
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
    structure_arguments,
)
from tandem import GenerateArguments, InvalidRequest

log = structlog.get_logger(__name__)

_DEFAULT_MAX_NEW_TOKENS = 30
_MAX_LOGGED = 16
_MAX_LOGGED_CHARS = 64
_NO_BEAMS = "there is no beam search"
# LMI parameters that are accepted without effect, and the reason, which is logged.
_WITHOUT_EFFECT: Mapping[str, str] = MappingProxyType({"length_penalty": _NO_BEAMS, "early_stopping": _NO_BEAMS})
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
    adapters: Few[str] | str | None = None

    @property
    def adapter_names(self) -> list[str]:
        """The adapter of each input; "" for none. Raises InvalidRequest."""
        if self.adapters is None or isinstance(self.adapters, str):
            return [self.adapters or ""] * len(self.prompts)
        num_inputs, num_named = len(self.prompts), len(self.adapters)
        if num_named != num_inputs:
            raise InvalidRequest(f"adapters must have one name for each input: got {num_named} for {num_inputs}")
        return self.adapters

    @property
    def prompts(self) -> list[str]:
        return [self.inputs] if isinstance(self.inputs, str) else self.inputs

    @property
    def can_stream(self) -> bool:
        """False for options that need a complete answer."""
        return isinstance(self.inputs, str) and not self.parameters.wants_prefill and self.parameters.num_choices == 1


def read_payload(body: bytes, content_type: str) -> dict[str, object]:
    """Parse the body; text and CSV become {"inputs": ...}. Raises InvalidRequest or UnsupportedMediaType."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind in ("text/plain", "text/csv"):
        try:
            text = body.decode("utf-8-sig" if kind == "text/csv" else "utf-8")  # spreadsheets begin CSV with a mark
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


def invocation_arguments(body: InvocationBody, *, model: str, sampling_by_default: bool) -> GenerateArguments:
    """Return the arguments that all inputs share, without a prompt. Raises InvalidRequest."""
    parameters = body.parameters
    if parameters.num_beams not in (None, 1):
        raise InvalidRequest("num_beams is not supported")
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
        top_k=0 if parameters.top_k in (None, -1) else parameters.top_k,
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
        own_bytes=parameters.details or parameters.wants_prefill or parameters.num_choices > 1,
    )
    return sampling | structure_arguments(parameters)


def temperature_of(parameters: Parameters, *, sampling_by_default: bool) -> float:
    """Return the temperature: 0 (greedy) unless the request enables sampling in one of LMI's ways."""
    if parameters.do_sample is False:
        return 0.0
    if parameters.temperature is not None:
        return parameters.temperature
    return 1.0 if parameters.do_sample or sampling_by_default else 0.0


def log_dropped(payload: Mapping[str, object], request_id: str) -> None:
    """Log the parameters that have no effect in one line, as LMI does."""
    parameters = payload.get("parameters")
    if not isinstance(parameters, dict):
        return
    unknown = sorted(parameters.keys() - Parameters.model_fields.keys())[:_MAX_LOGGED]
    if unknown:
        reasons = {name[:_MAX_LOGGED_CHARS]: _WITHOUT_EFFECT.get(name, "unknown") for name in unknown}
        log.warning("parameters have no effect", request_id=request_id, dropped=reasons)
