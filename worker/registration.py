"""The worker's side of the registry: registers, sends heartbeats, and reconnects after every failure.

A heartbeat never waits for the engine: during a long step the last known load is sent again, so a busy worker never
looks dead.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc
import structlog

from mesh import wire
from mesh.domain.errors import InvalidRequest, LayoutMismatch, MeshError, Unauthenticated
from mesh.domain.worker import CacheEvent, WorkerInfo, WorkerLoad, WorkerState
from mesh.durations import duration_from_proto
from mesh.rpc.channel import open_channel
from mesh.rpc.credentials import Credentials
from mesh.rpc.status import FirstStatus, error_from_rpc
from mesh.tasks import Backoff, is_cancelled, mark_retrieved, set_within
from mesh.v1 import worker_pb2, worker_pb2_grpc

log = structlog.get_logger(__name__)

MAX_SNAPSHOT_BLOCKS = 1 << 16
MAX_EVENTS = 1 << 14
"""Limits on the prefix cache entries of one message: a message that is too large would end the registration."""

_REPORT_WAIT_S = 0.1
_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 2.5
_JITTER = 0.2  # a router that is lost lets go of all its workers at once


@dataclass(frozen=True, slots=True)
class Report:
    """A worker's load and the changes of its prefix cache since the last report."""

    load: WorkerLoad = field(default_factory=WorkerLoad)
    first_event: int = 0
    events: list[CacheEvent] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class CacheSnapshot:
    """A worker's load and the whole content of its prefix cache. The next report's events start at `next_event`."""

    load: WorkerLoad
    next_event: int
    block_hashes: list[bytes]


class ReportSource(Protocol):
    """The source of load and cache reports. Plug point: RoleServer. Calls may take as long as an engine step."""

    async def report(self) -> Report:
        """Return the load, and the cache events since the last report or snapshot."""
        ...

    async def load(self) -> WorkerLoad:
        """Return the load only; the cache events stay for the next report."""
        ...

    async def snapshot(self) -> CacheSnapshot:
        """Return the load and the whole cache, which includes all events so far."""
        ...


