"""The transports "nixl" and "mooncake": the receiver reads payloads out of the sender's memory (read_engines.py).

A sender has one arena, as in shm, which is registered with an engine. An offer has what the receiver's engine needs to
read it, and a nonce. Before a receiver accepts, it reads the arena's first bytes and compares: it accepts what works,
and a sender whose offer was declined tries another transport for a while. A payload is read into a slot of the
receiver, verified there, and then written. A read that ends too late, after its slot was released, fails its checksum.

The libraries authenticate nobody: whoever reaches their ports could read, and with UCX also write, the worker's memory.
So these transports need `trust_fabric`, also on one machine.
"""

import asyncio
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent import futures
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from types import MappingProxyType

import numpy as np
import structlog
import torch
from torch import Tensor

from kvtransfer.settings import TransferSettings
from kvtransfer.transports.base import Payload, ReceiveTransport, SendPath, SendTransport, TransportOffer
from kvtransfer.transports.grpc_bytes import InlineSource
from kvtransfer.transports.pair import address_towards
from kvtransfer.transports.read_engines import MOONCAKE, NIXL, ReadEngine, ReadLibrary, Remote
from kvtransfer.transports.resource_pool import AvoidedAddresses, ResourcePool
from kvtransfer.transports.slots import ARENA_HEADER_BYTES, ArenaSlot, ArenaSlots, TensorSlots, require_in_arena
from mesh.domain.errors import TransferFailed

log = structlog.get_logger(__name__)

_NONCE_BYTES = 32
_MAX_RENDEZVOUS_BYTES = 64 << 10
_NUM_READS = 2
"""Reads of a sender's memory at a time. While they run, two payloads that have been read are written."""
_MAX_SENDERS = 16
_LIBRARIES = MappingProxyType({library.name: library for library in (NIXL, MOONCAKE)})


class _Engines:
    """An engine for each address of this machine by which others reach it, started when it is first needed."""

    def __init__(
        self, library: ReadLibrary, settings: TransferSettings, on_start: Callable[[ReadEngine], None] = lambda _: None
    ) -> None:
        self._library = library
        self._settings = settings
        self._on_start = on_start
        self._started: dict[str, ReadEngine] = {}
        # One thread, so that an engine is started once.
        self._thread = futures.ThreadPoolExecutor(1, thread_name_prefix=f"kv-{library.name}")

    async def towards(self, host: str, port: int) -> tuple[ReadEngine, str]:
        """Return an engine, and its address, from which this machine reaches `host`. Raises TransferFailed."""
        return await asyncio.shield(asyncio.wrap_future(self._thread.submit(self._towards, host, port)))

    def close(self) -> None:
        """End all engines: afterwards nobody reads memory that was registered."""
        self._thread.submit(self._started.clear)
        self._thread.shutdown()

    def _towards(self, host: str, port: int) -> tuple[ReadEngine, str]:
        with _failing(self._library):
            address = address_towards(host, port, trust_fabric=self._settings.trust_fabric)
            if address not in self._started:
                engine = self._library.open(address)
                self._on_start(engine)
                self._started[address] = engine
            return self._started[address], address


class ReadSendTransport(SendTransport):
    """A sender's arena, which receivers read."""

    def __init__(self, library: ReadLibrary, settings: TransferSettings, max_chunk_bytes: int) -> None:
        self.name = library.name
        num_bytes = max(settings.arena_bytes, ARENA_HEADER_BYTES + max_chunk_bytes)
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._id = secrets.token_hex(16)
        self._arena = np.zeros(num_bytes, np.uint8)
        self._arena[:_NONCE_BYTES] = np.frombuffer(self._nonce, np.uint8)
        self.slots = ArenaSlots(self._arena.data, max_chunk_bytes)
        self._rendezvous: dict[ReadEngine, Mapping[str, bytes]] = {}
        self._engines = _Engines(library, settings, self._register)
        self._avoided = AvoidedAddresses()

    async def path(self, address: str, incarnation: str) -> "_Path | None":
        if address in self._avoided:
            return None
        host, _, port = address.rpartition(":")
        try:
            engine, own_address = await self._engines.towards(host.strip("[]"), int(port))
        except TransferFailed as error:
            self.avoid(address, str(error))
            return None
        rendezvous = dict(self._rendezvous[engine])
        offer = TransportOffer(
            self.name, self._id, self._nonce, self._arena.nbytes, host=own_address, rendezvous=rendezvous
        )
        return _Path(self, offer, address)

    def avoid(self, address: str, reason: str) -> None:
        """Offer this transport to `address` no more for a while."""
        self._avoided.add(address)
        log.warning("other KV transports will be used", transport=self.name, to=address, reason=reason)

    def memory(self) -> memoryview:
        return self._arena.data

    def close(self) -> None:
        self._engines.close()
        self.slots.close()

    def _register(self, engine: ReadEngine) -> None:
        engine.register(self._arena.ctypes.data, self._arena.nbytes)
        # Once: receivers know a sender by it.
        self._rendezvous[engine] = engine.rendezvous(self._arena.ctypes.data)


