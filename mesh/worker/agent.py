"""The worker's side of the registry: says who it is, beats, and comes back after every break.

A beat never waits for the engine: while a long step runs, the last known load is sent again, so a busy worker is never
mistaken for a dead one.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Protocol

import grpc
import structlog

from mesh import wire
from mesh.domain.errors import InvalidRequest, LayoutMismatch, MeshError, Unauthenticated
from mesh.domain.worker import CacheEvent, WorkerInfo, WorkerLoad, WorkerState
from mesh.rpc.channel import open_channel
from mesh.rpc.credentials import MeshKey
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


class ReportSource(Protocol):
    """What the agent reports. Plug point: EngineHost."""

    async def report(self) -> Report:
        """Load and cache events since the last call; may take as long as an engine step."""
        ...

    async def load(self) -> WorkerLoad:
        """Load alone; leaves the cache events for the next report."""
        ...

    async def snapshot(self) -> tuple[int, list[bytes]]:
        """Number of the next event, and the hashes of all cached blocks."""
        ...


class RegistryAgent:
    """Keeps one worker registered with one router. `state` is what the next beat says."""

    def __init__(self, info: WorkerInfo, source: ReportSource, mesh_key: MeshKey | None) -> None:
        self.state = WorkerState.READY
        self._info = info
        self._source = source
        self._metadata = mesh_key.metadata() if mesh_key else ()
        self._last = Report()
        self._pending: asyncio.Task[Report] | None = None
        self._snapshot_wanted = False
        self._wake = asyncio.Event()

    def beat_now(self) -> None:
        """Send the next beat without waiting for its time: something routers should know has changed."""
        self._wake.set()

    async def run(self, registry_address: str) -> None:
        """Stay registered until cancelled. Raises LayoutMismatch or Unauthenticated if the mesh refuses this worker."""
        backoff_s = _FIRST_BACKOFF_S
        while True:
            try:
                async with open_channel(registry_address) as channel:
                    async for _ in self._stay_registered(channel):
                        backoff_s = _FIRST_BACKOFF_S
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
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    async def _stay_registered(self, channel: grpc.aio.Channel) -> AsyncIterator[None]:
        """One stream's life; yields at each message from the router."""
        stub = worker_pb2_grpc.RegistryStub(channel)
        call = stub.Register(metadata=self._metadata)
        await call.write(worker_pb2.RegisterRequest(record=wire.worker_to_proto(self._info)))
        first = await call.read()
        if first is grpc.aio.EOF:
            return
        log.info("registered", worker=self._info.worker_id)
        interval_s = wire.duration_from_proto(first.registered.heartbeat_interval)
        beats = asyncio.create_task(self._beat(call, interval_s))
        try:
            yield
            while (message := await call.read()) is not grpc.aio.EOF:
                self._snapshot_wanted |= message.HasField("snapshot_request")
                self._wake.set()
                yield
        finally:
            beats.cancel()
            call.cancel()

    async def _beat(self, call: grpc.aio.StreamStreamCall, interval_s: float) -> None:
        while True:
            if self._snapshot_wanted:
                self._snapshot_wanted = False
                next_number, hashes = await self._source.snapshot()
                snapshot = worker_pb2.CacheSnapshot(next_number=next_number, block_hashes=hashes)
                await call.write(worker_pb2.RegisterRequest(snapshot=snapshot))
            await call.write(worker_pb2.RegisterRequest(heartbeat=await self._heartbeat()))
            self._wake.clear()
            try:
                await asyncio.wait_for(self._wake.wait(), interval_s)
            except TimeoutError:
                continue

    async def _heartbeat(self) -> worker_pb2.Heartbeat:
        if self._pending is None:
            self._pending = asyncio.create_task(self._source.report())
        await asyncio.wait([self._pending], timeout=_REPORT_WAIT_S)
        if self._pending.done():
            self._last, self._pending = self._pending.result(), None
        else:  # nothing new is known: repeat the load, with no events
            self._last = Report(self._last.load, self._last.first_event + len(self._last.events))
        events = worker_pb2.CacheEvents(
            first_number=self._last.first_event,
            events=[worker_pb2.CacheEvent(block_hash=e.block_hash, evicted=e.evicted) for e in self._last.events],
        )
        return worker_pb2.Heartbeat(
            load=wire.load_to_proto(self._last.load), cache_events=events, state=wire.state_to_proto(self.state)
        )


def _is_final(error: MeshError) -> bool:
    """True if trying again cannot help: the operator has to change something."""
    return isinstance(error, LayoutMismatch | Unauthenticated | InvalidRequest)
