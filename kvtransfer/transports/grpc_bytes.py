"""The transport "grpc": payloads inside the chunk messages. It works wherever gRPC works."""

import numpy as np

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

NAME = "grpc"


class _BytesSlot(Slot):
    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._view = memoryview(b"")

    def buffer(self) -> memoryview:
        self._view = np.empty(self._num_bytes, np.uint8).data
        return self._view

    def seal(self) -> Payload:
        return Payload(inline=self._view)

    def release(self, *, is_acknowledged: bool) -> None:
        self._view = memoryview(b"")


class GrpcSendTransport(SendTransport, SendPath):
    """Allocates memory per chunk. The receivers' credit bounds the total."""

    name = NAME

    async def path(self, address: str, incarnation: str) -> SendPath:
        return self

    def offer(self) -> TransportOffer:
        return TransportOffer(NAME)

    async def acquire(self, num_bytes: int) -> _BytesSlot:
        return _BytesSlot(num_bytes)

    def close(self) -> None:
        pass


class InlineSource(PayloadSource):
    """Payloads that are in memory already."""

    def fetch(self, payload: Payload, num_bytes: int) -> bytes | memoryview:
        if len(payload.inline) != num_bytes:
            raise TransferCorrupt(f"a payload has {len(payload.inline)} bytes instead of {num_bytes}")
        return payload.inline

    def close(self) -> None:
        pass


class GrpcReceiveTransport(ReceiveTransport):
    """Accepts every offer, because payloads need no shared memory."""

    name = NAME

    async def connect(self, offer: TransportOffer) -> InlineSource:
        return InlineSource()
