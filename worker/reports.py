"""Reports of the engine's load and prefix cache: implements worker.agent.ReportSource."""

from engine.loop import EngineLoop
from engine.scheduler import Scheduler
from mesh.domain.worker import WorkerLoad
from worker.agent import Report, Snapshot


class EngineReports:
    """Runs each report on the engine's thread, so a call may take as long as an engine step."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop

    async def report(self) -> Report:
        return await self._loop.call(_report)

    async def load(self) -> WorkerLoad:
        return await self._loop.call(Scheduler.load)

    async def snapshot(self) -> Snapshot:
        return await self._loop.call(_snapshot)


def _report(scheduler: Scheduler) -> Report:
    first_event, events = scheduler.pool.log.take()
    return Report(scheduler.load(), first_event, events)


def _snapshot(scheduler: Scheduler) -> Snapshot:
    scheduler.pool.log.take()
    return Snapshot(scheduler.load(), scheduler.pool.log.next_number, scheduler.pool.cached_hashes)
