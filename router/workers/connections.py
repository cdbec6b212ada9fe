"""Connections to workers: one channel per run of a worker, for its link, its prefill calls and its checks; and what
operators ask of workers."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import Message

from mesh import wire
from mesh.domain.errors import InvalidRequest, MeshError, WorkerLost
from mesh.domain.worker import WorkerInfo, WorkerRole
from mesh.rpc.channel import open_channel
from mesh.rpc.credentials import Credentials, Metadata, TlsIdentity
from mesh.rpc.status import error_from_rpc
from mesh.tasks import is_cancelled, spawn
from mesh.v1 import worker_pb2, worker_pb2_grpc
from router.workers.membership import Membership

_ORDER_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class RouterIdentity:
    """The id and the credentials with which this router calls workers."""

    router_id: str
    credentials: Credentials

    @property
    def metadata(self) -> Metadata:
        """The metadata of every outgoing call."""
        return self.credentials.metadata()


class Channels:
    """Opens channels on demand. `reconcile` closes those of lost workers, which ends all calls over them."""

    def __init__(self, membership: Membership, tls: TlsIdentity | None) -> None:
        self._membership = membership
        self._tls = tls
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def get(self, info: WorkerInfo) -> grpc.aio.Channel:
        """Return the channel to this run of a worker."""
        if info.incarnation not in self._channels:
            self._channels[info.incarnation] = open_channel(info.address, self._tls)
        return self._channels[info.incarnation]

    def reconcile(self) -> None:
        """Close the channels of workers that are gone or unknown."""
        alive = {v.info.incarnation for v in self._membership.views() if not v.state.is_gone}
        for incarnation in self._channels.keys() - alive:
            spawn(self._closing, self._channels.pop(incarnation).close())

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()


class WorkerControl:
    """Takes workers out of service and back into it, and gives them other roles. Several routers may ask; the worker's
    heartbeats tell them all.

    `serving(info)` returns the incarnations of workers with its role and model that get requests, this one included.
    """

    def __init__(
        self,
        membership: Membership,
        channels: Channels,
        identity: RouterIdentity,
        serving: Callable[[WorkerInfo], frozenset[str]],
    ) -> None:
        self._membership = membership
        self._channels = channels
        self._identity = identity
        self._serving = serving
        self._leaving_s: dict[str, float] = {}  # incarnations that were asked to switch, and when

    async def set_draining(self, worker_id: str, *, draining: bool) -> None:
        """Raises InvalidRequest if no worker has this name, WorkerLost if it does not answer."""
        request = worker_pb2.SetDrainingRequest(draining=draining)
        await self._ask(self._find(worker_id), "SetDraining", request)

    async def switch_role(self, worker_id: str, role: WorkerRole) -> None:
        """Let the worker drain and then serve in this role; with the role that it has, take a switch back.

        Raises InvalidRequest if no worker has this name, if it has one role only, or if no other worker of its role
        serves; WorkerLost if it does not answer.
        """
        info = self._find(worker_id)
        self._leaving_s.pop(info.incarnation, None)
        if role is not info.role:
            self._require_switchable(info)
            self._leaving_s[info.incarnation] = asyncio.get_running_loop().time()
        try:
            await self._ask(info, "SwitchRole", worker_pb2.SwitchRoleRequest(role=wire.role_to_proto(role)))
        except MeshError:
            self._leaving_s.pop(info.incarnation, None)
            raise

    def _find(self, worker_id: str) -> WorkerInfo:
        view = self._membership.find(worker_id)
        if view is None or view.state.is_gone:
            raise InvalidRequest(f"there is no worker {worker_id!r}")
        return view.info

    def _require_switchable(self, info: WorkerInfo) -> None:
        if not info.switchable:
            raise InvalidRequest(
                f"worker {info.worker_id} cannot change its role: start it with `tandem up --switchable`, or as "
                "python -m switchable_worker"
            )
        # A worker that has just agreed is in the table as before until its next heartbeat.
        oldest_s = asyncio.get_running_loop().time() - _ORDER_TIMEOUT_S
        self._leaving_s = {name: at_s for name, at_s in self._leaving_s.items() if at_s > oldest_s}
        if not self._serving(info) - {info.incarnation} - self._leaving_s.keys():
            raise InvalidRequest(
                f"worker {info.worker_id} is the last {info.role.value} worker that serves: it can switch once another "
                "one does"
            )

    async def _ask(self, info: WorkerInfo, method: str, request: Message) -> None:
        call = getattr(worker_pb2_grpc.WorkerStub(self._channels.get(info)), method)
        try:
            await call(request, timeout=_ORDER_TIMEOUT_S, metadata=self._identity.metadata)
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
