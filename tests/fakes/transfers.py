"""Transfers made by hand: the messages of an honest sender, to be sent as they are or spoilt first."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from kvtransfer import ExpectedTransfer, KVReceiver, ReceiverCallbacks, TransferSettings
from kvtransfer.chunks import Digest, Extent, chunk_seed, transfer_seed
from kvtransfer.messages import Ack, Commit, Granted, ReceiverMessage, SenderMessage, TransferChunk, TransferOpen
from kvtransfer.store import KVStore
from kvtransfer.transports.base import Payload, TransportOffer
from mesh.domain.errors import MeshError

FIRST_TOKEN = 7
INCARNATION = "this-run"
GRPC_ONLY = TransferSettings(transports=("grpc",), num_threads=1)


def open_message(store: KVStore, reservation: ExpectedTransfer) -> TransferOpen:
    return TransferOpen(
        reservation.transfer_id,
        reservation.attempt,
        INCARNATION,
        "prefill-0",
        store.layout,
        (TransportOffer("grpc"),),
        reservation.first_block,
        len(reservation.block_ids),
        store.span,
    )


def make_chunk(
    store: KVStore, reservation: ExpectedTransfer, block_ids: Sequence[int], number: int, place: Extent
) -> TransferChunk:
    """`block_ids` is the sender's block table."""
    payload = bytearray(place.num_bytes(store.layout))
    ids = block_ids[place.blocks.first : place.blocks.end]
    seed = chunk_seed(transfer_seed(reservation.transfer_id, reservation.attempt), number, place, len(payload))
    checksum = store.copy_out(ids, place.span, memoryview(payload), seed)
    return TransferChunk(number, place, len(payload), checksum, Payload(bytes(payload)))


def make_commit(reservation: ExpectedTransfer, chunks: Sequence[TransferChunk]) -> Commit:
    digest = Digest()
    for chunk in chunks:
        digest.add(chunk.checksum)
    return Commit(reservation.num_tokens, len(chunks), digest.value, FIRST_TOKEN)


@dataclass
class Outcomes:
    """Results that a receiver's callbacks reported. `changed` is set at each."""

    committed: list[tuple[str, int]] = field(default_factory=list)
    failed: list[tuple[str, MeshError]] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def callbacks(self) -> ReceiverCallbacks:
        def note(into: list[tuple[str, object]], *entry: object) -> None:
            into.append(entry)  # type: ignore[arg-type]
            self.changed.set()

        return ReceiverCallbacks(
            on_committed=lambda transfer_id, token: note(self.committed, transfer_id, token),  # type: ignore[arg-type]
            on_failed=lambda transfer_id, error: note(self.failed, transfer_id, error),  # type: ignore[arg-type]
        )


class Conversation:
    """Sends messages to a receiver: chunks within its credit, a commit only after all acks (unless `hasty`)."""

    def __init__(self, receiver: KVReceiver, messages: Sequence[SenderMessage], *, hasty: bool = False) -> None:
        self.replies: list[ReceiverMessage] = []
        self._receiver = receiver
        self._messages = messages
        self._hasty = hasty
        self._replied = asyncio.Condition()

    async def run(self) -> None:
        """Raises what the receiver ends the call with."""
        async for reply in self._receiver.push(self._requests()):
            async with self._replied:
                self.replies.append(reply)
                self._replied.notify_all()

    async def _requests(self) -> AsyncIterator[SenderMessage]:
        num_chunks = 0
        for message in self._messages:
            if not self._hasty:
                await self._allowed(message, num_chunks)
            num_chunks += isinstance(message, TransferChunk)
            yield message

    async def _allowed(self, message: SenderMessage, num_chunks: int) -> None:
        async with self._replied:
            if isinstance(message, TransferChunk):
                await self._replied.wait_for(lambda: num_chunks - self._num_acks() < self._credit())
            elif isinstance(message, Commit):
                await self._replied.wait_for(lambda: self._num_acks() == num_chunks)

    def _num_acks(self) -> int:
        return sum(isinstance(reply, Ack) for reply in self.replies)

    def _credit(self) -> int:
        return sum(reply.credit_chunks for reply in self.replies if isinstance(reply, Granted))
