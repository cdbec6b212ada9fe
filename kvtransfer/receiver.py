"""Receiving KV: the decode worker's side.

Life of a transfer here:

    expect()      blocks are reserved; chunks of this transfer id and attempt may be written into them
    push()        the conversation, one call: open is checked and a transport chosen; each chunk is checked, written
                  and verified on a thread, acknowledged; commit is checked
    on_committed  every block is there and verified
    on_failed     it will never be: a chunk did not verify, the layout differs, the sender went away, was silent for a
                  lease, or never came
    abort()       this worker does not want it any more; no callback follows

Exactly one of the three ends a transfer. When it does (abort: when it returns) no write is in flight and none follows.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import structlog

from kvtransfer.incoming import IncomingTransfer, Reservation
from kvtransfer.messages import (
    Ack,
    Chunk,
    Commit,
    Committed,
    Granted,
    ReceiverMessage,
    Renew,
    Renewed,
    SenderMessage,
    TransferOpen,
)
from kvtransfer.settings import TransferSettings
from kvtransfer.store import KVStore
from kvtransfer.tasks import run_to_end, task_group
from kvtransfer.transports import open_receive_transports
from kvtransfer.transports.base import MOST_PARTS, PayloadSource, Reader, ReceiveTransport, TransportOffer
from mesh.domain.errors import LayoutMismatch, LeaseExpired, MeshError, TransferFailed
from mesh.domain.tokens import SampledToken

log = structlog.get_logger(__name__)

_NEAR_BYTES = 256 << 10  # a part of the second-level cache
Reply = Callable[[ReceiverMessage], None]


@dataclass(frozen=True, slots=True)
class ReceiverCallbacks:
    """Called on the event loop; must not raise. See the module's docstring for when."""

    on_committed: Callable[[str, SampledToken], None]
    on_failed: Callable[[str, MeshError], None]


