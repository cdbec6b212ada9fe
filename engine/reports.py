"""What a worker tells the mesh about its engine. Implements mesh.worker.agent.ReportSource."""

from engine.loop import EngineLoop
from engine.scheduler import Scheduler
from mesh.domain.worker import WorkerLoad
from mesh.worker.agent import Report, Snapshot


class EngineReports:
    """Asks the engine's thread; an answer may take as long as a step."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop

    async def report(self) -> Report:
        """Load and cache events since the last call."""
        return await self._loop.call(_report)

    async def load(self) -> WorkerLoad:
        """Load alone."""
        return await self._loop.call(Scheduler.load)

    async def snapshot(self) -> Snapshot:
        """Load and the whole cache."""
        return await self._loop.call(_snapshot)


def _report(scheduler: Scheduler) -> Report:
    first_event, events = scheduler.pool.log.take()
    return Report(scheduler.load(), first_event, events)


def _snapshot(scheduler: Scheduler) -> Snapshot:
    scheduler.pool.log.take()
    return Snapshot(scheduler.load(), scheduler.pool.log.next_number, scheduler.pool.cached_hashes)
