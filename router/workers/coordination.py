"""A router's part in the mesh: the registry of its workers, and the routers that it shares permits with.

Without `registry_url` this router is alone: workers register with it over gRPC, one stream per worker, and a worker is
lost when its stream ends; permits are the router's own. With `registry_url` workers and permits are in Redis, and any
number of routers serve side by side. Either way a worker that leaves in order says so in its last heartbeat.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator
from typing import Protocol

import grpc
import structlog

from mesh import wire
from mesh.domain.errors import InvalidRequest, missing_extra
from mesh.domain.worker import HEARTBEAT_INTERVAL_S, CacheEvent, WorkerInfo, WorkerState
from mesh.durations import duration_to_proto
from mesh.process import run_for_life
from mesh.rpc.server import Listen, Server
from mesh.v1 import worker_pb2, worker_pb2_grpc
from router.admission.limiter import ConcurrencyLimiter, LocalLimiter
from router.settings import RouterSettings
from router.traffic import Traffic
from router.workers.connections import RouterIdentity
from router.workers.membership import Membership

log = structlog.get_logger(__name__)

SILENT_S = 5.0
FORGET_S = 300.0
_TWIN_AFTER_S = 2 * HEARTBEAT_INTERVAL_S


class Coordination(Protocol):
    """Feeds the Membership from `start` on. Call `stop` after the last stream has ended."""

    @property
    def address(self) -> str:
        """The address of the registry that workers register with; "" if it is not in this router."""
        ...

    def limiter_for(self, model: str) -> ConcurrencyLimiter:
        """Return the model's concurrency limiter. Called once per model, before `start`."""
        ...

    async def tell_traffic(self) -> None:
        """Let the other routers know of this router's Traffic, which has changed, as far as they can be reached."""
        ...

    async def may_act(self, purpose: str, seconds: float) -> bool:
        """Return True if this router may do what `purpose` names for so long, and no other router may meanwhile."""
        ...

    async def start(self) -> None:
        """Start to follow the workers."""
        ...

    async def stop(self) -> None:
        """Release leases and connections. Does not raise if Redis or a worker is unreachable."""
        ...


