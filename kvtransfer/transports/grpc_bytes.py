"""Payload inside the chunk message: works wherever gRPC does."""

import io

from kvtransfer.transports.base import Payload, TransportOffer
from mesh.domain.errors import TransferCorrupt

NAME = "grpc"


class _BytesSlot:
    """Gathers straight into what becomes the message's bytes object."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._file = io.BytesIO()
        self._view: memoryview | None = None

    def buffer(self) -> memoryview:
        # A BytesIO holds a bytes object that is writable through getbuffer() and handed out by getvalue() uncopied.
        self._file.seek(self._num_bytes - 1)
        self._file.write(b"\0")
        self._view = self._file.getbuffer()
        return self._view

    def seal(self) -> Payload:
        if self._view is not None:
            self._view.release()
        return Payload(inline=self._file.getvalue())

    def release(self) -> None:
        self._file = io.BytesIO()


class GrpcSendTransport:
    """Payload memory is bounded by the receivers' credit."""

    name = NAME

    def offer(self) -> TransportOffer:
        return TransportOffer(NAME)

    async def acquire(self, num_bytes: int) -> _BytesSlot:
        return _BytesSlot(num_bytes)

    def close(self) -> None:
        pass


class _InlineSource:
    def fetch(self, payload: Payload, num_bytes: int) -> bytes:
        if len(payload.inline) != num_bytes:
            raise TransferCorrupt(f"a payload has {len(payload.inline)} bytes instead of {num_bytes}")
        return payload.inline

    def close(self) -> None:
        pass


class GrpcReceiveTransport:
    """Accepts every offer."""

    name = NAME

    def connect(self, offer: TransportOffer) -> _InlineSource:
        return _InlineSource()
