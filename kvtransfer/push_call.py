"""A sender's gRPC call: writes of several tasks, one at a time, and errors as MeshErrors."""

import asyncio

import grpc

from kvtransfer.messages import SERVICE_NAME, ReceiverMessage, reply_from_proto
from mesh.domain.errors import MeshError, TransferFailed
from mesh.rpc.credentials import Metadata
from mesh.rpc.status import error_from_rpc
from tandem.v1 import kvtransfer_pb2 as pb

_METHOD = f"/{SERVICE_NAME}/Push"


class PushCall:
    """One Push call, which takes requests as bytes. `cancel` it in the end, however it went."""

    def __init__(self, channel: grpc.aio.Channel, metadata: Metadata) -> None:
        push = channel.stream_stream(_METHOD, None, pb.PushResponse.FromString)
        self._call = push(metadata=metadata)
        self._writing = asyncio.Lock()  # grpc.aio takes one write at a time
        self._is_complete = False

    async def write(self, request: bytes) -> None:
        """Send after what other tasks are sending; nothing goes out after the last message. Raises MeshError."""
        async with self._writing:
            if not self._is_complete:
                await self._write(request)

    async def write_last(self, request: bytes) -> None:
        """Send the message after which no other goes out. Raises MeshError."""
        async with self._writing:
            self._is_complete = True
            await self._write(request)

    async def read(self) -> ReceiverMessage:
        """The next reply. Raises the MeshError the call has ended with."""
        try:
            response = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None
        if response is grpc.aio.EOF:
            raise await self._end()
        return reply_from_proto(response)

    async def ended(self) -> None:
        """Let the call end by itself: a cancel would look like a fault to the other side."""
        await self._call.code()

    def cancel(self) -> None:
        """End the call now, if it has not ended; idempotent."""
        self._call.cancel()

    async def _write(self, request: bytes) -> None:
        try:
            await self._call.write(request)
        except asyncio.InvalidStateError:  # how grpc.aio says that the call has ended
            raise await self._end() from None
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.INTERNAL:  # and how, where it ends during a write: the status is lost
                raise TransferFailed("the receiver went away") from None
            raise error_from_rpc(error) from None

    async def _end(self) -> MeshError:
        call = self._call
        code = await call.code()
        if code is grpc.StatusCode.OK:
            return TransferFailed("the receiver ended the conversation early")
        error = grpc.aio.AioRpcError(
            code, await call.initial_metadata(), await call.trailing_metadata(), await call.details()
        )
        return error_from_rpc(error)
