"""Runs canaries when they are due, for as long as the router runs.

mesh changed, or a canary is due ─▶ start what is due ─▶ passed: requests may come    failed: again after a backoff
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import structlog

from mesh.domain.errors import MeshError
from router.mesh_view import MeshView
from router.placement import Placement
from router.proving import Canary, Proof, Proving

log = structlog.get_logger(__name__)

RunCanary = Callable[[Placement], Awaitable[None]]
"""Runs one, and raises if it does not go through."""


class Prover:
    """One for a router. `on_change` is called when a worker has been proven."""

    def __init__(self, proving: Proving, mesh: MeshView, run_canary: RunCanary, on_change: Callable[[], None]) -> None:
        self._proving = proving
        self._mesh = mesh
        self._run_canary = run_canary
        self._on_change = on_change
        self._changed = asyncio.Event()
        self._canaries: set[asyncio.Task[None]] = set()

    def wake(self) -> None:
        """Something in the mesh has changed."""
        self._changed.set()

    async def run(self) -> None:
        """Follow the mesh until cancelled."""
        try:
            while True:
                self._changed.clear()
                self._proving.follow(self._mesh.workers())
                usable = self._mesh.usable()
                for canary in self._proving.start_due(usable):
                    task = asyncio.create_task(self._try(canary))
                    self._canaries.add(task)
                    task.add_done_callback(self._canaries.discard)
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._proving.next_due_s(usable)):
                        await self._changed.wait()
        finally:
            for task in self._canaries:
                task.cancel()
            await asyncio.gather(*self._canaries, return_exceptions=True)

    async def _try(self, canary: Canary) -> None:
        begun_s = asyncio.get_running_loop().time()
        prefill = canary.placement.prefill
        names = {
            "worker": canary.subject.worker_id,
            "prefill": None if prefill is None else prefill.worker_id,
            "decode": canary.placement.decode.worker_id,
        }
        try:
            await self._run_canary(canary.placement)
        except asyncio.CancelledError:
            self._proving.failed(canary)
            raise
        except Exception as error:
            self._proving.failed(canary)
            unforeseen = None if isinstance(error, MeshError) else error
            log.warning("canary failed", **names, error=str(error), exc_info=unforeseen)
            self.wake()
            return
        self._proving.passed(canary)
        proof = Proof.LOCAL if prefill is None else Proof.FULL
        duration_ms = round(1000 * (asyncio.get_running_loop().time() - begun_s), 2)
        log.info("worker proven", **names, proof=proof.name, duration_ms=duration_ms)
        self._on_change()
