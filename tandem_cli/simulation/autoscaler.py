"""Scales a simulated mesh by the rules of scaling.py: starts workers, and drains those that must leave."""

import asyncio
from collections.abc import Callable

from mesh.domain.worker import WorkerRole
from tandem_cli.simulation.mesh import SimulatedMesh
from tandem_cli.simulation.observed import Observed
from tandem_cli.simulation.scaling import PERIOD_S, Replicas, ScaleLimits, Triggers


class Autoscaler:
    """Scales one mesh. Workers that start, serve or drain are paid for: `observed` gets their seconds."""

    def __init__(self, mesh: SimulatedMesh, observed: Observed, limits: ScaleLimits) -> None:
        self._mesh = mesh
        self._observed = observed
        self._limits = limits
        self._triggers = Triggers()
        self._replicas = {role: Replicas(limits, len(mesh.of_role(role))) for role in WorkerRole}
        self._starting: dict[WorkerRole, list[asyncio.Task[None]]] = {role: [] for role in WorkerRole}
        self._ending: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Decide each 15 s until cancelled."""
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        try:
            while True:
                at_s = loop.time() - started_s
                wanted = self._triggers.wanted(self._mesh.sample(at_s))
                for role, replicas in self._replicas.items():
                    self._set(role, replicas.decide(at_s, wanted[role]))
                    num_paid = len(self._mesh.of_role(role)) + len(self._starting[role])
                    self._observed.paid_worker_s[role] += PERIOD_S * num_paid
                await asyncio.sleep(PERIOD_S)
        finally:
            tasks = {*self._ending, *self._starting[WorkerRole.PREFILL], *self._starting[WorkerRole.DECODE]}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _set(self, role: WorkerRole, count: int) -> None:
        """Start workers, or end some: those that still start, then those with the highest numbers."""
        serving = [worker for worker in self._mesh.of_role(role) if not worker.is_draining]
        starting = self._starting[role]
        for _ in range(count - len(serving) - len(starting)):
            starting.append(asyncio.create_task(self._start(role)))
        for _ in range(min(len(starting), len(serving) + len(starting) - count)):
            starting.pop().cancel()
        for worker in serving[count:]:
            ending = asyncio.create_task(self._mesh.retire(worker, self._limits.drain_s))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

    async def _start(self, role: WorkerRole) -> None:
        await asyncio.sleep(self._limits.start_s)
        self._starting[role].pop(0)  # they all take equally long
        self._mesh.add(role)


def scaling(limits: ScaleLimits) -> Callable[[SimulatedMesh, Observed], asyncio.Task[None]]:
    """Return the watch with which `simulate` scales its mesh within these limits."""
    return lambda mesh, observed: asyncio.create_task(Autoscaler(mesh, observed, limits).run())
