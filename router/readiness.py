"""Health of the public port, and the one "ready" announcement, as workers come and go."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mesh.domain.worker import WorkerRole
from mesh.rpc.server import Server
from router.mesh_view import MeshView

SERVICES = ("tandem.v1.Generation", "tandem.v1.Mesh")


@dataclass(frozen=True, slots=True)
class Expected:
    """Workers of all models together to wait for, proven, before the mesh counts as ready."""

    num_prefill: int
    num_decode: int


class Readiness:
    """SERVING while any model has a complete path: one that is away must not take the others from clients.

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
        self._announced = False

    def wake(self) -> None:
        """Something in the mesh has changed."""
        self._changed.set()

    async def run(self) -> None:
        """Follow the mesh until cancelled."""
        shown: bool | None = None
        while True:
            serving = any(mesh.has_path for mesh in self._meshes)
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
        if not self._announced and self._is_complete():
            self._announced = True
            self._on_ready()

    def _is_complete(self) -> bool:
        expected, meshes = self._expected, self._meshes
        num_prefill = sum(mesh.num_healthy(WorkerRole.PREFILL) for mesh in meshes)
        with_transfers = expected.num_prefill > 0
        num_decode = sum(mesh.num_healthy(WorkerRole.DECODE, with_transfers=with_transfers) for mesh in meshes)
        return (
            num_prefill >= expected.num_prefill
            and num_decode >= expected.num_decode
            and all(mesh.has_path for mesh in meshes if expected.num_decode)
        )
