"""Messages of a prefill worker to the router about one prompt: it has begun, its first token, its KV is verified."""

from dataclasses import dataclass

from mesh.domain.tokens import SequenceOutput


@dataclass(frozen=True, slots=True)
class PrefillStarted:
    """The prompt's first step began `elapsed_s` ago; the KV of its first layers exists by now."""

    elapsed_s: float


@dataclass(frozen=True, slots=True)
class TransferFinished:
    """The decode worker has verified all KV.

    `duration_s`: since the transfer was opened; None if the worker does not report it.
    """

    num_bytes: int
    duration_s: float | None
    transport: str = ""


PrefillEvent = PrefillStarted | SequenceOutput | TransferFinished
"""The output is the first token, with prompt log-probs if requested."""
