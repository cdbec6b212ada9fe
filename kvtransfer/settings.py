"""Settings of moving KV; one class for both sides."""

from dataclasses import dataclass

from mesh.domain.errors import ConfigurationError
from mesh.rpc.server import MAX_MESSAGE_BYTES


@dataclass(frozen=True, slots=True)
class TransferSettings:
    """How KV moves. The sender's `transports` are offered in this order; a receiver uses those it lists too."""

    transports: tuple[str, ...] = ("shm", "grpc")
    chunk_bytes: int = 8 << 20
    """Most payload in one chunk; a single block of one layer may be larger. Each chunk costs a few thread switches."""
    credit_chunks: int = 4
    """Chunks a receiver allows to be unacknowledged, per transfer."""
    lease_s: float = 10.0
    """A receiver that has heard nothing from a transfer's sender for this long gives it up, and a sender that has heard
    nothing from its receiver does. In between, the sender renews three times as often, whatever its engine does."""
    opening_lease_s: float = 300.0
    """A reservation that no sender has opened for this long is given up. It waits for the prompt's turn on the prefill
    worker, so this is as long as a router waits for a prefill; a router that is gone ends it sooner, by its stream."""
    progress_timeout_s: float = 10.0
    """A sender that waits this long for the receiver to write a chunk or confirm the commit gives the transfer up."""
    channel_idle_s: float = 60.0
    """A connection to a decode worker is closed after this long without a transfer."""
    num_threads: int = 2
    """Threads that copy KV, per process and direction."""
    arena_bytes: int = 64 << 20
    """Shared memory a sender takes for its payload on the way."""
    max_arena_bytes: int = 1 << 30
    """Largest arena a receiver opens."""
    shm_dir: str = "/dev/shm"

    def __post_init__(self) -> None:
        if not self.transports:
            raise ConfigurationError("transports must name at least one payload path")
        if not 1 <= self.chunk_bytes <= MAX_MESSAGE_BYTES // 2:
            raise ConfigurationError(f"chunk_bytes must be in [1, {MAX_MESSAGE_BYTES // 2}], got {self.chunk_bytes}")
        positive = ("credit_chunks", "num_threads", "lease_s", "opening_lease_s", "progress_timeout_s", "arena_bytes")
        for name in positive:
            if getattr(self, name) <= 0:
                raise ConfigurationError(f"{name} must be > 0, got {getattr(self, name)}")
