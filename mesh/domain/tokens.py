"""What a worker says about tokens.

What is made anew for every token is a NamedTuple: making one takes a quarter of the time that a frozen dataclass takes.
"""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class FinishReason(Enum):
    """Why a generation ended; the value is what clients see."""

    LENGTH = "length"
    EOS_TOKEN = "eos_token"
    STOP_SEQUENCE = "stop_sequence"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token id with its natural log-prob under the raw model distribution."""

    id: int
    logprob: float


class SampledToken(NamedTuple):
    """A token that was chosen; `top` holds the most likely ones, best first, as many as were asked for."""

    id: int
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprob:
    """Log-prob of one prompt token given those before it; None for the first."""

    logprob: float | None
    top: tuple[TokenLogprob, ...] = ()


class StepOutput(NamedTuple):
    """New tokens of one sequence after one engine step.

    `first_index` is the index of tokens[0] among the generated tokens, counted over all attempts of the request.
    `prompt_logprobs` and `cached_tokens` come with the first token of an attempt only.
    """

    request_id: str
    attempt: int
    first_index: int
    tokens: tuple[SampledToken, ...]
    finish_reason: FinishReason | None = None
    prompt_logprobs: tuple[PromptLogprob, ...] = ()
    cached_tokens: int = 0


class SequenceFailure(Enum):
    """Why a worker cannot go on with a sequence."""

    NO_CAPACITY = "no_capacity"
    PREEMPTED = "preempted"
    KV_REFUSED = "kv_refused"
    KV_MISSING = "kv_missing"
    DRAINING = "draining"
    TOO_LARGE = "too_large"
    INTERNAL = "internal"
    DEADLINE = "deadline"
    REFUSED = "refused"
