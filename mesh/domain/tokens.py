"""Tokens and sequence results that workers report.

Values that are created for every token are NamedTuples: a NamedTuple takes a quarter of the time of a frozen dataclass,
and the garbage collector stops tracking it.
"""

from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

from mesh.domain.errors import (
    DeadlineExceeded,
    InvalidRequest,
    LayoutMismatch,
    LeaseExpired,
    MeshError,
    ModelFailed,
    ReceiverLost,
    SequencePreempted,
    TooLarge,
    TransferCorrupt,
    TransferFailed,
    WorkerBusy,
    WorkerDraining,
)

# Prompt log-probs per message, alternatives included: tens of KiB, and a few milliseconds to convert.
_MAX_PART_LOGPROBS = 2048


class FinishReason(Enum):
    """The reason for the end of a generation. A failed or cancelled request has none: its stream ends with an error.

    UNKNOWN stands for a reason of a newer worker version and never leaves the mesh.
    """

    LENGTH = "length"
    EOS_TOKEN = "eos_token"
    STOP_SEQUENCE = "stop_sequence"
    UNKNOWN = "unknown"


class TokenLogprob(NamedTuple):
    """A token id and its natural log-prob under the raw model distribution."""

    id: int
    logprob: float


class SampledToken(NamedTuple):
    """A sampled token. `top` holds the `top_logprobs` most likely tokens, best first."""

    id: int
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


class PromptLogprob(NamedTuple):
    """Log-prob of one prompt token given the tokens before it; None for the first token."""

    logprob: float | None
    top: tuple[TokenLogprob, ...] = ()


SequenceKey = tuple[str, int]
"""The identity of a sequence: request id and attempt."""


class SequenceOutput(NamedTuple):
    """New tokens of one sequence after one engine step.

    `first_index` is the index of tokens[0] among the generated tokens of all attempts of the request.
    `prompt_logprobs` and `cached_tokens` come with the first token of an attempt. Between processes, the log-probs of a
    long prompt travel ahead in outputs without tokens (see `in_parts`).
    """

    request_id: str
    attempt: int
    first_index: int
    tokens: tuple[SampledToken, ...]
    finish_reason: FinishReason | None = None
    prompt_logprobs: tuple[PromptLogprob, ...] = ()
    cached_tokens: int = 0

    @property
    def key(self) -> SequenceKey:
        return self.request_id, self.attempt

    def in_parts(self) -> "Iterator[SequenceOutput]":
        """Split the output into outputs that each fit into one message."""
        entries, start = self.prompt_logprobs, 0
        if entries:
            num_entries = max(1, _MAX_PART_LOGPROBS // (1 + len(entries[-1].top)))
            while len(entries) - start > num_entries:
                part = entries[start : start + num_entries]
                yield SequenceOutput(self.request_id, self.attempt, self.first_index, (), prompt_logprobs=part)
                start += num_entries
        yield self._replace(prompt_logprobs=entries[start:]) if start else self


class SequenceFailure(Enum):
    """The reason for which a worker gave up a sequence."""

    NO_CAPACITY = "no_capacity"
    PREEMPTED = "preempted"
    KV_REFUSED = "kv_refused"
    KV_MISSING = "kv_missing"
    DRAINING = "draining"
    TOO_LARGE = "too_large"
    INTERNAL = "internal"
    DEADLINE = "deadline"
    REFUSED = "refused"
    MODEL_FAILED = "model_failed"


_FAILURES: tuple[tuple[type[MeshError], SequenceFailure], ...] = (
    (WorkerBusy, SequenceFailure.NO_CAPACITY),
    (SequencePreempted, SequenceFailure.PREEMPTED),
    (TransferCorrupt, SequenceFailure.KV_REFUSED),
    (LayoutMismatch, SequenceFailure.KV_REFUSED),
    (TransferFailed, SequenceFailure.KV_MISSING),
    (LeaseExpired, SequenceFailure.KV_MISSING),
    (ReceiverLost, SequenceFailure.KV_MISSING),
    (WorkerDraining, SequenceFailure.DRAINING),
    (DeadlineExceeded, SequenceFailure.DEADLINE),
    (TooLarge, SequenceFailure.TOO_LARGE),  # before its base class
    (InvalidRequest, SequenceFailure.REFUSED),
    (ModelFailed, SequenceFailure.MODEL_FAILED),
)


def failure_of(error: MeshError) -> SequenceFailure:
    """The reason that stands for `error`; INTERNAL for errors that no other reason fits."""
    return next((failure for cls, failure in _FAILURES if isinstance(error, cls)), SequenceFailure.INTERNAL)
