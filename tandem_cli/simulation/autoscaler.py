"""Scales a simulated mesh: by the rules of scaling.py, or by the router's own advice. Starts workers, and drains those
that must leave."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from mesh.domain.worker import WorkerRole
from mesh.tasks import cancel_all, spawn
from router.advice import Action
from tandem_cli.simulation.mesh import SimulatedMesh
from tandem_cli.simulation.observed import Observed
from tandem_cli.simulation.scaling_rules import PERIOD_S, Replicas, ScaleLimits, Triggers
from tandem_cli.simulation.workers import ModelledWorker

Count = dict[WorkerRole, int]


class Rule(Protocol):
    """Says how many workers of each role there should be. Plug point: ByTriggers, ByAdvice."""

    def decide(self, at_s: float, present: Count) -> Count:
        """Return the new numbers; `present` are those that serve or start. Called every 15 s."""
        ...


class ByTriggers:
    """The rules of deploy/kubernetes."""

    def __init__(self, mesh: SimulatedMesh, limits: ScaleLimits) -> None:
        self._mesh = mesh
        self._triggers = Triggers()
        self._replicas = {role: Replicas(limits, len(mesh.of_role(role))) for role in WorkerRole}

    def decide(self, at_s: float, present: Count) -> Count:
        target_counts = self._triggers.wanted(self._mesh.sample(at_s))
        return {role: replicas.decide(at_s, target_counts[role]) for role, replicas in self._replicas.items()}


class ByAdvice:
    """Follows the router: one worker more or less of a role at a time, once the last one serves or has left."""

    def __init__(self, mesh: SimulatedMesh, limits: ScaleLimits) -> None:
        self._mesh = mesh
        self._limits = limits

    def decide(self, at_s: float, present: Count) -> Count:
        target_counts = dict(present)
        for advice in self._mesh.router.adviser.advice:
            if len(self._mesh.router.mesh.serving(advice.role)) == present[advice.role]:
                target_counts[advice.role] += 1 if advice.action is Action.ADD else -1
        limits = self._limits
        return {role: min(max(count, limits.min_workers), limits.max_workers) for role, count in target_counts.items()}


RULES: dict[str, Callable[[SimulatedMesh, ScaleLimits], Rule]] = {"kubernetes": ByTriggers, "advice": ByAdvice}


class Autoscaler:
    """Scales one mesh. Workers that start, serve or drain are paid for: `observed` gets their seconds."""

    def __init__(self, mesh: SimulatedMesh, observed: Observed, limits: ScaleLimits, rule: Rule) -> None:
        self._mesh = mesh
        self._observed = observed
        self._limits = limits
        self._rule = rule
        self._starting: dict[WorkerRole, list[asyncio.Task[None]]] = {role: [] for role in WorkerRole}
        self._ending: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Decide every 15 s until cancelled."""
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        try:
            while True:
                at_s = loop.time() - started_s
                present = {role: len(self._serving(role)) + len(self._starting[role]) for role in WorkerRole}
                for role, count in self._rule.decide(at_s, present).items():
                    self._set(role, count)
                    num_paid = len(self._mesh.of_role(role)) + len(self._starting[role])
                    self._observed.paid_worker_s[role] += PERIOD_S * num_paid
                await asyncio.sleep(PERIOD_S)
        finally:
            await cancel_all([*self._ending, *self._starting[WorkerRole.PREFILL], *self._starting[WorkerRole.DECODE]])

    def _set(self, role: WorkerRole, count: int) -> None:
        """Start workers, or end some: those that still start, then those with the highest numbers."""
        serving = self._serving(role)
        starting = self._starting[role]
        for _ in range(count - len(serving) - len(starting)):
            starting.append(asyncio.create_task(self._start(role)))
        for _ in range(min(len(starting), len(serving) + len(starting) - count)):
            starting.pop().cancel()
        for worker in serving[count:]:
            spawn(self._ending, self._mesh.retire(worker, self._limits.drain_s))

    def _serving(self, role: WorkerRole) -> list[ModelledWorker]:
        return [worker for worker in self._mesh.of_role(role) if not worker.is_draining]

    async def _start(self, role: WorkerRole) -> None:
        await asyncio.sleep(self._limits.start_s)
        self._starting[role].pop(0)  # they all take equally long
        self._mesh.add(role)


def scaling(limits: ScaleLimits, rule: str = "kubernetes") -> Callable[[SimulatedMesh, Observed], asyncio.Task[None]]:
    """Return the watch with which `simulate` scales its mesh within these limits, by one of RULES."""
    return lambda mesh, observed: asyncio.create_task(
        Autoscaler(mesh, observed, limits, RULES[rule](mesh, limits)).run()
    )
