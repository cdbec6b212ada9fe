"""The receiver's half of one conversation, between open and committed.

    granted      connects to the first offered transport that works here, and grants credit
    chunks       checks each one, waits for its payload, writes and verifies it on a thread, and acknowledges it. Over a
                 link the thread that reads the link does all this (direct_writes.py)
    renewals     confirms each
    commit       once all chunks are written, checks that they are all there

At the end, on success or failure, no write is in flight.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial

from kvtransfer.direct_writes import DirectWrites
from kvtransfer.incoming_transfer import ShardChecks
from kvtransfer.messages import Ack, Commit, Granted, ReceiverMessage, Renew, Renewed, SenderMessage, TransferChunk
from kvtransfer.settings import TransferSettings
from kvtransfer.store import KVStore
from kvtransfer.transports.base import PayloadSource, ReceiveTransport, TransportOffer
from kvtransfer.transports.link import Call
from mesh.domain.errors import LayoutMismatch, LeaseExpired, TransferFailed
from mesh.tasks import run_to_end, task_group

Read = Callable[[], Awaitable[SenderMessage | None]]
"""Returns the sender's next message, None if it has disconnected."""
Reply = Callable[[ReceiverMessage], None]


@dataclass(frozen=True, slots=True)
class ReceiverResources:
    """The resources that all conversations of a KVReceiver share. `link_writes` limits the threads of links that write
    at once, as the number of its threads limits the executor.
    """

    store: KVStore
    settings: TransferSettings
    executor: Executor
    link_writes: threading.BoundedSemaphore


class IncomingConversation:
    """A conversation with a sender: over gRPC, or over a link if there is a `call`."""

    def __init__(self, resources: ReceiverResources, read: Read, reply: Reply, call: Call | None = None) -> None:
        self.reply = reply
        self._resources = resources
        self._read = read
        self._call = call

    async def read(self) -> SenderMessage | None:
        """Return the sender's next message. Raises LeaseExpired after a silent lease."""
        lease_s = self._resources.settings.lease_s
        try:
            async with asyncio.timeout(lease_s):
                return await self._read()
        except TimeoutError:
            raise LeaseExpired(f"the sender has sent nothing for {lease_s:g} s") from None

    async def receive(
        self, offers: Sequence[TransportOffer], transports: Sequence[ReceiveTransport], checks: ShardChecks
    ) -> Commit:
        """Grant the transfer, and receive its chunks by one of the offers. Return its commit, which fits them."""
        settings = self._resources.settings
        transport, source = await _connect(offers, transports)
        writer = _ChunkWriter(self._resources, checks, source, self.reply)
        direct = None
        if self._call is not None:
            accept = partial(checks.accept, credit=settings.credit_chunks)
            direct = DirectWrites(self._call, accept, writer.write_on_link_thread)
        try:
            self.reply(Granted(transport, settings.credit_chunks, settings.lease_s, source.answer()))
            async with task_group() as writes:  # the block exits only when every write has ended
                while not isinstance(request := await self.read(), Commit):
                    if request is None:
                        raise TransferFailed("the sender disconnected before the commit")
                    if isinstance(request, Renew):
                        self.reply(Renewed())
                        continue
                    if not isinstance(request, TransferChunk):
                        raise TransferFailed("a transfer may be opened only once")
                    checks.accept(request, settings.credit_chunks)
                    writes.create_task(writer.write_on_executor(request))
                checks.is_committing = True
            if direct is not None:
                await direct.finish()
            checks.check_commit(request)
            return request
        finally:
            try:
                if direct is not None:
                    await direct.close()
            finally:
                source.close()


async def _connect(
    offers: Sequence[TransportOffer], transports: Sequence[ReceiveTransport]
) -> tuple[str, PayloadSource]:
    """Connect to the first offer that works here. Raises LayoutMismatch if none does."""
    for offer in offers:
        for transport in transports:
            source = await transport.connect(offer) if transport.name == offer.name else None
            if source is not None:
                return offer.name, source
    offer_names = ", ".join(offer.name for offer in offers) or "none"
    names = ", ".join(transport.name for transport in transports)
    raise LayoutMismatch(
        f"no common KV transport: the sender offers {offer_names}; the receiver has {names}: name one of them in "
        "kv_transports of both workers"
    )


class _ChunkWriter:
    """Verifies and writes the chunks of one conversation, and acknowledges them."""

    def __init__(self, resources: ReceiverResources, checks: ShardChecks, source: PayloadSource, reply: Reply) -> None:
        self._resources = resources
        self._checks = checks
        self._source = source
        self._reply = reply

    async def write_on_executor(self, chunk: TransferChunk) -> None:
        async with self._source.arrived(chunk.payload, chunk.num_bytes) as payload:
            here = replace(chunk, payload=payload)
            await run_to_end(self._resources.executor, partial(self._verify_and_write, here))
        self._checks.acknowledge(chunk)
        if not self._checks.is_committing:  # Committed will acknowledge what is still to be written
            self._reply(Ack(chunk.sequence_number))

    def write_on_link_thread(self, chunk: TransferChunk) -> None:
        """Runs on a link's thread."""
        with self._resources.link_writes:
            self._verify_and_write(chunk)
        self._checks.acknowledge(chunk)
        self._reply(Ack(chunk.sequence_number))

    def _verify_and_write(self, chunk: TransferChunk) -> None:
        """Runs on a thread. A corrupt chunk may be partly written; its blocks stay invisible until the commit."""
        checks, store = self._checks, self._resources.store
        payload = self._source.fetch(chunk.payload, chunk.num_bytes)
        block_ids, span = checks.block_ids(chunk.extent), chunk.extent.span
        checks.check_checksum(chunk, store.copy_in(block_ids, span, payload, checks.chunk_seed(chunk)))
