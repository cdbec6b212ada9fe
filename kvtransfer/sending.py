"""The sender's half of one conversation.

    open ──▶ granted     the receiver has chosen a transport and given credit; then four activities side by side:
    gather               waits for a push, a credit and a slot, then has a thread copy KV into the slot
    send                 writes each filled chunk to the stream while the next is being filled; behind the last, Commit
    renew                says three times in a lease that this side is alive, however long the engine computes
    listen               an ack frees the slot and gives the credit back; Committed ends it

However it ends, the call is cancelled, no thread reads the store, and all slots are back.
"""

import asyncio
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

from kvtransfer.channels import ChannelPool
from kvtransfer.checksum import Digest, chunk_checksum, transfer_seed
from kvtransfer.chunks import ChunkRange
from kvtransfer.inbox import PushInbox
from kvtransfer.messages import (
    Ack,
    Chunk,
    Commit,
    Committed,
    Granted,
    ReceiverMessage,
    Renew,
    Renewed,
    TransferOpen,
    request_to_bytes,
)
from kvtransfer.push_call import PushCall
from kvtransfer.settings import TransferSettings
from kvtransfer.store import KVStore
from kvtransfer.tasks import run_to_end, task_group
from kvtransfer.transports.base import SendTransport, Slot
from kvtransfer.watchdog import Watchdog
from mesh.domain.errors import TransferFailed
from mesh.domain.tokens import SampledToken
from mesh.rpc.credentials import Metadata


@dataclass(frozen=True, slots=True)
class TransferSpec:
    """What goes where. `block_ids` is the sender's block table of the whole prompt, by block position.

    Positions before `first_block` are at the receiver already and are never sent.
    """

    transfer_id: str
    attempt: int
    address: str
    receiver_incarnation: str
    block_ids: tuple[int, ...]
    first_block: int = 0


@dataclass(frozen=True, slots=True)
class TransferResult:
    """What a finished transfer moved."""

    transport: str
    num_bytes: int
    num_chunks: int


@dataclass(frozen=True, slots=True)
class SenderParts:
    """What all transfers of a KVSender share."""

    store: KVStore
    worker_id: str
    metadata: Metadata
    settings: TransferSettings
    transports: tuple[SendTransport, ...]
    channels: ChannelPool
    executor: Executor


@dataclass(frozen=True, slots=True)
class _Filled:
    """A chunk that is ready to be sent."""

    request: bytes
    num_bytes: int
    checksum: int


_Chunks = asyncio.Queue[_Filled | None]  # in order of their numbers; then None


class SendingConversation:
    """One call. `first_token` and `num_tokens` are set before the inbox is finished."""

    first_token: SampledToken
    num_tokens: int

    def __init__(self, spec: TransferSpec, parts: SenderParts, inbox: PushInbox) -> None:
        self._spec = spec
        self._parts = parts
        self._inbox = inbox
        self._layout = parts.store.layout
        self._seed = transfer_seed(spec.transfer_id, spec.attempt)
        self._digest = Digest()
        self._num_chunks = 0
        self._num_bytes = 0
        self._slots: dict[int, Slot] = {}  # by sequence number, until acknowledged
        self._is_committing = False
        self._watchdog = Watchdog(parts.settings)

    async def run(self) -> TransferResult:
        """From open to committed. Raises MeshError; anything else is a bug or a broken store."""
        with self._parts.channels.use(self._spec.address) as channel:
            call = PushCall(channel, self._parts.metadata)
            try:
                async with self._watchdog.watch():
                    return await self._converse(call)
            finally:
                call.cancel()
                for slot in self._slots.values():
                    slot.release()

    async def _converse(self, call: PushCall) -> TransferResult:
        await call.write(request_to_bytes(self._opening()))
        transport, granted = self._accept(await self._read(call))
        free = asyncio.Semaphore(granted.credit_chunks)
        chunks: _Chunks = asyncio.Queue()  # bounded by the credit
        async with task_group() as tasks:
            tasks.create_task(self._gather(transport, free, chunks))
            tasks.create_task(self._send(call, chunks))
            renewal = tasks.create_task(self._renew(call, min(granted.lease_s, self._parts.settings.lease_s) / 3))
            await self._listen(call, free)
            renewal.cancel()
        return TransferResult(transport.name, self._num_bytes, self._num_chunks)

    def _opening(self) -> TransferOpen:
        return TransferOpen(
            transfer_id=self._spec.transfer_id,
            attempt=self._spec.attempt,
            receiver_incarnation=self._spec.receiver_incarnation,
            sender_id=self._parts.worker_id,
            layout=self._layout,
            transports=tuple(transport.offer() for transport in self._parts.transports),
            first_block=self._spec.first_block,
            num_blocks=len(self._spec.block_ids),
        )

    def _accept(self, granted: ReceiverMessage) -> tuple[SendTransport, Granted]:
        if isinstance(granted, Granted) and granted.credit_chunks > 0 and granted.lease_s > 0:
            for transport in self._parts.transports:
                if transport.name == granted.transport:
                    return transport, granted
        raise TransferFailed("the receiver granted no credit, no lease, or a transport that was not offered")

    async def _gather(self, transport: SendTransport, free: asyncio.Semaphore, chunks: _Chunks) -> None:
        number = 0
        while await self._inbox.wait():
            await free.acquire()
            place = self._inbox.take()  # after waiting: small pushes have been joined meanwhile
            slot = self._slots[number] = await transport.acquire(place.num_bytes(self._layout))
            fill = partial(self._fill, slot, number, place)
            chunks.put_nowait(await run_to_end(self._parts.executor, fill))
            number += 1
        chunks.put_nowait(None)

    def _fill(self, slot: Slot, number: int, place: ChunkRange) -> _Filled:
        """On a thread: copy KV out of the store and make the message."""
        block_ids = self._spec.block_ids[place.first_block : place.first_block + place.num_blocks]
        buffer = slot.buffer()
        self._parts.store.read_blocks(block_ids, place.first_layer, place.num_layers, buffer)
        checksum = chunk_checksum(self._seed, number, place, buffer)
        message = Chunk(number, place, len(buffer), checksum, slot.seal())
        return _Filled(request_to_bytes(message), len(buffer), checksum)

    async def _send(self, call: PushCall, chunks: _Chunks) -> None:
        while (chunk := await chunks.get()) is not None:
            self._digest.add(chunk.checksum)
            self._num_chunks += 1
            self._num_bytes += chunk.num_bytes
            self._watchdog.asked()
            await call.write(chunk.request)
        self._is_committing = True
        commit = Commit(self.num_tokens, self._num_chunks, self._digest.value, self.first_token)
        self._watchdog.asked()
        await call.write_last(request_to_bytes(commit))

    async def _renew(self, call: PushCall, interval_s: float) -> None:
        while True:
            await asyncio.sleep(interval_s)
            await call.write(request_to_bytes(Renew()))

    async def _listen(self, call: PushCall, free: asyncio.Semaphore) -> None:
        while not isinstance(reply := await self._read(call), Committed):
            if isinstance(reply, Renewed):
                continue
            number = reply.sequence_number if isinstance(reply, Ack) else self._num_chunks
            if number >= self._num_chunks or number not in self._slots:
                raise TransferFailed("the receiver acknowledged what was not sent")
            self._watchdog.answered()
            self._slots.pop(number).release()
            free.release()
        if not self._is_committing:
            raise TransferFailed("the receiver committed what was not sent")
        await call.ended()

    async def _read(self, call: PushCall) -> ReceiverMessage:
        reply = await call.read()
        self._watchdog.heard()
        return reply