class _Path(SendPath):
    """One transfer's use of the arena."""

    def __init__(self, transport: ReadSendTransport, offer: TransportOffer, address: str) -> None:
        self._transport = transport
        self._offer = offer
        self._address = address

    def offer(self) -> TransportOffer:
        return self._offer

    async def acquire(self, num_bytes: int) -> ArenaSlot:
        return await self._transport.slots.acquire(num_bytes)

    def decline(self) -> None:
        self._transport.avoid(self._address, "the receiver has declined; its log says why")


class ReadReceiveTransport(ReceiveTransport):
    """A receiver's engines, and the senders that it reads from."""

    def __init__(self, library: ReadLibrary, settings: TransferSettings) -> None:
        self.name = library.name
        self.senders: ResourcePool[str, _Sender] = ResourcePool(_MAX_SENDERS, 2 * settings.channel_idle_s)
        self._library = library
        self._settings = settings
        self._engines = _Engines(library, settings)

    async def connect(self, offer: TransportOffer) -> "_ReadSource | None":
        is_sound = (
            ARENA_HEADER_BYTES < offer.arena_bytes <= self._settings.max_arena_bytes
            and len(offer.nonce) == _NONCE_BYTES
            and sum(map(len, offer.rendezvous.values())) <= _MAX_RENDEZVOUS_BYTES
        )
        if not is_sound:
            return None
        sender = self.senders.get(offer.arena) or self.senders.add(
            offer.arena, lambda: _Sender(self._library, self._engines, offer, self._settings)
        )
        if sender is None or sender.offer != offer:
            return None
        source = _ReadSource(self.senders, sender, self._settings.lease_s)
        try:
            await asyncio.shield(sender.proven)
        except BaseException as error:
            source.close()
            if not isinstance(error, TransferFailed):
                raise
            log.warning("a sender's memory cannot be read", transport=self.name, host=offer.host, error=str(error))
            return None
        return source

    def close(self) -> None:
        self.senders.close()
        self._engines.close()


