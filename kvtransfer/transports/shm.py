"""The transport "shm": payloads in shared memory, for workers on one host with the same /dev/shm.

The sender copies KV into a slot of its arena. The receiver maps the arena and copies the slot into its KV cache (for a
GPU, by way of pinned memory); the store computes the checksum of the bytes that it writes, so the KV cache holds
exactly the verified bytes, even if a faulty sender overwrites a slot too early.

The first transfer to a receiver has its conversation over gRPC. There the receiver answers with a token that it got at
the socket, so the sender knows whose connection that is, and later conversations go over it (link.py).
"""

import os
from collections.abc import Mapping
from functools import partial

import structlog

from kvtransfer.settings import TransferSettings
from kvtransfer.transports.arena import Arena, MappedArena, open_arena, remove_orphans
from kvtransfer.transports.base import (
    Payload,
    PayloadSource,
    ReceiveTransport,
    SendPath,
    SendTransport,
    TransportOffer,
)
from kvtransfer.transports.link import Call, Link, Serve
from kvtransfer.transports.resource_pool import ResourcePool
from kvtransfer.transports.slots import ARENA_HEADER_BYTES, ArenaSlot, ArenaSlots, require_in_arena
from mesh.domain.errors import TransferFailed

log = structlog.get_logger(__name__)

NAME = "shm"

_TOKEN = "link"
"""The receiver's answer to an offer has the token under this name."""
_MAX_ARENAS = 64
"""Senders whose arenas a receiver keeps mapped."""


class ShmSendTransport(SendTransport):
    """One arena, divided into equal slots, for all transfers of this process."""

    name = NAME

    def __init__(self, arena: "Arena", slot_bytes: int) -> None:
        self._arena = arena
        self.slots = ArenaSlots(arena.view(0, arena.num_bytes), slot_bytes)

    async def path(self, address: str, incarnation: str) -> "ShmPath":
        return ShmPath(self, address, incarnation)

    def offer(self) -> TransportOffer:
        return TransportOffer(NAME, self._arena.name, self._arena.nonce, self._arena.num_bytes)

    def link(self, address: str, incarnation: str) -> Link | None:
        return self._arena.links_by_receiver.get((address, incarnation))

    def identify(self, address: str, incarnation: str, token: bytes) -> None:
        """Note that the link with this token leads to the receiver at this address."""
        link = self._arena.links_by_token.get(token)
        if link is not None:
            self._arena.links_by_receiver[address, incarnation] = link

    def memory(self) -> memoryview:
        return self._arena.view(0, self._arena.num_bytes)

    def close(self) -> None:
        self.slots.close()
        self._arena.close()


class ShmPath(SendPath):
    """The arena as one transfer's way to a receiver."""

    def __init__(self, transport: ShmSendTransport, address: str, incarnation: str) -> None:
        self._transport = transport
        self._receiver = (address, incarnation)

    def offer(self) -> TransportOffer:
        return self._transport.offer()

    async def acquire(self, num_bytes: int) -> ArenaSlot:
        return await self._transport.slots.acquire(num_bytes)

    async def join(self, rendezvous: Mapping[str, bytes]) -> None:
        self._transport.identify(*self._receiver, rendezvous.get(_TOKEN, b""))


def open_sender(settings: TransferSettings, max_chunk_bytes: int) -> ShmSendTransport | None:
    """Create the arena, after removing arenas of dead senders. Return None, and log why, if it cannot be created."""
    remove_orphans(settings.shm_dir)
    page = os.sysconf("SC_PAGESIZE")
    slot_bytes = -(-max_chunk_bytes // page) * page
    try:
        arena = Arena(settings.shm_dir, max(settings.arena_bytes, ARENA_HEADER_BYTES + slot_bytes))
    except OSError as error:
        log.warning("no shared memory for KV; other transports will be used", dir=settings.shm_dir, error=str(error))
        return None
    return ShmSendTransport(arena, slot_bytes)


class _ArenaSource(PayloadSource):
    def __init__(self, arenas: ResourcePool[str, MappedArena], arena: MappedArena) -> None:
        self._arenas = arenas
        self._arena: MappedArena | None = arena
        self._token = arena.token
        arenas.use(arena)

    def answer(self) -> Mapping[str, bytes]:
        return {_TOKEN: self._token}

    def fetch(self, payload: Payload, num_bytes: int) -> memoryview:
        if self._arena is None:
            raise TransferFailed("the sender's arena is closed")
        require_in_arena(payload, num_bytes, len(self._arena.view))
        return self._arena.view[payload.arena_offset : payload.arena_offset + num_bytes]

    def close(self) -> None:
        arena, self._arena = self._arena, None
        if arena is not None:
            self._arenas.leave(arena)


class ShmReceiveTransport(ReceiveTransport):
    """Keeps arenas mapped between transfers, because the first touch of each page of a mapping is slow."""

    name = NAME

    def __init__(self, settings: TransferSettings) -> None:
        self._settings = settings
        self._arenas: ResourcePool[str, MappedArena] = ResourcePool(_MAX_ARENAS, settings.channel_idle_s)
        self._serve: Serve = _refuse

    def serve_links(self, serve: Serve) -> None:
        self._serve = serve

    async def connect(self, offer: TransportOffer) -> _ArenaSource | None:
        if not ARENA_HEADER_BYTES < offer.arena_bytes <= self._settings.max_arena_bytes:
            return None
        arena = self._known(offer)
        if arena is None:
            opened = await open_arena(self._settings.shm_dir, offer.arena, offer.nonce, offer.arena_bytes)
            if opened is None:
                return None
            # Another transfer may have mapped it meanwhile.
            arena = self._known(offer) or self._arenas.add(offer.arena, lambda: opened)
            if arena is not opened:
                opened.close()
            elif not self._watch(opened):
                return None
        return None if arena is None else _ArenaSource(self._arenas, arena)

    def _watch(self, arena: MappedArena) -> bool:
        """Serve the arena's sender. False if the system has no thread for it; the arena is closed then."""
        try:
            arena.watch(self._arenas.retire, partial(self._serve_from, arena))
        except RuntimeError as error:
            log.warning("a sender's shared memory is not used", error=str(error))
            self._arenas.retire(arena)
            return False
        return True

    def close(self) -> None:
        self._arenas.close()

    async def _serve_from(self, arena: MappedArena, call: Call) -> None:
        """An arena stays mapped while one of its sender's calls runs."""
        self._arenas.use(arena)
        try:
            await self._serve(call)
        finally:
            self._arenas.leave(arena)

    def _known(self, offer: TransportOffer) -> MappedArena | None:
        arena = self._arenas.get(offer.arena)
        is_same = arena is not None and (len(arena.view), arena.nonce) == (offer.arena_bytes, offer.nonce)
        return arena if is_same else None


async def _refuse(call: Call) -> None:
    call.leave(TransferFailed("nobody serves calls here"))
