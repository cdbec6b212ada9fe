"""What the client returns: small frozen values, no protobuf."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Priority(StrEnum):
    """Which requests are taken first when they have to wait. Plain text will do too: `priority="batch"`."""

    BATCH = "batch"  # work nobody waits for
    STANDARD = "standard"
    INTERACTIVE = "interactive"


class FinishReason(StrEnum):
    """Why a generation ended. Compares equal to its text: `reason == "length"`."""

    LENGTH = "length"
    EOS_TOKEN = "eos_token"
    STOP_SEQUENCE = "stop_sequence"
    CANCELLED = "cancelled"
    ERROR = "error"
    UNKNOWN = "unknown"  # a newer server's reason


@dataclass(frozen=True, slots=True)
class TopToken:
    """An alternative the model considered. `logprob` is a natural log."""

    id: int
    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class Token:
    """A token with the text it adds.

    `text` is empty while the server holds it back (part of a character, a possible stop string) and for special tokens.
    `logprob` is the natural log of the raw probability; None for a prompt's first token and where none was computed.
    """

    id: int
    text: str
    logprob: float | None = None
    special: bool = False
    top: tuple[TopToken, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts. `cached_tokens` of the prompt were found in a prefix cache."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class AttemptTiming:
    """Milliseconds of one dispatch, phase by phase; each ends where the next one begins.

    `queue`: for workers with room. `dispatch`: reserving memory, the prefill worker's queue. `prefill`: until the first
    token. `transfer`: until the KV is handed over, as far as computing did not hide it. `wait`: until the decode
    worker's first token. `decode`: until the last token, or the failure. `backoff`: from there to the next attempt.
    `kv_transfer_ms` is the whole transfer, also while the prompt was computed; None if no KV moved.
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
    """Where a choice's time went, by the router's clock: `total_ms` is `prepare_ms` (permit, template, tokens) and all
    phases of all attempts. More than one attempt means that the request was replayed.
    """

    total_ms: float
    prepare_ms: float
    first_token_ms: float
    attempts: tuple[AttemptTiming, ...] = ()

    @property
    def phases_ms(self) -> dict[str, float]:
        """Milliseconds by phase, in order, summed over attempts."""
        phases = {name: sum(getattr(attempt, f"{name}_ms") for attempt in self.attempts) for name in ATTEMPT_PHASES}
        return {"prepare": self.prepare_ms, **phases}


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One token of a stream.

    The last event of a choice has `finish_reason`, `usage` and, from routers that send it, `timing`. `echo` and
    `prompt_tokens` come with the first event, when they were asked for. `token` is None only if a choice ended without
    a further token.
    """

    index: int
    token: Token | None
    request_id: str
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    echo: str = ""
    prompt_tokens: tuple[Token, ...] = ()
    timing: Timing | None = None

    @property
    def text(self) -> str:
        """What to print for this event."""
        return self.echo + (self.token.text if self.token else "")


@dataclass(frozen=True, slots=True)
class Choice:
    """One continuation of the prompt. `text` begins with the prompt when echo was asked for."""

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
    """A complete answer. Its own `text`, `tokens`, ... are those of the first choice."""

    request_id: str
    choices: tuple[Choice, ...]
    prompt_tokens: tuple[Token, ...] = ()

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.choices[0].text

    @property
    def tokens(self) -> tuple[Token, ...]:
        """The first choice's tokens."""
        return self.choices[0].tokens

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first choice ended."""
        return self.choices[0].finish_reason

    @property
    def usage(self) -> Usage:
        """The first choice's token counts."""
        return self.choices[0].usage

    @property
    def timing(self) -> Timing | None:
        """Where the first choice's time went."""
        return self.choices[0].timing

    @property
    def confidence(self) -> float | None:
        """The first choice's confidence."""
        return self.choices[0].confidence


@dataclass(frozen=True, slots=True)
class Model:
    """A served model and its limits. `ready` means that workers for it are there."""

    name: str
    max_input_tokens: int
    max_total_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool
    ready: bool
    tool_call_format: str = ""


def confidence(tokens: Sequence[Token]) -> float | None:
    """exp(mean log-prob) of `tokens`; None if none has a log-prob."""
    logprobs = [token.logprob for token in tokens if token.logprob is not None]
    return math.exp(math.fsum(logprobs) / len(logprobs)) if logprobs else None
