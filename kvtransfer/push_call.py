"""A sender's calls, one per transfer: over gRPC, by a connection per decode worker that is closed after a time without
transfers, or over a link.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from kvtransfer.messages import SERVICE_NAME, ReceiverMessage, reply_from_proto
from kvtransfer.transports.link import Call
from kvtransfer.transports.resource_pool import ResourcePool
from mesh.domain.errors import MeshError, ReceiverLost, TransferFailed, WorkerLost
from mesh.rpc.channel import open_channel
from mesh.rpc.credentials import Metadata, TlsIdentity
from mesh.rpc.status import FirstStatus, error_from_rpc
from mesh.tasks import call_on, spawn
from mesh.v1 import kvtransfer_pb2 as pb

_METHOD = f"/{SERVICE_NAME}/Push"


class Connection:
    """The connection to one decode worker. `credit`: chunks that it may still be sent before it acknowledges one, over
    all transfers to it.
    """

    is_broken = False  # gRPC connects again by itself

    def __init__(
        self, address: str, tls: TlsIdentity | None, max_chunks: int, closing: "set[asyncio.Task[None]]"
    ) -> None:
        # Its own connection: control messages must not wait behind megabytes of payload.
        self.channel = open_channel(address, tls, own_connection=True)
        self.credit = asyncio.Semaphore(max_chunks)
        self._closing = closing

    def close(self) -> None:
        spawn(self._closing, self.channel.close())


class ConnectionPool:
    """Connections by address, for use on one event loop."""

    def __init__(self, idle_s: float, tls: TlsIdentity | None, max_chunks: int) -> None:
        self._tls = tls
        self._max_chunks = max_chunks
        self._pool: ResourcePool[str, Connection] = ResourcePool(None, idle_s)
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._pool)

    @contextmanager
    def use(self, address: str) -> Iterator[Connection]:
        """Yield the connection to `address`, which stays open while the block runs."""
        connection = self._pool.get(address) or self._pool.add(
            address, lambda: Connection(address, self._tls, self._max_chunks, self._closing)
        )
        assert connection is not None, "the pool has no limit"
        self._pool.use(connection)
        try:
            yield connection
        finally:
            self._pool.leave(connection)

    async def close(self) -> None:
        """Close all connections. None may be in use."""
        self._pool.close()
        if self._closing:
            await asyncio.wait(self._closing)


class PushCall:
    """One Push call, whose requests are serialized already. Always `cancel` it at the end."""

    def __init__(self, channel: grpc.aio.Channel, metadata: Metadata) -> None:
        push = channel.stream_stream(_METHOD, None, pb.PushResponse.FromString)
        self._call = push(metadata=metadata)
        self._status = FirstStatus(self._call)
        self._unsent: asyncio.Queue[bytes] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def send(self, request: bytes) -> None:
        """Let `write_all` send it, from any thread."""
        call_on(self._loop, self._unsent.put_nowait, request)

    async def write_all(self) -> None:
        """Write what is sent, until cancelled. Raises MeshError."""
        while True:
            await self.write(await self._unsent.get())

    async def write(self, request: bytes) -> None:
        """Send a message while no other task writes. Raises MeshError."""
        try:
            await self._call.write(request)
        except (asyncio.InvalidStateError, grpc.aio.AioRpcError):  # the call had ended before the write, or ends now
            raise await self._error() from None

    async def read(self) -> ReceiverMessage:
        """Return the next reply. Raises the MeshError that ended the call."""
        try:
            response = await self._call.read()
        except grpc.aio.AioRpcError:
            raise await self._error() from None
        if response is grpc.aio.EOF:
            raise await self._error()
        return reply_from_proto(response)

    async def ended(self) -> None:
        """Wait until the call ends by itself; the receiver would take a cancellation for a failure."""
        await self._call.code()

    def cancel(self) -> None:
        """End the call now; idempotent."""
        self._call.cancel()

    async def _error(self) -> MeshError:
        """Return the error that has ended the call.

        Where the connection has failed, either end or the network between them may be the cause.
        """
        status = await self._status.wait()
        if status.code() is grpc.StatusCode.OK:
            return TransferFailed("the receiver ended the conversation early")
        error = error_from_rpc(status)
        if status.code() is grpc.StatusCode.CANCELLED:
            return ReceiverLost(str(error))
        return _unreachable(error) if type(error) is WorkerLost else error


class LinkCall:
    """Like PushCall, over a link."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self.is_lost = False
        """The link has ended."""

    def send(self, request: bytes) -> None:
        """Send a message, from any thread."""
        try:
            self._call.send(request)
        except WorkerLost as error:
            raise self._lost(error) from None

    async def write(self, request: bytes) -> None:
        self.send(request)

    async def read(self) -> ReceiverMessage:
        try:
            return reply_from_proto(pb.PushResponse.FromString(await self._call.read()))
        except WorkerLost as error:
            raise self._lost(error) from None
        except asyncio.CancelledError:  # as over gRPC, the receiver learns of it before threads of ours have ended
            self.cancel()
            raise

    async def ended(self) -> None:
        """The last reply has come: the call is over on both sides."""
        self._call.leave()

    def cancel(self) -> None:
        self._call.leave(TransferFailed("the sender has given up"))

    def _lost(self, error: WorkerLost) -> TransferFailed:
        self.is_lost = True
        return _unreachable(error)


def _unreachable(error: MeshError) -> TransferFailed:
    return TransferFailed(f"the receiver cannot be reached: {error}")
