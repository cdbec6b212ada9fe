"""A transport within one process: payloads lie in a dict that both ends hold."""

import itertools

from kvtransfer.transports.base import (
    Payload,
    PayloadSource,
    ReceiveTransport,
    SendPath,
    SendTransport,
    Slot,
    TransportOffer,
)
from mesh.domain.errors import TransferCorrupt

NAME = "memory"


class _MemorySlot(Slot):
    def __init__(self, owner: "MemoryTransport", key: int, num_bytes: int) -> None:
        self._owner = owner
        self._key = key
        owner.payloads[key] = bytearray(num_bytes)

    def buffer(self) -> memoryview:
        return memoryview(self._owner.payloads[self._key])

    def seal(self) -> Payload:
        return Payload(arena_offset=self._key)

    def release(self, *, is_acknowledged: bool) -> None:
        self._owner.payloads.pop(self._key, None)


class MemoryTransport(SendTransport, ReceiveTransport, SendPath):
    """Both sides. `payloads` holds what is acquired and not yet released."""

    name = NAME

    def __init__(self) -> None:
        self.payloads: dict[int, bytearray] = {}
        self.num_open_sources = 0
        self._keys = itertools.count(1)

    async def path(self, address: str, incarnation: str) -> SendPath:
        return self

    def offer(self) -> TransportOffer:
        return TransportOffer(NAME)

    async def acquire(self, num_bytes: int) -> _MemorySlot:
        return _MemorySlot(self, next(self._keys), num_bytes)

    async def connect(self, offer: TransportOffer) -> "_MemorySource":
        self.num_open_sources += 1
        return _MemorySource(self)

    def close(self) -> None:
        assert not self.payloads


class _MemorySource(PayloadSource):
    def __init__(self, transport: MemoryTransport) -> None:
        self._transport = transport

    def reader(self, payload: Payload) -> None:
        return None

    def fetch(self, payload: Payload, num_bytes: int) -> bytes:
        stored = self._transport.payloads.get(payload.arena_offset)
        if stored is None:
            raise TransferCorrupt("there is no such payload")
        return bytes(stored)

    def close(self) -> None:
        self._transport.num_open_sources -= 1