class Registration:
    """Makes one worker's heartbeats. `run` sends them to one router; RedisRegistration sends them to Redis.

    Heartbeats report `state`, which the owner may change. One that says that the worker is gone is the last.
    """

    def __init__(self, info: WorkerInfo, source: ReportSource, credentials: Credentials) -> None:
        self.state = WorkerState.READY
        self.info = info
        self.is_heard = False
        """True while heartbeats are being sent, so that a last one says farewell."""
        self._source = source
        self._credentials = credentials
        self._last = Report()
        self._pending: asyncio.Task[Report | CacheSnapshot] | None = None
        self._is_snapshot_requested = False
        self._wake = asyncio.Event()

    @property
    def last_load(self) -> WorkerLoad:
        """The load in the last heartbeat."""
        return self._last.load

    def heartbeat_now(self) -> None:
        """Send the next heartbeat at once, because `state` has changed."""
        self._wake.set()

    def ask_snapshot(self) -> None:
        """Send a snapshot with the next heartbeat, because a router has missed cache events."""
        self._is_snapshot_requested = True
        self._wake.set()

    async def run(self, registry_address: str) -> None:
        """Stay registered until a last heartbeat, or until cancelled. Raises LayoutMismatch or Unauthenticated if the
        mesh refuses this worker.
        """
        backoff = Backoff(_FIRST_BACKOFF_S, _MAX_BACKOFF_S, jitter=_JITTER)
        clock = asyncio.get_running_loop().time
        while not self.state.is_gone:
            begun_s = clock()
            error: MeshError | None = None
            try:
                async with open_channel(registry_address, self._credentials.tls) as channel:
                    await self._stay_registered(channel)
            except grpc.aio.AioRpcError as rpc_error:
                error = error_from_rpc(rpc_error)
                if _is_final(error):
                    raise error from None
            except asyncio.CancelledError:
                if is_cancelled():  # otherwise the router has ended the call
                    raise
            delay_s = backoff.next_s(clock() - begun_s)
            if error is not None:
                log.warning("registry lost", address=registry_address, error=str(error), retry_in_s=delay_s)
            await self._pause(delay_s)

    async def _pause(self, delay_s: float) -> None:
        """Wait, but not once there is nobody to say farewell to."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                while not self.state.is_gone:
                    self._wake.clear()
                    await self._wake.wait()

    async def _stay_registered(self, channel: grpc.aio.Channel) -> None:
        """Register and send heartbeats until the stream ends, after the last heartbeat or by a failure."""
        stub = worker_pb2_grpc.RegistryStub(channel)
        call = stub.Register(metadata=self._credentials.metadata())
        status = FirstStatus(call)
        try:
            await call.write(worker_pb2.RegisterRequest(record=wire.worker_to_proto(self.info)))
            first = await call.read()
        except (asyncio.InvalidStateError, grpc.aio.AioRpcError):  # the router has refused, perhaps before the write
            raise await status.wait() from None
        if first is grpc.aio.EOF:
            return
        log.info("registered", worker=self.info.worker_id)
        interval_s = duration_from_proto(first.registered.heartbeat_interval)
        heartbeats = asyncio.create_task(self._beat(call, interval_s))
        try:
            while (message := await call.read()) is not grpc.aio.EOF:
                if message.HasField("snapshot_request"):
                    self.ask_snapshot()
        except grpc.aio.AioRpcError:  # perhaps that of a heartbeat that met the end of the call
            raise await status.wait() from None
        finally:
            heartbeats.cancel()
            call.cancel()
            [ended] = await asyncio.gather(heartbeats, return_exceptions=True)
            if isinstance(ended, Exception) and not isinstance(ended, grpc.aio.AioRpcError):
                log.error("heartbeats failed", exc_info=ended)

    async def _beat(self, call: Any, interval_s: float) -> None:
        """Send heartbeats, and end the call: at once, unless the last one has said farewell."""
        try:
            await self.send_heartbeats(call.write, interval_s)
        except BaseException:
            call.cancel()  # a registration without heartbeats is useless
            raise
        await call.done_writing()

    async def send_heartbeats(
        self, write: Callable[[worker_pb2.RegisterRequest], Awaitable[None]], interval_s: float
    ) -> None:
        """`write` heartbeats and snapshots until the last heartbeat, until cancelled, or until a write fails."""
        self.is_heard, is_last = True, False
        try:
            while not is_last:
                self._wake.clear()  # first: what changes during the writes needs another heartbeat
                requests = await self._requests()
                is_last = self.state.is_gone  # what the requests say, because nothing has been awaited since
                for request in requests:
                    await write(request)
                if not is_last:
                    await set_within(self._wake, interval_s)
        finally:
            self.is_heard = False

    async def _requests(self) -> list[worker_pb2.RegisterRequest]:
        """Return the next messages: a snapshot if a router has requested one, then a heartbeat."""
        report = await self._next_report()
        if isinstance(report, CacheSnapshot):
            self._last = Report(report.load, report.next_event)
            # Routers treat omitted blocks as not cached.
            hashes = report.block_hashes[-MAX_SNAPSHOT_BLOCKS:]
            snapshot = worker_pb2.CacheSnapshot(next_number=report.next_event, block_hashes=hashes)
            return [worker_pb2.RegisterRequest(snapshot=snapshot), self._heartbeat()]
        if report is None:  # repeat the last load, without events
            report = Report(self._last.load, self._last.first_event + len(self._last.events))
        if len(report.events) > MAX_EVENTS:  # omit them: the router sees a gap and requests a snapshot
            report = Report(report.load, report.first_event + len(report.events))
        self._last = report
        return [self._heartbeat()]

    async def _next_report(self) -> Report | CacheSnapshot | None:
        """Return the source's report, or None if it does not come within _REPORT_WAIT_S."""
        pending = self._pending
        if pending is None:
            pending = self._pending = asyncio.create_task(self._request_report())
            pending.add_done_callback(mark_retrieved)  # nobody may wait any more when the engine stops
        await asyncio.wait([pending], timeout=_REPORT_WAIT_S)
        if not pending.done():
            return None
        self._pending = None
        return pending.result()

    async def _request_report(self) -> Report | CacheSnapshot:
        if self._is_snapshot_requested:
            self._is_snapshot_requested = False
            return await self._source.snapshot()
        return await self._source.report()

    def _heartbeat(self) -> worker_pb2.RegisterRequest:
        events = worker_pb2.CacheEvents(
            first_number=self._last.first_event,
            events=[worker_pb2.CacheEvent(block_hash=e.block_hash, evicted=e.evicted) for e in self._last.events],
        )
        heartbeat = worker_pb2.Heartbeat(
            load=wire.load_to_proto(self._last.load), cache_events=events, state=wire.state_to_proto(self.state)
        )
        return worker_pb2.RegisterRequest(heartbeat=heartbeat)


def _is_final(error: MeshError) -> bool:
    """Return True if a retry cannot help, because the operator must change something."""
    return isinstance(error, LayoutMismatch | Unauthenticated | InvalidRequest)