@dataclass(slots=True)
class _Expected:
    transfer: IncomingTransfer
    opening_lease: asyncio.TimerHandle
    conversation: "asyncio.Task[None] | None" = None
    is_aborted: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class KVReceiver:
    """Takes KV into one store from any number of prefill workers. One per process, on its event loop."""

    def __init__(
        self,
        store: KVStore,
        incarnation: str,
        callbacks: ReceiverCallbacks,
        settings: TransferSettings | None = None,
        transports: tuple[ReceiveTransport, ...] | None = None,
    ) -> None:
        self._store = store
        self._incarnation = incarnation
        self._callbacks = callbacks
        self._settings = settings or TransferSettings()
        self._transports = transports or open_receive_transports(self._settings)
        self._executor = ThreadPoolExecutor(self._settings.num_threads, thread_name_prefix="kv-scatter")
        self._expected: dict[str, _Expected] = {}

    def expect(self, reservation: Reservation) -> None:
        """Let this transfer in. Raises ValueError if the id is in use or the reservation makes no sense."""
        transfer_id = reservation.transfer_id
        if transfer_id in self._expected:
            raise ValueError(f"transfer {transfer_id} is expected already")
        transfer = IncomingTransfer(reservation, self._store.layout)
        loop = asyncio.get_running_loop()
        opening_lease = loop.call_later(self._settings.opening_lease_s, self._never_opened, transfer_id)
        self._expected[transfer_id] = _Expected(transfer, opening_lease)

    async def abort(self, transfer_id: str) -> None:
        """Refuse the rest; idempotent. Returns when no write is in flight: its blocks may be freed."""
        expected = self._expected.get(transfer_id)
        if expected is None:
            return
        expected.is_aborted = True
        if expected.conversation is None:
            self._end(expected)
            return
        expected.conversation.cancel()
        await expected.ended.wait()

    async def close(self) -> None:
        """Abort everything and free threads."""
        await asyncio.gather(*(self.abort(transfer_id) for transfer_id in list(self._expected)))
        self._executor.shutdown(wait=False)

    async def push(self, requests: AsyncIterator[SenderMessage]) -> AsyncGenerator[ReceiverMessage, None]:
        """One conversation. Ends with a MeshError if the transfer is refused or fails.

        It runs in a task of its own, because it both reads and waits for writes, and must end in order even if nobody
        takes the replies any more.
        """
        replies: asyncio.Queue[ReceiverMessage | None] = asyncio.Queue()  # bounded by credit and renewals
        task = asyncio.create_task(self._converse(requests, replies.put_nowait))
        task.add_done_callback(lambda _: replies.put_nowait(None))
        try:
            while (reply := await replies.get()) is not None:
                yield reply
            await task
        finally:
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                task.exception()  # marks it as seen

    async def _converse(self, requests: AsyncIterator[SenderMessage], reply: Reply) -> None:
        opening = await self._next(requests)
        if not isinstance(opening, TransferOpen):
            raise TransferFailed("a transfer begins with open")
        expected = self._admit(opening)
        try:
            commit = await self._fill(expected.transfer, opening, requests, reply)
        except (Exception, asyncio.CancelledError) as error:
            raise self._fail(expected, error) from error
        self._end(expected)
        log.debug("transfer_finished", transfer_id=opening.transfer_id, num_bytes=expected.transfer.num_bytes)
        self._callbacks.on_committed(opening.transfer_id, commit.first_token)
        reply(Committed())

    def _admit(self, opening: TransferOpen) -> _Expected:
        """The reservation that is meant. Whoever means none is refused and changes nothing."""
        if opening.receiver_incarnation != self._incarnation:
            raise TransferFailed("the transfer is for another incarnation of this worker")
        expected = self._expected.get(opening.transfer_id)
        if expected is None or expected.transfer.reservation.attempt != opening.attempt:
            raise TransferFailed(f"transfer {opening.transfer_id}, attempt {opening.attempt}, is not expected here")
        if expected.conversation is not None:
            raise TransferFailed(f"transfer {opening.transfer_id} has a sender already")
        expected.conversation = asyncio.current_task()
        expected.opening_lease.cancel()
        log.debug("transfer_started", transfer_id=opening.transfer_id, sender=opening.sender_id)
        return expected

    async def _fill(
        self, transfer: IncomingTransfer, opening: TransferOpen, requests: AsyncIterator[SenderMessage], reply: Reply
    ) -> Commit:
        transfer.check_open(opening)
        transport, source = self._connect(opening.transports)
        credit = self._settings.credit_chunks
        reply(Granted(transport, credit, self._settings.lease_s))
        try:
            async with task_group() as writes:  # left only when every write has ended
                while not isinstance(request := await self._next(requests), Commit):
                    if request is None:
                        raise TransferFailed("the sender went away before it committed")
                    if isinstance(request, Renew):
                        reply(Renewed())
                        continue
                    if not isinstance(request, Chunk):
                        raise TransferFailed("a transfer is opened once")
                    transfer.accept(request, credit)
                    writes.create_task(self._write(transfer, source, request, reply))
            transfer.check_commit(request)
            return request
        finally:
            source.close()

    async def _next(self, requests: AsyncIterator[SenderMessage]) -> SenderMessage | None:
        """The sender's next message, None if it has gone. Raises LeaseExpired if it is silent for too long."""
        lease_s = self._settings.lease_s
        try:
            async with asyncio.timeout(lease_s):
                return await anext(requests, None)
        except TimeoutError:
            raise LeaseExpired(f"nothing has come from the sender for {lease_s:g} s") from None

    async def _write(self, transfer: IncomingTransfer, source: PayloadSource, chunk: Chunk, reply: Reply) -> None:
        await run_to_end(self._executor, partial(self._verify_and_write, transfer, source, chunk))
        transfer.acknowledge(chunk)
        reply(Ack(chunk.sequence_number))

    def _verify_and_write(self, transfer: IncomingTransfer, source: PayloadSource, chunk: Chunk) -> None:
        """On a thread. Of what does not verify, something may have been written: nobody reads it before the commit."""
        place = chunk.place
        where = transfer.block_ids(place), place.first_layer, place.num_layers
        read = source.reader(chunk.payload)
        if read is not None and (parts := self._store.in_place(*where)) is not None:
            transfer.check_parts(chunk, _filled(parts, read))
            return
        payload = source.fetch(chunk.payload, chunk.num_bytes)
        transfer.check_payload(chunk, payload)
        self._store.write_blocks(*where, payload)

    def _connect(self, offers: Sequence[TransportOffer]) -> tuple[str, PayloadSource]:
        """The first offer that works here."""
        for offer in offers:
            for transport in self._transports:
                source = transport.connect(offer) if transport.name == offer.name else None
                if source is not None:
                    return offer.name, source
        offered = ", ".join(offer.name for offer in offers) or "none"
        usable = ", ".join(transport.name for transport in self._transports)
        raise LayoutMismatch(f"no common KV transport: the sender offers {offered}; {usable} can be tried here")

    def _never_opened(self, transfer_id: str) -> None:
        limit = self._settings.opening_lease_s
        self._fail(self._expected[transfer_id], LeaseExpired(f"no sender has opened the transfer for {limit:g} s"))

    def _fail(self, expected: _Expected, error: BaseException) -> MeshError:
        """End a transfer that this worker has not given up; returns what the sender is told."""
        transfer_id = expected.transfer.reservation.transfer_id
        self._end(expected)
        if expected.is_aborted:
            return TransferFailed("the transfer was aborted by its receiver")
        if isinstance(error, asyncio.CancelledError):
            error = TransferFailed("the sender went away before it committed")
        elif not isinstance(error, MeshError):
            log.error("transfer_failed", transfer_id=transfer_id, exc_info=error)
            error = TransferFailed("the receiver failed; its log has the details")
        log.info("transfer_failed", transfer_id=transfer_id, error=str(error))
        self._callbacks.on_failed(transfer_id, error)
        return error

    def _end(self, expected: _Expected) -> None:
        expected.opening_lease.cancel()
        del self._expected[expected.transfer.reservation.transfer_id]
        expected.ended.set()


def _filled(parts: Sequence[memoryview], read: Reader) -> Iterator[memoryview]:
    """Each part, once it is filled: so many at a time that they are still near when they are looked at."""
    if not parts:
        return
    at_once = max(1, min(MOST_PARTS, _NEAR_BYTES // len(parts[0])))
    start = 0
    for first in range(0, len(parts), at_once):
        group = parts[first : first + at_once]
        read(start, group)
        start += sum(map(len, group))
        yield from group
