"""Connections to workers: one channel per run of a worker, for its link, its prefill calls and its checks."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import grpc

from mesh.domain.errors import InvalidRequest, WorkerLost
from mesh.domain.worker import WorkerInfo, WorkerState
from mesh.retry import is_cancelled
from mesh.rpc.channel import open_channel
from mesh.rpc.credentials import Credentials, Metadata, TlsIdentity
from mesh.rpc.status import error_from_rpc
from mesh.v1 import worker_pb2, worker_pb2_grpc
from router.workers.membership import WorkerTable

_DRAIN_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Caller:
    """This router's identity towards workers."""

    router_id: str
    credentials: Credentials

    @property
    def metadata(self) -> Metadata:
        """The metadata of every outgoing call."""
        return self.credentials.metadata()


class Channels:
    """Opens channels on demand. The channel of a lost worker is closed, which ends all calls over it at once."""

    def __init__(self, table: WorkerTable, tls: TlsIdentity | None) -> None:
        self._table = table
        self._tls = tls
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def get(self, info: WorkerInfo) -> grpc.aio.Channel:
        """Return the channel to this run of a worker."""
        if info.incarnation not in self._channels:
            self._channels[info.incarnation] = open_channel(info.address, self._tls)
        return self._channels[info.incarnation]

    def reconcile(self) -> None:
        """Close the channels of workers that are lost or unknown."""
        alive = {v.info.incarnation for v in self._table.workers() if v.state is not WorkerState.LOST}
        for incarnation in self._channels.keys() - alive:
            task = asyncio.get_running_loop().create_task(self._channels.pop(incarnation).close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()


class Drains:
    """Takes workers out of service and back into it. Several routers may ask; the worker's heartbeats tell them all."""

    def __init__(self, table: WorkerTable, channels: Channels, caller: Caller) -> None:
        self._table = table
        self._channels = channels
        self._caller = caller

    async def set_draining(self, worker_id: str, *, draining: bool) -> None:
        """Raises InvalidRequest if no worker has this name, WorkerLost if it does not answer."""
        views = (view for view in self._table.workers() if view.info.worker_id == worker_id)
        view = next((view for view in views if view.state is not WorkerState.LOST), None)
        if view is None:
            raise InvalidRequest(f"there is no worker {worker_id!r}")
        stub = worker_pb2_grpc.WorkerStub(self._channels.get(view.info))
        request = worker_pb2.SetDrainingRequest(draining=draining)
        try:
            await stub.SetDraining(request, timeout=_DRAIN_TIMEOUT_S, metadata=self._caller.metadata)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error


async def responses_of(call: Any) -> AsyncGenerator[Any, None]:
    """Yield the messages of a streaming call.

    Raises its error as a MeshError; closing the generator cancels the call.
    """
    try:
        async for response in call:
            yield response
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from error
    except asyncio.CancelledError as error:
        # grpc.aio also raises this if the peer, or a closed channel, has ended the call.
        if is_cancelled():
            raise
        raise WorkerLost("the call was cancelled by the other side") from error
    finally:
        call.cancel()
