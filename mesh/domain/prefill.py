"""Messages between router and prefill worker about one prompt: where its KV goes; then that it has begun, its first
token, and that its KV is verified.
"""

from dataclasses import dataclass

from mesh.domain.tokens import SequenceOutput
from mesh.domain.worker import KVEndpoint, WorkerInfo


@dataclass(frozen=True, slots=True)
class KVDestination:
    """Blocks that a decode worker holds for a prompt's KV, under `transfer_id`. It already has the KV of the first
    `ready_tokens` tokens. If `kv_endpoints` is empty, one process at `address` takes all KV.
    """

    address: str
    worker_id: str
    incarnation: str
    transfer_id: str
    ready_tokens: int
    kv_endpoints: tuple[KVEndpoint, ...] = ()

    @classmethod
    def at(cls, decode: WorkerInfo, transfer_id: str, ready_tokens: int) -> "KVDestination":
        return cls(decode.address, decode.worker_id, decode.incarnation, transfer_id, ready_tokens, decode.kv_endpoints)


@dataclass(frozen=True, slots=True)
class PrefillStarted:
    """The prompt's first step began `elapsed_s` ago; the KV of its first layers exists by now."""

    elapsed_s: float


@dataclass(frozen=True, slots=True)
class TransferFinished:
    """The decode worker has verified all KV, `duration_s` after the transfer was opened."""

    num_bytes: int
    duration_s: float


PrefillEvent = PrefillStarted | SequenceOutput | TransferFinished
"""The output is the first token, with prompt log-probs if requested."""
