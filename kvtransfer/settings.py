"""Settings of KV transfers, for both sides."""

from dataclasses import dataclass

from mesh.domain.errors import ConfigurationError
from mesh.rpc.server import MAX_MESSAGE_BYTES

_MAX_CONNECT_S = 5.0


@dataclass(frozen=True, slots=True)
class TransferSettings:
    """A sender offers its `transports` in this order; a receiver accepts the first one that it lists too."""

    transports: tuple[str, ...] = ("shm", "grpc")
    chunk_bytes: int = 8 << 20
    """Maximum payload of a chunk, unless a single block of one layer is larger. A chunk costs a few thread switches."""
    credit_chunks: int = 4
    """Unacknowledged chunks that a receiver allows per transfer."""
    receiver_chunks: int = 4
    """Unacknowledged chunks that a sender has at one receiver, over all transfers to it. They are fewer than fit into
    the arena, so that a receiver that hangs leaves memory for the others."""
    lease_s: float = 10.0
    """Either side ends a transfer after this long without a message from the other. The sender renews three times per
    lease, even while its engine computes."""
    opening_lease_s: float = 300.0
    """A reservation ends if no sender opens it for this long. The prompt may have to queue on the prefill worker, so
    this equals the router's limit for a prefill. If the router disconnects, the decode worker ends the reservation
    sooner."""
    progress_timeout_s: float = 10.0
    """A sender ends the transfer if the receiver takes this long to acknowledge a chunk or to confirm the commit."""
    channel_idle_s: float = 60.0
    """A connection to a decode worker is closed after this long without a transfer."""
    num_threads: int = 2
    """Threads that copy KV at once, per process and direction."""
    arena_bytes: int = 64 << 20
    """Shared memory that a sender allocates for payload in transit."""
    max_arena_bytes: int = 1 << 30
    """Largest arena that a receiver opens."""
    shm_dir: str = "/dev/shm"
    trust_fabric: bool = False
    """Use nixl and mooncake, and gloo and nccl beyond this machine, too. They neither authenticate nor encrypt."""

    @property
    def connect_s(self) -> float:
        """Limit on the time to connect to a peer outside gRPC: the lease of the transfer runs meanwhile."""
        return min(_MAX_CONNECT_S, self.lease_s / 2)

    def __post_init__(self) -> None:
        if not self.transports:
            raise ConfigurationError("transports must name at least one payload path")
        if not 1 <= self.chunk_bytes <= MAX_MESSAGE_BYTES // 2:
            raise ConfigurationError(f"chunk_bytes must be in [1, {MAX_MESSAGE_BYTES // 2}], got {self.chunk_bytes}")
        counts = ("credit_chunks", "receiver_chunks", "num_threads", "arena_bytes")
        for name in (*counts, "lease_s", "opening_lease_s", "progress_timeout_s"):
            if getattr(self, name) <= 0:
                raise ConfigurationError(f"{name} must be > 0, got {getattr(self, name)}")
