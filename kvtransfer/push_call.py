"""A sender's gRPC call. Serializes the writes of several tasks and translates errors to MeshErrors."""

import asyncio

import grpc

from kvtransfer.messages import SERVICE_NAME, ReceiverMessage, reply_from_proto
from mesh.domain.errors import MeshError, TransferFailed
from mesh.rpc.credentials import Metadata
from mesh.rpc.status import error_from_rpc
from mesh.v1 import kvtransfer_pb2 as pb

_METHOD = f"/{SERVICE_NAME}/Push"


class PushCall:
    """One Push call, whose requests are serialized already. Always `cancel` it at the end."""

    def __init__(self, channel: grpc.aio.Channel, metadata: Metadata) -> None:
        push = channel.stream_stream(_METHOD, None, pb.PushResponse.FromString)
        self._call = push(metadata=metadata)
        self._refusal: MeshError | None = None
        self._call.add_done_callback(self._keep_refusal)
        self._writing = asyncio.Lock()  # grpc.aio takes one write at a time
        self._is_complete = False

    async def write(self, request: bytes) -> None:
        """Send `request` after the writes of other tasks. Does nothing after `write_last`. Raises MeshError."""
        async with self._writing:
            if not self._is_complete:
                await self._write(request)

    async def write_last(self, request: bytes) -> None:
        """Send the final message; later writes are dropped. Raises MeshError."""
        async with self._writing:
            self._is_complete = True
            await self._write(request)

    async def read(self) -> ReceiverMessage:
        """Return the next reply. Raises the MeshError that ended the call."""
        try:
            response = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None
        if response is grpc.aio.EOF:
            raise await self._end()
        return reply_from_proto(response)

    async def ended(self) -> None:
        """Wait until the call ends by itself; the receiver would take a cancellation for a failure."""
        await self._call.code()

    def cancel(self) -> None:
        """End the call now; idempotent."""
        self._call.cancel()

    async def _write(self, request: bytes) -> None:
        try:
            await self._call.write(request)
        except asyncio.InvalidStateError:  # grpc.aio raises this if the call had ended before the write
            raise await self._end() from None
        except grpc.aio.AioRpcError as error:
            # And this if it ends during the write, in place of the status received: github.com/grpc/grpc/issues/36066
            if error.code() is grpc.StatusCode.INTERNAL:
                if self._refusal is not None:
                    raise self._refusal from None
                raise TransferFailed("the receiver disconnected") from None
            raise error_from_rpc(error) from None

    def _keep_refusal(self, _: object) -> None:
        """Keep the first status of the call. All of it is there already, so `_end` returns without waiting."""
        if self._refusal is None:
            try:
                self._end().send(None)
            except StopIteration as done:
                self._refusal = done.value

    async def _end(self) -> MeshError:
        call = self._call
        code = await call.code()
        if code is grpc.StatusCode.OK:
            return TransferFailed("the receiver ended the conversation early")
        error = grpc.aio.AioRpcError(
            code, await call.initial_metadata(), await call.trailing_metadata(), await call.details()
        )
        return error_from_rpc(error)
