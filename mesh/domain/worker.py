"""Identity, capabilities and load of workers."""

from dataclasses import dataclass
from enum import Enum

from mesh.domain.kv import KVLayout, KVSpan

# Increase it when the meaning of an internal message changes: routers and workers of different versions refuse each
# other.
PROTOCOL_VERSION = 8
HEARTBEAT_INTERVAL_S = 0.5


class WorkerRole(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


class WorkerState(Enum):
    """Only READY workers accept new work. With STOPPED a worker says that its process ends, with SWITCHING that it
    comes back in another role; LOST ones have said nothing.
    """

    READY = "ready"
    DRAINING = "draining"
    STALLED = "stalled"
    LOST = "lost"
    STOPPED = "stopped"
    SWITCHING = "switching"

    @property
    def is_gone(self) -> bool:
        """True if the worker, in the role that it had, cannot be reached."""
        return self in (WorkerState.LOST, WorkerState.STOPPED, WorkerState.SWITCHING)


@dataclass(frozen=True, slots=True)
class KVEndpoint:
    """A rank that takes KV: host:port of its KvTransfer service, and the part of the KV that it holds."""

    address: str
    span: KVSpan


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter that a worker can serve, in memory or not. `digest` is a hash of what it computes: clients know
    the name, workers the digest.
    """

    name: str
    digest: str


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Identity and capabilities of one run of a worker. A restarted worker has a new `incarnation`, and so has one that
    has changed its role, as `switchable` workers can.

    `tensor_parallel * pipeline_parallel` processes, its ranks, compute each step together: the degrees divide the heads
    and the layers. `kv_endpoints` names those of a decode worker whose KV has an address of its own: ranks on several
    machines. If it is empty, the process at `address` takes all KV.
    """

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
    kv_endpoints: tuple[KVEndpoint, ...] = ()
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    adapters: tuple[Adapter, ...] = ()
    switchable: bool = False
    protocol_version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """The load of a worker. Blocks of the prefix cache count as free, because they can be evicted. `pending_tokens` are
    still to be computed; other token counts are totals since the worker started. Speculative decoding proposed
    `drafted_tokens`; `accepted_tokens` were correct.
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
