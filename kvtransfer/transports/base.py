"""The interface of a transport, which carries payloads outside (or inside) the gRPC messages.

Life of a payload: the sender acquires a `Slot` on the event loop; a thread copies KV into the slot's buffer and seals
it; the chunk message goes out with the `Payload` that `seal` returned; a thread of the receiver fetches the payload,
verifies it and writes it; the receiver's ack makes the sender release the slot.

To add a transport, write one file with a `SendTransport` and a `ReceiveTransport`, and add one line for each in
`transports/__init__.py`. `TransportOffer` carries the data that a receiver needs to connect: today the arena, its nonce
and its size. A new field is also added to kvtransfer.proto and to both conversions in messages.py. So is a new field of
`Payload`, a chunk's location: to `TransferChunk`, `_chunk_to_bytes` and `_chunk_from_proto`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

MAX_PARTS = 1024  # Linux's limit of buffers per read (IOV_MAX)


@dataclass(frozen=True, slots=True)
class TransportOffer:
    """The data that a receiver needs to access the sender's payloads."""

    name: str
    arena: str = ""
    nonce: bytes = b""
    arena_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Payload:
    """One chunk's payload: inline in the message, or at an offset of the arena."""

    inline: bytes | memoryview = b""
    arena_offset: int = 0


class Slot(Protocol):
    """Memory for one chunk's payload until the chunk is acknowledged."""

    def buffer(self) -> memoryview:
        """Return the memory: writable, format "B", of the acquired length. Called once, on a gather thread."""
        ...

    def seal(self) -> Payload:
        """Return the payload's location. The buffer is filled and no longer written. Called once, on the same
        thread."""
        ...

    def release(self) -> None:
        """Give the memory back; idempotent. Called on the event loop, after the ack or at the end of the transfer.

        At the end of a transfer the receiver may still be reading the memory: the transfer has failed then, so its data
        is never used.
        """
        ...


Reader: TypeAlias = Callable[[int, Sequence[memoryview]], None]
"""`reader(start, parts)` fills `parts`, at most MAX_PARTS, with a payload's bytes from `start` on. It is called on a
worker thread and raises the errors of `PayloadSource.fetch`."""


class SendTransport(Protocol):
    """The sender's side, shared by all transfers of a sender. Methods run on the event loop and do not block."""

    name: str

    def offer(self) -> TransportOffer:
        """Return the offer for receivers."""
        ...

    async def acquire(self, num_bytes: int) -> Slot:
        """Return memory for `num_bytes`. Callers wait in FIFO order until memory is free; a cancelled caller holds
        none."""
        ...

    def close(self) -> None:
        """Free all memory. No slot may be in use."""
        ...


class PayloadSource(Protocol):
    """Read access to one sender's payloads, for one transfer."""

    def fetch(self, payload: Payload, num_bytes: int) -> bytes | memoryview:
        """Return the payload, in memory that stays unchanged until this thread's next fetch. Runs on a worker thread.

        Raises TransferCorrupt if `payload` lies outside of the offered memory, TransferFailed if it cannot be read.
        """
        ...

    def reader(self, payload: Payload) -> Reader | None:
        """Return a reader that fills the KV's final memory and so saves `fetch`'s copy. None if `fetch` copies
        nothing."""
        ...

    def close(self) -> None:
        """Free the source. The transfer is over and no fetch is running."""
        ...


class ReceiveTransport(Protocol):
    """The receiver's side, shared by all transfers of a receiver."""

    name: str

    def connect(self, offer: TransportOffer) -> PayloadSource | None:
        """Return a source if the offer works on this machine, else None. Runs on the event loop, so it must be quick.
        Never raises."""
        ...
