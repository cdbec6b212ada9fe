"""The worker's side of the registry: says who it is, beats, and comes back after every break.

A beat never waits for the engine: while a long step runs, the last known load is sent again, so a busy worker is never
mistaken for a dead one.
"""

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import Protocol

import grpc
import structlog

from mesh import wire
from mesh.domain.errors import InvalidRequest, LayoutMismatch, MeshError, Unauthenticated
from mesh.domain.worker import CacheEvent, WorkerInfo, WorkerLoad, WorkerState
from mesh.rpc.channel import open_channel
from mesh.rpc.credentials import Credentials
from mesh.rpc.status import error_from_rpc
from tandem.v1 import worker_pb2, worker_pb2_grpc

log = structlog.get_logger(__name__)

_REPORT_WAIT_S = 0.1
_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 2.0


@dataclass(frozen=True, slots=True)
class Report:
    """A worker's load, and what has changed in its prefix cache since the last report."""

    load: WorkerLoad = field(default_factory=WorkerLoad)
    first_event: int = 0
    events: list[CacheEvent] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A worker's load and all of its prefix cache; the next report's events follow on `next_event`."""

    load: WorkerLoad
    next_event: int
    block_hashes: list[bytes]


class ReportSource(Protocol):
    """What the agent reports. Plug point: EngineReports. Each call may take as long as an engine step."""

    async def report(self) -> Report:
        """Load and cache events since the last report or snapshot."""
        ...

    async def load(self) -> WorkerLoad:
        """Load alone; leaves the cache events for the next report."""
        ...

    async def snapshot(self) -> Snapshot:
        """Load and the whole cache; events up to now are contained in it."""
        ...


class BeatSink(Protocol):
    """Where beats go. Plug point: a stream to a router, or Redis."""

    async def write(self, request: worker_pb2.RegisterRequest) -> None:
        """Send one heartbeat or snapshot."""
        ...


class RegistryAgent:
    """Keeps one worker registered with one router. `state` is what the next beat says."""

    def __init__(self, info: WorkerInfo, source: ReportSource, credentials: Credentials) -> None:
        self.state = WorkerState.READY
        self.info = info
        self._source = source
        self._credentials = credentials
        self._last = Report()
        self._pending: asyncio.Task[Report | Snapshot] | None = None
        self._snapshot_wanted = False
        self._wake = asyncio.Event()

    @property
    def last_load(self) -> WorkerLoad:
        """What the last beat said."""
        return self._last.load

    def beat_now(self) -> None:
        """Send the next beat without waiting for its time: something routers should know has changed."""
        self._wake.set()

    def ask_snapshot(self) -> None:
        """Send all of the prefix cache with the next beat: a router has lost track."""
        self._snapshot_wanted = True
        self._wake.set()

    async def run(self, registry_address: str) -> None:
        """Stay registered until cancelled. Raises LayoutMismatch or Unauthenticated if the mesh refuses this worker."""
        backoff_s = _FIRST_BACKOFF_S
        clock = asyncio.get_running_loop().time
        while True:
            begun_s = clock()
            try:
                async with open_channel(registry_address, self._credentials.tls) as channel:
                    await self._stay_registered(channel)
            except grpc.aio.AioRpcError as rpc_error:
                error = error_from_rpc(rpc_error)
                if _is_final(error):
                    raise error from None
                log.warning("registry lost", address=registry_address, error=str(error), retry_in_s=backoff_s)
            except asyncio.CancelledError:
                # grpc.aio also raises this when the router ends the call; only our own task's cancellation is ours.
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
            if clock() - begun_s > _MAX_BACKOFF_S:  # not after each break: it may break at once, again and again
                backoff_s = _FIRST_BACKOFF_S
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    async def _stay_registered(self, channel: grpc.aio.Channel) -> None:
        """One stream's life."""
        stub = worker_pb2_grpc.RegistryStub(channel)
        call = stub.Register(metadata=self._credentials.metadata())
        await call.write(worker_pb2.RegisterRequest(record=wire.worker_to_proto(self.info)))
        first = await call.read()
        if first is grpc.aio.EOF:
            return
        log.info("registered", worker=self.info.worker_id)
        interval_s = wire.duration_from_proto(first.registered.heartbeat_interval)
        beats = asyncio.create_task(self.beat(call, interval_s))
        beats.add_done_callback(lambda _: call.cancel())  # without beats the registration is worth nothing
        try:
            while (message := await call.read()) is not grpc.aio.EOF:
                if message.HasField("snapshot_request"):
                    self.ask_snapshot()
        finally:
            beats.cancel()
            call.cancel()
            [ended] = await asyncio.gather(beats, return_exceptions=True)
            if isinstance(ended, Exception) and not isinstance(ended, grpc.aio.AioRpcError):
                log.error("heartbeats failed", exc_info=ended)

    async def beat(self, sink: BeatSink, interval_s: float) -> None:
        """Send beats until cancelled, or until `sink` fails."""
        while True:
            for request in await self._requests():
                await sink.write(request)
            self._wake.clear()
            # Not wait_for: when woken and cancelled at once, it would forget the cancellation.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await self._wake.wait()

    async def _requests(self) -> list[worker_pb2.RegisterRequest]:
        """What the next beat says: a snapshot if one is due, and always a heartbeat."""
        news = await self._news()
        if isinstance(news, Snapshot):
            self._last = Report(news.load, news.next_event)
            snapshot = worker_pb2.CacheSnapshot(next_number=news.next_event, block_hashes=news.block_hashes)
            return [worker_pb2.RegisterRequest(snapshot=snapshot), self._heartbeat()]
        if news is None:  # nothing new is known: repeat the load, with no events
            news = Report(self._last.load, self._last.first_event + len(self._last.events))
        self._last = news
        return [self._heartbeat()]

    async def _news(self) -> Report | Snapshot | None:
        """What the source says, or None if it takes longer than a beat can wait."""
        pending = self._pending
        if pending is None:
            pending = self._pending = asyncio.create_task(self._ask())
        await asyncio.wait([pending], timeout=_REPORT_WAIT_S)
        if not pending.done():
            return None
        self._pending = None
        return pending.result()

    async def _ask(self) -> Report | Snapshot:
        if self._snapshot_wanted:
            self._snapshot_wanted = False
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
    """True if trying again cannot help: the operator has to change something."""
    return isinstance(error, LayoutMismatch | Unauthenticated | InvalidRequest)
