"""Health of the public port, and the one "ready" announcement, as workers come and go.

Names of grpc.health.v1: "" and the port's services, for whether requests are served; `prefill` and `decode`, for
whether a worker of that role gets any.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mesh.domain.worker import WorkerRole
from mesh.rpc.server import Server
from router.mesh_view import MeshView

SERVICES = ("tandem.v1.Generation", "tandem.v1.Mesh")
_WHOLE = ("", *SERVICES)
_NAMES = (*_WHOLE, *(role.value for role in WorkerRole))


@dataclass(frozen=True, slots=True)
class Expected:
    """Workers of all models together to wait for, proven, before the mesh counts as ready."""

    num_prefill: int
    num_decode: int


class Readiness:
    """SERVING while any model has a complete path: one that is away must not take the others from clients.

    At first, where prefill workers are expected, one of them belongs to a complete path: those who wait for a start
    want all of it. Later decode workers prefill by themselves where none is left, and that is not to send clients away.

    `on_ready` is called once, when every model has a path and the expected workers are there.
    """

    def __init__(
        self, server: Server, meshes: Sequence[MeshView], expected: Expected, on_ready: Callable[[], None]
    ) -> None:
        self._server = server
        self._meshes = meshes
        self._expected = expected
        self._on_ready = on_ready
        self._changed = asyncio.Event()
        self._has_served = False
        self._announced = False
        self._shown: dict[str, bool] = {}

    def wake(self) -> None:
        """Something in the mesh has changed."""
        self._changed.set()

    async def run(self) -> None:
        """Follow the mesh until cancelled."""
        while True:
            await self._show(self._health())
            self._announce()
            await self._changed.wait()
            self._changed.clear()

    async def end(self) -> None:
        """NOT_SERVING, whatever the mesh is like. After `run`."""
        for name in _NAMES:
            await self._server.set_serving(False, name)

    def _health(self) -> dict[str, bool]:
        """What each name says now."""
        has = {role: self._num_healthy(role) > 0 for role in WorkerRole}
        needs_prefill = self._expected.num_prefill > 0 and not self._has_served
        serving = has[WorkerRole.DECODE] and (has[WorkerRole.PREFILL] or not needs_prefill)
        self._has_served |= serving
        return dict.fromkeys(_WHOLE, serving) | {role.value: has[role] for role in WorkerRole}

    async def _show(self, health: dict[str, bool]) -> None:
        for name, serving in health.items():
            if self._shown.get(name) is not serving:
                await self._server.set_serving(serving, name)
                self._shown[name] = serving

    def _announce(self) -> None:
        if not self._announced and self._is_complete():
            self._announced = True
            self._on_ready()

    def _is_complete(self) -> bool:
        expected = self._expected
        num_decode = self._num_healthy(WorkerRole.DECODE, with_transfers=expected.num_prefill > 0)
        return (
            self._num_healthy(WorkerRole.PREFILL) >= expected.num_prefill
            and num_decode >= expected.num_decode
            and all(mesh.has_path for mesh in self._meshes if expected.num_decode)
        )

    def _num_healthy(self, role: WorkerRole, *, with_transfers: bool = False) -> int:
        return sum(mesh.num_healthy(role, with_transfers=with_transfers) for mesh in self._meshes)
