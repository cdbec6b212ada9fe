"""The interface of a transport, which carries payloads outside (or inside) the gRPC messages.

A transfer begins with its paths: the sender asks each of its transports for a `SendPath` to the receiver and offers
them all; the receiver connects to the first offer that works for it; the sender joins that path.

Life of a payload: the sender acquires a `Slot` on the event loop; a thread copies KV into the slot's buffer and seals
it; the chunk message goes out with the `Payload` that `seal` returned; the receiver waits until the payload has
arrived; a thread of the receiver fetches it, verifies it and writes it; the receiver's ack makes the sender release the
slot.

CONTRIBUTING.md says how a transport is added.
"""

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from kvtransfer.transports.link import Link, Serve


@dataclass(frozen=True, slots=True)
class TransportOffer:
    """The data that a receiver needs to access the sender's payloads: an arena of this machine, one side of a process
    group, or memory that a library's engine reads.

    `rendezvous`: what the receiver's side needs of the sender's to connect to it. Of a process group: what it has put
    into torch's store. Of an engine: what other processes need to read the arena (`ReadEngine.rendezvous`).
    """

    name: str
    arena: str = ""
    nonce: bytes = b""
    arena_bytes: int = 0
    pair: str = ""
    host: str = ""
    rendezvous: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Payload:
    """One chunk's payload: inline in the message, at an offset of the arena, or sent under a tag."""

    inline: bytes | memoryview = b""
    arena_offset: int = 0
    tag: int = 0


class Slot(Protocol):
    """Memory for one chunk's payload until the chunk is acknowledged."""

    def buffer(self) -> memoryview:
        """Return the memory: writable, format "B", of the acquired length. Called on a gather thread."""
        ...

    def seal(self) -> Payload:
        """Return the payload's location. The buffer is filled and no longer written. Called once, on the same
        thread, in the order in which slots were acquired. Raises TransferFailed."""
        ...

    def release(self, *, is_acknowledged: bool) -> None:
        """Give the memory back; idempotent. Called on the event loop, after the ack or at the end of the transfer.

        Without an ack the receiver may still be reading the memory: the transfer has failed then, so its data is never
        used.
        """
        ...


class SendPath(Protocol):
    """The way of one transfer to its receiver, on the sender's side. Methods run on the event loop and do not block.

    A transport whose paths have no state is its own path, and needs only the first two methods.
    """

    def offer(self) -> TransportOffer:
        """Return the offer for the receiver."""
        ...

    async def acquire(self, num_bytes: int) -> Slot:
        """Return memory for `num_bytes`. Callers wait in FIFO order until memory is free; a cancelled caller holds
        none. Raises TransferFailed."""
        ...

    async def join(self, rendezvous: Mapping[str, bytes]) -> None:
        """Connect, with the receiver's answer to the offer. Raises TransferFailed."""
        return

    def decline(self) -> None:
        """Note that the receiver has passed this path over for a later one or for none."""
        return

    def leave(self) -> None:
        """End the use of this path. All slots are released. Called once."""
        return


class SendTransport(Protocol):
    """The sender's side, shared by all transfers of a sender. Methods run on the event loop and do not block."""

    name: str

    async def path(self, address: str, incarnation: str) -> SendPath | None:
        """Return a path to the receiver at `address` ("host:port"), None if this transport has none now."""
        ...

    def link(self, address: str, incarnation: str) -> Link | None:
        """Return a link to this receiver, None if there is none. A conversation over it offers this transport only."""
        return None

    def memory(self) -> memoryview | None:
        """Return the memory that has all slots, None if they are allocated one by one."""
        return None

    def close(self) -> None:
        """Free all memory. No slot may be in use."""
        ...


class PayloadSource(Protocol):
    """Read access to one sender's payloads, for one transfer. Both defaults are for payloads that are there already."""

    def answer(self) -> Mapping[str, bytes]:
        """Return what the sender needs to join its path."""
        return {}

    def arrived(self, payload: Payload, num_bytes: int) -> AbstractAsyncContextManager[Payload]:
        """Wait until the payload is here, and say where. Its memory is kept until the context ends. Raises
        TransferFailed."""
        return nullcontext(payload)

    def fetch(self, payload: Payload, num_bytes: int) -> bytes | memoryview:
        """Return the payload, in memory that a faulty sender may still change. Runs on a worker thread.

        Raises TransferCorrupt if `payload` lies outside of the offered memory, TransferFailed if it cannot be read.
        """
        ...

    def close(self) -> None:
        """Free the source. The transfer is over and no fetch is running."""
        ...


class ReceiveTransport(Protocol):
    """The receiver's side, shared by all transfers of a receiver. Methods run on the event loop and do not block."""

    name: str

    async def connect(self, offer: TransportOffer) -> PayloadSource | None:
        """Return a source if the offer works on this machine, else None. Never raises."""
        ...

    def serve_links(self, serve: Serve) -> None:
        """Run `serve` for each conversation that comes over a link."""
        return

    def close(self) -> None:
        """Free what the transport holds. No source is open."""
        return
