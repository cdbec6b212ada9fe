"""Roles that change in a simulated mesh, by the router's own rule (router/role_switching.py)."""

import asyncio

from mesh.domain.worker import WorkerRole
from router.role_switching import RoleSwitcher, SwitchLimits
from router.settings import RouterSettings
from tandem_cli.simulation.mesh import SimulatedMesh
from tandem_cli.simulation.observed import Observed
from tandem_cli.simulation.run import Watch

_PERIOD_S = 15.0


def switching(settings: RouterSettings, drain_s: float) -> Watch:
    """Return the watch with which `simulate` lets workers change their roles, which drain for up to `drain_s`."""
    return lambda mesh, observed: asyncio.create_task(_run(mesh, observed, settings, drain_s))


async def _run(mesh: SimulatedMesh, observed: Observed, settings: RouterSettings, drain_s: float) -> None:
    async def may_act(_: float) -> bool:
        return True

    async def switch(worker_id: str, role: WorkerRole) -> None:
        changes.create_task(mesh.switch(worker_id, role, drain_s))

    limits = SwitchLimits(settings.switch_after_s, settings.switch_pause_s)
    rule = RoleSwitcher(mesh.router.mesh, mesh.router.adviser, limits, may_act=may_act, switch=switch)
    async with asyncio.TaskGroup() as changes:
        changes.create_task(rule.run())
        changes.create_task(_pay(mesh, observed))


async def _pay(mesh: SimulatedMesh, observed: Observed) -> None:
    while True:
        for role in WorkerRole:
            observed.paid_worker_s[role] += _PERIOD_S * len(mesh.of_role(role))
        await asyncio.sleep(_PERIOD_S)
