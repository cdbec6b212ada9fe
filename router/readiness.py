"""Health of the public port, and the one "ready" announcement, as workers come and go."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from mesh.domain.worker import WorkerRole
from mesh.rpc.server import Server
from router.mesh_view import MeshView

SERVICES = ("tandem.v1.Generation", "tandem.v1.Mesh")


@dataclass(frozen=True, slots=True)
class Expected:
    """Workers to wait for, proven, before the mesh counts as ready."""

    num_prefill: int
    num_decode: int


class Readiness:
    """SERVING while a complete path exists. `on_ready` is called once, when the expected workers are there."""

    def __init__(self, server: Server, mesh: MeshView, expected: Expected, on_ready: Callable[[], None]) -> None:
        self._server = server
        self._mesh = mesh
        self._expected = expected
        self._on_ready = on_ready
        self._changed = asyncio.Event()
        self._announced = False

    def wake(self) -> None:
        """Something in the mesh has changed."""
        self._changed.set()

    async def run(self) -> None:
        """Follow the mesh until cancelled."""
        shown: bool | None = None
        while True:
            serving = self._mesh.has_path
            if serving is not shown:
                await self._show(serving)
                shown = serving
            self._announce()
            await self._changed.wait()
            self._changed.clear()

    async def _show(self, serving: bool) -> None:
        for service in ("", *SERVICES):
            await self._server.set_serving(serving, service)

    def _announce(self) -> None:
        num_prefill, num_decode = self._expected.num_prefill, self._expected.num_decode
        is_ready = (
            self._mesh.num_healthy(WorkerRole.PREFILL) >= num_prefill
            and self._mesh.num_healthy(WorkerRole.DECODE, with_transfers=num_prefill > 0) >= num_decode
        )
        if is_ready and not self._announced:
            self._announced = True
            self._on_ready()
