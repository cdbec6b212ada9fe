"""The transports "gloo" and "nccl": payloads over torch.distributed, from process to process.

A sender has one pair (pair.py) with each receiver, made at the first transfer and kept. It offers its side of the pair
in the opening of a transfer; the receiver, if it lacks the other side, makes it and answers in the grant. After any
error or timeout a pair is retired: transfers that use it go on if they can, later ones get a new pair.

Several transfers share a gloo pair, because each payload has a tag of its own: the transfers of two workers overlap,
and a connection for each would cost threads and descriptors. A transfer that ends with payloads on their way leaves
sends behind that nobody will receive, so it retires its pair. NCCL has no tags: it matches operations by their order.
Its pairs take one transfer at a time, and other transfers meanwhile use the next transport. Nobody has run NCCL yet: it
needs two GPUs.

A receiver posts at most two receives of a pair at a time, each into a buffer of the transport. So a silent sender can
block neither the threads that write KV nor the blocks of a transfer that is aborted.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping
from concurrent import futures
from contextlib import asynccontextmanager
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

import structlog
import torch
from torch import Tensor, distributed

from kvtransfer.settings import TransferSettings
from kvtransfer.transports.base import Payload, ReceiveTransport, SendPath, SendTransport, Slot, TransportOffer
from kvtransfer.transports.grpc_bytes import InlineSource
from kvtransfer.transports.pair import (
    GLOO,
    NCCL,
    Kind,
    Pair,
    address_towards,
    new_sender_name,
    pair_name,
    parse_pair_name,
)
from kvtransfer.transports.resource_pool import AvoidedAddresses, ResourcePool
from kvtransfer.transports.slots import TensorSlots
from mesh.domain.errors import TransferFailed

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Work

log = structlog.get_logger(__name__)

T = TypeVar("T")

MAX_PAIRS = 8
"""Pairs of a process and transport. Each has up to five threads, and on a GPU the memory of a communicator."""
_RECEIVE_SLOTS = 4
"""Buffers of a pair: two that are being filled and two that are being read."""
_MAX_TAG = 1 << 30
_KINDS = MappingProxyType({kind.name: kind for kind in (GLOO, NCCL)})


def _slots(kind: Kind, num_slots: int, num_bytes: int) -> TensorSlots:
    make = partial(torch.empty, dtype=torch.uint8, pin_memory=kind.device is not None)
    return TensorSlots(num_slots, num_bytes, make=make)


class PairSendTransport(SendTransport):
    """A sender's pairs, and the memory for its payloads, which all pairs share."""

    def __init__(self, kind: Kind, settings: TransferSettings, max_chunk_bytes: int) -> None:
        self.name = kind.name
        num_slots = max(1, settings.arena_bytes // max_chunk_bytes)
        self.slots = _slots(kind, num_slots, max_chunk_bytes)
        self.pairs: ResourcePool[tuple[str, str], Pair] = ResourcePool(MAX_PAIRS, settings.channel_idle_s)
        self._max_abandoned = num_slots
        self._kind = kind
        self._settings = settings
        self._sender = new_sender_name()
        self._numbers = itertools.count(1)
        self._avoided = AvoidedAddresses()

    async def path(self, address: str, incarnation: str) -> "_Path | None":
        """None if the receiver is not reached so, or if all pairs are in use."""
        if address in self._avoided:
            return None
        pair = self.pairs.get((address, incarnation))
        if pair is None:
            pair = self.pairs.add((address, incarnation), partial(self._make, address))
        if pair is None or (not self._kind.has_tags and self.pairs.num_users(pair)):
            return None
        path = _Path(self, pair, address)
        try:
            await path.prepare()
        except BaseException as error:
            path.leave()
            if isinstance(error, TransferFailed):
                self.avoid(address, error)
                return None
            raise
        return path

    def avoid(self, address: str, error: TransferFailed) -> None:
        """Offer this transport to `address` no more for a while."""
        self._avoided.add(address)
        log.warning(
            "no pair with a receiver; other transports will be used",
            transport=self.name,
            to=address,
            error=str(error),
            torch=torch.__version__,
        )

    def abandon(self, pair: Pair, work: "Work") -> None:
        """Leave a payload to a pair, which is retired. If too many are left there, its other transfers fail, too."""
        pair.abandon(work)
        if pair.num_abandoned > self._max_abandoned:
            pair.is_broken = True
        self.pairs.retire(pair)

    def close(self) -> None:
        self.pairs.close()

    def _make(self, address: str) -> Pair:
        host, _, port = address.rpartition(":")
        locate = partial(address_towards, host.strip("[]"), int(port), trust_fabric=self._settings.trust_fabric)
        name = pair_name(self._sender, next(self._numbers))
        return Pair(self._kind, name, locate, self._settings.connect_s, {})


class _Path(SendPath):
    """One transfer's use of a pair."""

    def __init__(self, transport: PairSendTransport, pair: Pair, address: str) -> None:
        self.transport = transport
        self.pair = pair
        self._address = address
        self._rendezvous: Mapping[str, bytes] = {}
        transport.pairs.use(pair)

    async def prepare(self) -> None:
        """Wait until there is something to offer. Raises TransferFailed."""
        rendezvous = await _result(self.pair.rendezvous)
        self._rendezvous = {} if self.pair.is_joined else rendezvous

    def offer(self) -> TransportOffer:
        pair = self.pair
        return TransportOffer(self.transport.name, pair=pair.name, host=pair.host, rendezvous=self._rendezvous)

    async def join(self, rendezvous: Mapping[str, bytes]) -> None:
        if self.pair.is_joined:
            return
        self.pair.join(rendezvous)
        try:
            await _result(self.pair.connected)
        except TransferFailed as error:
            self.transport.avoid(self._address, error)
            raise
        self.pair.is_joined = True

    async def acquire(self, num_bytes: int) -> "_PairSlot":
        return _PairSlot(self, await self.transport.slots.acquire(num_bytes), num_bytes)

    def decline(self) -> None:
        if self.pair.is_joined:  # the receiver has lost its side
            self.transport.pairs.retire(self.pair)

    def leave(self) -> None:
        if self.pair.next_tag() > _MAX_TAG:
            self.transport.pairs.retire(self.pair)
        self.transport.pairs.leave(self.pair)


class _PairSlot(Slot):
    def __init__(self, path: _Path, memory: Tensor, num_bytes: int) -> None:
        self._path = path
        self._memory: Tensor | None = memory
        self._payload = memory[:num_bytes]
        self._tag = path.pair.next_tag()
        self._work: Work | None = None

    def buffer(self) -> memoryview:
        return self._payload.numpy().data

    def seal(self) -> Payload:
        self._work = self._path.pair.send(self._payload, self._tag)
        return Payload(tag=self._tag)

    def release(self, *, is_acknowledged: bool) -> None:
        memory, self._memory = self._memory, None
        if memory is None:
            return
        is_lost = self._work is not None and not is_acknowledged
        if self._work is not None and is_lost:
            self._path.transport.abandon(self._path.pair, self._work)
        self._work = None
        self._path.transport.slots.give_back(None if is_lost else memory)


class PairReceiveTransport(ReceiveTransport):
    """A receiver's sides of the pairs of its senders."""

    def __init__(self, kind: Kind, settings: TransferSettings) -> None:
        self.name = kind.name
        # Longer than the sender's: it closes a pair first, and does not offer one that is gone.
        self.pairs: ResourcePool[str, _Inbox] = ResourcePool(MAX_PAIRS, 2 * settings.channel_idle_s)
        self._kind = kind
        self._settings = settings

    async def connect(self, offer: TransportOffer) -> "_PairSource | None":
        inbox = self._inbox(offer)
        if inbox is None:
            return None
        self.pairs.use(inbox)
        try:
            answer = await _result(inbox.pair.rendezvous)
        except BaseException as error:
            self.pairs.leave(inbox)
            if isinstance(error, TransferFailed):
                log.warning("no pair with a sender", transport=self.name, host=offer.host, error=str(error))
                return None
            raise
        return _PairSource(self, inbox, answer, self._settings.lease_s)

    def close(self) -> None:
        self.pairs.close()

    def _inbox(self, offer: TransportOffer) -> "_Inbox | None":
        """Return this side of the offered pair, made now if the offer allows it."""
        name = parse_pair_name(offer.pair)
        if name is None:
            return None
        sender, number = name
        inbox = self.pairs.get(sender)
        if inbox is not None and inbox.number >= number:
            return inbox if inbox.number == number else None
        if not offer.rendezvous:
            return None
        return self.pairs.add(sender, partial(self._make, offer, number))

    def _make(self, offer: TransportOffer, number: int) -> "_Inbox":
        locate = partial(address_towards, offer.host, 1, trust_fabric=self._settings.trust_fabric)
        pair = Pair(self._kind, offer.pair, locate, self._settings.connect_s, offer.rendezvous)
        return _Inbox(pair, number, self._settings)


class _Inbox:
    """A receiver's side of a pair, with buffers of its own, so that silent senders leave those of others alone."""

    def __init__(self, pair: Pair, number: int, settings: TransferSettings) -> None:
        self.pair = pair
        self.number = number
        self.slots = _slots(pair.kind, _RECEIVE_SLOTS, settings.chunk_bytes)

    @property
    def is_broken(self) -> bool:
        return self.pair.is_broken

    def close(self) -> None:
        self.pair.close()


class _PairSource(InlineSource):
    def __init__(
        self, transport: PairReceiveTransport, inbox: _Inbox, answer: Mapping[str, bytes], timeout_s: float
    ) -> None:
        self._transport = transport
        self._inbox = inbox
        self._rendezvous = answer
        self._timeout_s = timeout_s

    def answer(self) -> Mapping[str, bytes]:
        return self._rendezvous

    @asynccontextmanager
    async def arrived(self, payload: Payload, num_bytes: int) -> AsyncIterator[Payload]:
        pair = self._inbox.pair
        await _result(pair.connected)
        receive = partial(pair.receive, tag=payload.tag, timeout_s=self._timeout_s)
        async with self._inbox.slots.filled(num_bytes, receive) as arrived:
            yield arrived

    def close(self) -> None:
        self._transport.pairs.leave(self._inbox)


def open_sender(name: str, settings: TransferSettings, max_chunk_bytes: int) -> PairSendTransport | None:
    """None, and a line in the log, if this machine or this build of torch lacks the backend."""
    return PairSendTransport(_KINDS[name], settings, max_chunk_bytes) if _is_available(_KINDS[name]) else None


def open_receiver(name: str, settings: TransferSettings) -> PairReceiveTransport | None:
    """None, and a line in the log, if this machine or this build of torch lacks the backend."""
    return PairReceiveTransport(_KINDS[name], settings) if _is_available(_KINDS[name]) else None


def _is_available(kind: Kind) -> bool:
    is_built = distributed.is_available() and distributed.is_backend_available(kind.name)
    if is_built and (kind.device is None or torch.cuda.is_available()):
        return True
    log.warning("a KV transport is not available; others will be used", transport=kind.name, torch=torch.__version__)
    return False


async def _result(future: futures.Future[T]) -> T:
    """Wait for a thread. Others may wait for it, too."""
    return await asyncio.shield(asyncio.wrap_future(future))
