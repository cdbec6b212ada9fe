"""The plug point: how a chunk's payload travels beside (or inside) the gRPC conversation.

Life of a payload: the sender acquires a `Slot` on the event loop, a thread gathers KV into its buffer and seals it, the
chunk message goes out with what `seal` returned, the receiver's thread fetches the payload, verifies and writes it, and
its ack makes the sender release the slot.

To add a transport: one new file with a `SendTransport` and a `ReceiveTransport`, and one line each in
`transports/__init__.py`. What it needs to meet (rank, address, keys) goes into its `TransportOffer`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

MOST_PARTS = 1024  # what Linux reads into with one call


@dataclass(frozen=True, slots=True)
class TransportOffer:
    """How a receiver can reach the sender's payload."""

    name: str
    arena: str = ""
    nonce: bytes = b""
    arena_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Payload:
    """Where one chunk's payload is: in the message itself, or at an offset of the arena."""

    inline: bytes | memoryview = b""
    arena_offset: int = 0


class Slot(Protocol):
    """Memory for one chunk's payload until its ack."""

    def buffer(self) -> memoryview:
        """Writable, format "B", exactly as long as was asked for. Called once, on a gather thread."""
        ...

    def seal(self) -> Payload:
        """The buffer is full and will not be touched again. Called once, on the same thread."""
        ...

    def release(self) -> None:
        """Give the memory back. On the event loop, idempotent; called after the ack, or when the transfer is over.

        In the second case the receiver may still be reading: whatever it reads then must not verify or not matter.
        """
        ...


Reader: TypeAlias = Callable[[int, Sequence[memoryview]], None]
"""`reader(start, parts)` fills `parts`, at most MOST_PARTS, with a payload's bytes from `start` on; on a worker thread,
with the errors of `PayloadSource.fetch`."""


class SendTransport(Protocol):
    """A sender's side, shared by all its transfers. Methods run on the event loop and do not block."""

    name: str

    def offer(self) -> TransportOffer:
        """What receivers are told."""
        ...

    async def acquire(self, num_bytes: int) -> Slot:
        """Memory for `num_bytes`. Waits, first come first served, until there is some; cancelling leaves nothing."""
        ...

    def close(self) -> None:
        """Free everything. No slot is in use any more."""
        ...


class PayloadSource(Protocol):
    """A receiver's view of one sender's payloads, for one transfer."""

    def fetch(self, payload: Payload, num_bytes: int) -> bytes | memoryview:
        """The payload, as memory that nobody changes until this thread's next fetch. Runs on a worker thread.

        Raises TransferCorrupt if `payload` points outside of what was offered, TransferFailed if it cannot be read.
        """
        ...

    def reader(self, payload: Payload) -> Reader | None:
        """For KV that can be written in place: saves the copy that `fetch` makes. None if `fetch` makes none."""
        ...

    def close(self) -> None:
        """The transfer is over and no fetch is running."""
        ...


class ReceiveTransport(Protocol):
    """A receiver's side."""

    name: str

    def connect(self, offer: TransportOffer) -> PayloadSource | None:
        """A source if this offer really works here, else None. On the event loop: must be quick. Never raises."""
        ...
