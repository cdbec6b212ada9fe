"""The health of the public port over all models, and the one "ready" announcement.

Service names of grpc.health.v1: "" and the port's services tell whether requests are served; `prefill` and `decode`
tell whether any worker of that role gets requests.
"""

import asyncio
from collections.abc import Callable, Sequence

from mesh.domain.worker import WorkerRole
from mesh.rpc.server import Server
from router.workers.mesh_view import MeshView

SERVICES = ("tandem.v1.Generation", "tandem.v1.Mesh")
_ROUTER_NAMES = ("", *SERVICES)
_NAMES = (*_ROUTER_NAMES, *(role.value for role in WorkerRole))


class Readiness:
    """SERVING while any model can be served: a model without workers must not take the others from clients.

    If prefill workers are expected, the first SERVING waits for one of them. Later decode workers prefill themselves
    when no prefill worker is left, which is no reason to send clients away.

    `on_ready` is called once, when every model can be served and the expected numbers of proven workers, over all
    models together, are reached.
    """

    def __init__(
        self,
        server: Server,
        meshes: Sequence[MeshView],
        *,
        expect_prefill: int,
        expect_decode: int,
        on_ready: Callable[[], None],
    ) -> None:
        self._server = server
        self._meshes = meshes
        self._expect_prefill = expect_prefill
        self._expect_decode = expect_decode
        self._on_ready = on_ready
        self._changed = asyncio.Event()
        self._has_served = False
        self._announced = False
        self._reported: dict[str, bool] = {}

    def wake(self) -> None:
        """Update the health soon: the mesh has changed."""
        self._changed.set()

    async def run(self) -> None:
        """Follow the mesh until cancelled."""
        while True:
            self._report(self._health())
            self._announce()
            await self._changed.wait()
            self._changed.clear()

    def end(self) -> None:
        """Report NOT_SERVING for good. Call it after `run` has ended."""
        for name in _NAMES:
            self._server.set_serving(False, name)

    def _health(self) -> dict[str, bool]:
        """Return by service name whether it is serving now."""
        has = {role: self._num_serving(role) > 0 for role in WorkerRole}
        needs_prefill = self._expect_prefill > 0 and not self._has_served
        serving = has[WorkerRole.DECODE] and (has[WorkerRole.PREFILL] or not needs_prefill)
        self._has_served |= serving
        return dict.fromkeys(_ROUTER_NAMES, serving) | {role.value: has[role] for role in WorkerRole}

    def _report(self, health: dict[str, bool]) -> None:
        for name, serving in health.items():
            if self._reported.get(name) is not serving:
                self._server.set_serving(serving, name)
                self._reported[name] = serving

    def _announce(self) -> None:
        if not self._announced and self._is_complete():
            self._announced = True
            self._on_ready()

    def _is_complete(self) -> bool:
        num_decode = self._num_serving(WorkerRole.DECODE, with_transfers=self._expect_prefill > 0)
        return (
            self._num_serving(WorkerRole.PREFILL) >= self._expect_prefill
            and num_decode >= self._expect_decode
            and all(mesh.has_path for mesh in self._meshes if self._expect_decode)
        )

    def _num_serving(self, role: WorkerRole, *, with_transfers: bool = False) -> int:
        return sum(len(mesh.serving(role, with_transfers=with_transfers)) for mesh in self._meshes)