class _Sender:
    """A sender's memory, and the slots that are filled from it."""

    def __init__(
        self, library: ReadLibrary, engines: _Engines, offer: TransportOffer, settings: TransferSettings
    ) -> None:
        self.offer = offer
        self.is_broken = False
        self._library = library
        self._engine: ReadEngine
        self._remote: Remote | None = None
        self._memory: dict[int, Tensor] = {}  # all slots, by address
        self._registered: set[int] = set()
        self._threads = futures.ThreadPoolExecutor(_NUM_READS, thread_name_prefix=f"kv-{library.name}-read")
        self.slots = TensorSlots(2 * _NUM_READS, settings.chunk_bytes, make=self._make, drop=self._drop)
        self.proven = asyncio.create_task(self._prove(engines, settings.connect_s))
        """Done when the header of the sender's arena has been read. Raises TransferFailed."""

    async def _prove(self, engines: _Engines, timeout_s: float) -> None:
        try:
            self._engine, _ = await engines.towards(self.offer.host, 1)
            await asyncio.wrap_future(self._threads.submit(self._connect))
            async with self.slots.filled(_NONCE_BYTES, lambda slot: self.fill(slot, 0, timeout_s)) as header:
                if bytes(header.inline) != self.offer.nonce:
                    raise TransferFailed("another arena is there")
        except TransferFailed:
            self.is_broken = True
            raise

    def _connect(self) -> None:
        with _failing(self._library):
            self._remote = self._engine.reach(self.offer.rendezvous)

    def fill(self, slot: Tensor, offset: int, timeout_s: float) -> futures.Future[None]:
        """Fill `slot` from `offset` of the sender's arena, on a thread. The result raises TransferFailed; this sender
        is broken then."""
        return self._threads.submit(self._fill, slot, offset, timeout_s)

    def close(self) -> None:
        """Forget the sender, on a thread, when reads that were cancelled have ended: until then the library may still
        write into a slot. Nobody uses the sender any more."""
        self.proven.cancel()
        threading.Thread(target=self._free, name=f"kv-{self._library.name}-free").start()

    def _fill(self, slot: Tensor, offset: int, timeout_s: float) -> None:
        if self.is_broken:
            raise TransferFailed(f"{self._library.name}: reads from this sender have failed")
        try:
            with _failing(self._library):
                assert self._remote is not None
                self._register(slot.data_ptr())
                self._remote.read(slot.data_ptr(), offset, slot.numel(), timeout_s)
        except TransferFailed:
            self.is_broken = True
            raise

    def _make(self, num_bytes: int) -> Tensor:
        """A new slot, which is registered when it is first filled: that takes long, and this is the event loop."""
        slot = torch.empty(num_bytes, dtype=torch.uint8)
        self._memory[slot.data_ptr()] = slot
        return slot

    def _drop(self, slot: Tensor) -> None:
        self._threads.submit(self._give_up, self._unregister, slot.data_ptr())

    def _register(self, address: int) -> None:
        if address not in self._registered:
            self._engine.register(address, self._memory[address].numel())
            self._registered.add(address)

    def _unregister(self, address: int) -> None:
        """Let go of a slot. If that fails, its memory is kept, because the library may still write there."""
        if address in self._registered:
            self._engine.unregister(address, self._memory[address].numel())
            self._registered.remove(address)
        del self._memory[address]

    def _free(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        for address in list(self._memory):
            self._give_up(self._unregister, address)
        if self._remote is not None:
            self._give_up(self._remote.close)

    def _give_up(self, end: Callable[..., None], *args: int) -> None:
        """Call `end`. A failure is logged: what else there is must be given up, too."""
        try:
            with _failing(self._library):
                end(*args)
        except TransferFailed as error:
            log.warning("a sender's memory is not given up cleanly", transport=self._library.name, error=str(error))


class _ReadSource(InlineSource):
    def __init__(self, senders: ResourcePool[str, _Sender], sender: _Sender, timeout_s: float) -> None:
        self._senders = senders
        self._sender = sender
        self._timeout_s = timeout_s
        senders.use(sender)

    @asynccontextmanager
    async def arrived(self, payload: Payload, num_bytes: int) -> AsyncIterator[Payload]:
        require_in_arena(payload, num_bytes, self._sender.offer.arena_bytes)
        read = partial(self._sender.fill, offset=payload.arena_offset, timeout_s=self._timeout_s)
        async with self._sender.slots.filled(num_bytes, read) as arrived:
            yield arrived

    def close(self) -> None:
        self._senders.leave(self._sender)


def open_sender(name: str, settings: TransferSettings, max_chunk_bytes: int) -> ReadSendTransport | None:
    """None, and a line in the log, if the library is not there or the network is not trusted."""
    library = _usable(name, settings)
    return None if library is None else ReadSendTransport(library, settings, max_chunk_bytes)


def open_receiver(name: str, settings: TransferSettings) -> ReadReceiveTransport | None:
    """None, and a line in the log, if the library is not there or the network is not trusted."""
    library = _usable(name, settings)
    return None if library is None else ReadReceiveTransport(library, settings)


def _usable(name: str, settings: TransferSettings) -> ReadLibrary | None:
    library = _LIBRARIES[name]
    reason = library.why_not() if settings.trust_fabric else "it asks nobody for credentials: set trust_fabric"
    if reason is None:
        return library
    log.warning("a KV transport is not available; others will be used", transport=name, reason=reason)
    return None


@contextmanager
def _failing(library: ReadLibrary) -> Iterator[None]:
    """Turn the library's own errors, which have no common class, into TransferFailed."""
    try:
        yield
    except TransferFailed:
        raise
    except Exception as error:
        raise TransferFailed(f"{library.name}: {error}") from error