class LocalCoordination:
    """A Coordination of a router alone, which hosts the registry. The port is bound at once."""

    def __init__(self, settings: RouterSettings, membership: Membership, identity: RouterIdentity) -> None:
        self._membership = membership
        key, tls = identity.credentials.key, identity.credentials.tls
        self._server = Server(Listen(settings.registry_host, settings.registry_port, key, tls=tls))
        self._expiry: asyncio.Task[None] | None = None
        self._cap = settings.max_concurrent_requests

    @property
    def address(self) -> str:
        return self._server.address

    def limiter_for(self, model: str) -> ConcurrencyLimiter:
        return LocalLimiter(self._cap)

    async def tell_traffic(self) -> None:
        """There are no others."""

    async def may_act(self, purpose: str, seconds: float) -> bool:
        return True

    async def start(self) -> None:
        worker_pb2_grpc.add_RegistryServicer_to_server(RegistryServicer(self._membership), self._server.grpc)
        await self._server.start(["mesh.v1.Registry"])
        self._server.set_serving(True)
        self._expiry = run_for_life(expire_forever(self._membership))

    async def stop(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        await self._server.stop(0)


def coordinate(
    settings: RouterSettings, membership: Membership, identity: RouterIdentity, traffic: Traffic
) -> Coordination:
    """Return the Coordination that the settings select. Raises ConfigurationError."""
    if not settings.registry_url:
        return LocalCoordination(settings, membership, identity)
    try:
        from router.workers.redis_registry import RedisCoordination
    except ImportError as error:
        raise missing_extra("registry_url needs redis", "redis") from error
    return RedisCoordination(settings, membership, identity, traffic)


class RegistryServicer(worker_pb2_grpc.RegistryServicer):
    """Feeds a Membership from the streams of workers."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._twins = TwinWatch(membership)
        self._streams: dict[str, object] = {}  # the latest stream of each worker, by worker id

    async def Register(
        self, request_iterator: AsyncIterator[worker_pb2.RegisterRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.RegisterResponse]:
        """Follow one worker until its stream ends."""
        first = await anext(request_iterator, None)
        if first is None or first.WhichOneof("message") != "record":
            raise InvalidRequest("the first message must be the worker's record")
        info = wire.worker_from_proto(first.record)
        worker_joined(self._membership, info)
        stream = self._streams[info.worker_id] = object()
        left_as = WorkerState.LOST
        try:
            interval = duration_to_proto(HEARTBEAT_INTERVAL_S)
            yield worker_pb2.RegisterResponse(registered=worker_pb2.Registered(heartbeat_interval=interval))
            async for request in request_iterator:
                if request.HasField("heartbeat"):
                    state = wire.state_from_proto(request.heartbeat.state)
                    if state.is_gone:
                        left_as = state
                        return
                    self._twins.note(info, state)
                if not apply_report(self._membership, info, request):
                    yield worker_pb2.RegisterResponse(snapshot_request=worker_pb2.SnapshotRequest())
        finally:
            # After a network failure the worker may have a new stream before the old one ends here.
            if self._streams.get(info.worker_id) is stream:
                del self._streams[info.worker_id]
                worker_left(self._membership, info, left_as)


class TwinWatch:
    """Logs once that two live workers have one id. The one that registered last gets the requests: it looks like a
    restarted worker until its former self is seen to go on."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._former: dict[str, tuple[str, float]] = {}  # by worker id: the run that goes on, and since when

    def note(self, info: WorkerInfo, state: WorkerState) -> None:
        """Take each heartbeat that says `state`."""
        member = self._membership.find(info.worker_id)
        if member is None or member.info.incarnation == info.incarnation or state is WorkerState.DRAINING:
            return
        now_s = time.monotonic()
        incarnation, since_s = self._former.get(info.worker_id, ("", 0.0))
        if incarnation != info.incarnation:
            self._former = {name: run for name, run in self._former.items() if self._membership.find(name) is not None}
            self._former[info.worker_id] = (info.incarnation, now_s)
        elif now_s - since_s > _TWIN_AFTER_S:  # no heartbeat that was only late
            self._former[info.worker_id] = (info.incarnation, math.inf)
            log.error(
                "two workers have one id: give each a worker_id of its own",
                worker=info.worker_id,
                in_use=f"{member.info.address}, pid {member.info.pid}",
                ignored=f"{info.address}, pid {info.pid}",
            )


def worker_joined(membership: Membership, info: WorkerInfo) -> None:
    """Add a worker that has registered. Raises LayoutMismatch if it does not fit."""
    membership.join(info)
    log.info("worker joined", worker=info.worker_id, role=info.role.value, address=info.address, pid=info.pid)


def apply_report(membership: Membership, info: WorkerInfo, message: worker_pb2.RegisterRequest) -> bool:
    """Apply a heartbeat or a snapshot of a worker that has joined. False if a snapshot is needed, because changes of
    its prefix cache were missed. Raises LayoutMismatch like Membership.heartbeat.
    """
    if message.HasField("snapshot"):
        snapshot = message.snapshot
        membership.replace_cache(info, snapshot.next_number, snapshot.block_hashes)
        return True
    heartbeat = message.heartbeat
    load, state = wire.load_from_proto(heartbeat.load), wire.state_from_proto(heartbeat.state)
    membership.heartbeat(info, load, state)
    events = [CacheEvent(event.block_hash, event.evicted) for event in heartbeat.cache_events.events]
    return membership.apply_cache_events(info, heartbeat.cache_events.first_number, events)


def worker_left(membership: Membership, info: WorkerInfo, state: WorkerState) -> None:
    """Note that a worker is gone: LOST, or as its last heartbeat says."""
    facts = {"worker": info.worker_id, "role": info.role.value}
    if state is WorkerState.LOST:
        membership.lose(info)
        log.warning("worker lost", **facts)
    else:
        membership.leave(info, state)
        log.info("worker left", state=state.value, **facts)


async def expire_forever(membership: Membership) -> None:
    """Mark silent workers LOST, until cancelled. Run it as a task.

    A router that was stopped itself (by a signal, or with its machine) has yet to read what came meanwhile. So then it
    waits for the workers anew, until it was not stopped: otherwise it would lose all of them at once, and replay all
    streams.
    """
    clock = asyncio.get_running_loop().time
    wait_s = HEARTBEAT_INTERVAL_S
    while True:
        began_s = clock()
        await asyncio.sleep(wait_s)
        if clock() - began_s > wait_s + SILENT_S / 2:
            wait_s = SILENT_S
        else:
            wait_s = HEARTBEAT_INTERVAL_S
            membership.expire(silent_s=SILENT_S, forget_s=FORGET_S)
