"""Results of the client: small frozen values without protobuf."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Priority(StrEnum):
    """Priority of a request in the queue. Plain text is accepted too: `priority="batch"`."""

    BATCH = "batch"  # work without a waiting user
    STANDARD = "standard"
    INTERACTIVE = "interactive"


class KeepPriority(StrEnum):
    """The order in which cached KV goes when a worker's memory is short. Text is accepted: `keep_priority="low"`."""

    LOW = "low"  # nobody will ask for it again
    NORMAL = "normal"
    HIGH = "high"


class FinishReason(StrEnum):
    """The reason for the end of a choice. It compares equal to its text: `reason == "length"`."""

    LENGTH = "length"
    EOS_TOKEN = "eos_token"
    STOP_SEQUENCE = "stop_sequence"
    UNKNOWN = "unknown"  # a reason that only a newer server knows


@dataclass(frozen=True, slots=True)
class TopToken:
    """One of the most probable tokens at a position. `logprob` is a natural logarithm.

    `own_bytes`, with the argument of this name: the bytes of a token that begins or ends within a character.
    """

    id: int
    text: str
    logprob: float
    own_bytes: bytes | None = None


@dataclass(frozen=True, slots=True)
class Token:
    """A token with the text it adds.

    `text` is empty for special tokens, and while the server withholds it (part of a character, a possible stop string).
    `logprob` is the natural logarithm of the raw probability; None for the first token of a prompt, and if it was not
    computed. `own_bytes`, with the argument of this name: the bytes of the token itself, if they are not those of
    `text`. They may begin or end within a character, and are empty for tokens that are left out of the text.
    """

    id: int
    text: str
    logprob: float | None = None
    special: bool = False
    top: tuple[TopToken, ...] = ()
    own_bytes: bytes | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts. `cached_tokens` is the part of the prompt that was found in a prefix cache."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class AttemptTiming:
    """Milliseconds of one attempt, by phase. Each phase ends where the next one starts.

    `queue`: waiting for workers with capacity. `dispatch`: reserving memory, and the queue of the prefill worker.
    `prefill`: until the first token. `transfer`: until the KV has arrived, not counting overlap with prefill. `wait`:
    until the first token of the decode worker. `decode`: until the last token or the failure. `backoff`: until the next
    attempt. `kv_transfer_ms` is the complete KV transfer, with overlap; None if no KV was transferred.
    """

    queue_ms: float = 0.0
    dispatch_ms: float = 0.0
    prefill_ms: float = 0.0
    transfer_ms: float = 0.0
    wait_ms: float = 0.0
    decode_ms: float = 0.0
    backoff_ms: float = 0.0
    kv_transfer_ms: float | None = None


ATTEMPT_PHASES = ("queue", "dispatch", "prefill", "transfer", "wait", "decode", "backoff")


@dataclass(frozen=True, slots=True)
class Timing:
    """Time of a choice by phase, on the clock of the router. `total_ms` is the sum of `prepare_ms` (admission,
    template, tokenization) and all phases of all attempts. More than one attempt means that the request was replayed.
    After the loss of a router, it is the time at the router that finished the answer.
    """

    total_ms: float
    prepare_ms: float
    first_token_ms: float
    attempts: tuple[AttemptTiming, ...] = ()

    @property
    def phases_ms(self) -> dict[str, float]:
        """Milliseconds by phase, in order, added up over all attempts."""
        phases = {name: sum(getattr(attempt, f"{name}_ms") for attempt in self.attempts) for name in ATTEMPT_PHASES}
        return {"prepare": self.prepare_ms, **phases}


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One token of a stream.

    The last event of a choice has `finish_reason`, `usage` and, if the router sends it, `timing`. `echo` and
    `prompt_tokens` come with the first event if they were requested. The stream's first event also has
    `num_prompt_tokens`, and `in_reasoning` if the prompt ends within the model's reasoning. `token` is None only if a
    choice ended without a further token. `model` is the revision that answers, if the name that was asked for stands
    for several.
    """

    index: int
    token: Token | None
    request_id: str
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    echo: str = ""
    prompt_tokens: tuple[Token, ...] = ()
    timing: Timing | None = None
    in_reasoning: bool = False
    num_prompt_tokens: int = 0
    model: str = ""

    @property
    def text(self) -> str:
        """The text to print for this event: the echo and the text of the token."""
        return self.echo + (self.token.text if self.token else "")


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer to the prompt. `text` starts with the prompt if echo was requested."""

    index: int
    text: str
    tokens: tuple[Token, ...]
    finish_reason: FinishReason
    usage: Usage
    timing: Timing | None = None

    @property
    def confidence(self) -> float | None:
        """exp(mean log-prob) of the generated tokens, in (0, 1]; None if there are no log-probs."""
        return confidence(self.tokens)


@dataclass(frozen=True, slots=True)
class Result:
    """A complete answer. Its own `text`, `tokens`, ... are those of the first choice. `model` is the revision that has
    answered, if the name that was asked for stands for several.
    """

    request_id: str
    choices: tuple[Choice, ...]
    prompt_tokens: tuple[Token, ...] = ()
    model: str = ""

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def tokens(self) -> tuple[Token, ...]:
        return self.choices[0].tokens

    @property
    def finish_reason(self) -> FinishReason:
        """The finish reason of the first choice."""
        return self.choices[0].finish_reason

    @property
    def usage(self) -> Usage:
        """The first choice's token counts."""
        return self.choices[0].usage

    @property
    def timing(self) -> Timing | None:
        """The phases of the first choice and their times."""
        return self.choices[0].timing

    @property
    def confidence(self) -> float | None:
        return self.choices[0].confidence


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Sampling that a model's generation_config.json recommends; None where it says nothing. `generate` and `stream` do
    not apply it.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True)
class Model:
    """A served model and its limits. `ready` means that it has workers. `has_reasoning` means that its chat template
    supports reasoning. `serving_since_unix_s` is when the router began to serve the model, in seconds since 1970;
    it and `max_concurrent_requests` are 0 if the router does not report them.
    `adapters` are the names of its LoRA adapters. `sampling_defaults` is empty if the router does not report it.
    `stop_strings` end each answer whose request has no `stop`, no `ignore_eos` and no structure.
    """

    name: str
    max_input_tokens: int
    max_total_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool
    ready: bool
    tool_call_format: str = ""
    is_encoder_decoder: bool = False
    max_concurrent_requests: int = 0
    has_reasoning: bool = False
    adapters: tuple[str, ...] = ()
    sampling_defaults: SamplingDefaults = SamplingDefaults()
    serving_since_unix_s: int = 0
    stop_strings: tuple[str, ...] = ()


def confidence(tokens: Sequence[Token]) -> float | None:
    """exp(mean log-prob) of `tokens`; None if none has a log-prob."""
    logprobs = [token.logprob for token in tokens if token.logprob is not None]
    return math.exp(math.fsum(logprobs) / len(logprobs)) if logprobs else None
