"""Workers as the mesh knows them."""

from dataclasses import dataclass
from enum import Enum

from mesh.domain.kv import KVLayout

# Raised whenever the meaning of an internal message changes; routers and workers of other versions refuse each other.
PROTOCOL_VERSION = 5


class WorkerRole(Enum):
    """What a worker does."""

    PREFILL = "prefill"
    DECODE = "decode"


class WorkerState(Enum):
    """Whether a worker takes work."""

    READY = "ready"
    DRAINING = "draining"
    STALLED = "stalled"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Identity and capabilities of one run of a worker. A restart has another `incarnation`."""

    worker_id: str
    incarnation: str
    role: WorkerRole
    address: str
    model: str
    tokenizer_fingerprint: str
    layout: KVLayout
    max_batch_tokens: int
    max_num_seqs: int
    num_blocks: int
    max_model_len: int
    device: str = "cpu"
    pid: int = 0
    speculative: str = "none"
    protocol_version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """How busy a worker is. Cached blocks count as free: they are taken when needed. Counts of tokens are since its
    start; of the drafted ones, guessed by speculative decoding, the accepted ones were right.
    """

    free_blocks: int = 0
    num_running: int = 0
    num_waiting: int = 0
    pending_tokens: int = 0
    generated_tokens: int = 0
    computed_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """A block entered (`evicted=False`) or left a worker's prefix cache."""

    block_hash: bytes
    evicted: bool
