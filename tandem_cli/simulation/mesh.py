"""The simulated mesh: one router, all of whose code for a model is the real one, and modelled workers.

Two things of the router are not there: its ports, and the connections to workers. Requests go to its GenerationService,
and `ModelledLinks` and `ModelledPrefills` are in place of DecodeLinks and PrefillClient. Workers join its Membership
without heartbeats, which would cost most of the time: without them the router counts the blocks that it has given out,
which is what heartbeats would tell. Canaries prove each worker before it gets requests.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from mesh.domain.errors import WorkerLost
from mesh.domain.prefill import KVDestination, PrefillEvent
from mesh.domain.request import SequenceSpec
from mesh.domain.tokens import SampledToken
from mesh.domain.worker import WorkerInfo, WorkerRole, WorkerState
from mesh.tasks import cancel_all
from router.admission.limiter import LocalLimiter
from router.journal import Journal
from router.model_router import ModelRouter
from router.settings import RouterSettings
from router.workers.membership import Membership, WorkerView
from tandem_cli.model_files.model_folders import BUNDLED, write_without_weights
from tandem_cli.simulation.observed import RoleSample, Sample
from tandem_cli.simulation.profile import MeshProfile
from tandem_cli.simulation.workers import ModelledDecode, ModelledPrefill, ModelledWorker, Neighbours, worker_info

_POLL_S = 0.5
_SWITCH_S = 0.5  # from the end of the drain until a worker has registered in its other role


@dataclass(slots=True)
class _Totals:
    """The work of the workers of a role that have left."""

    busy_s: float = 0.0
    prompt_tokens: int = 0


class ModelledLinks:
    """The router's links to modelled decode workers, by incarnation."""

    def __init__(self) -> None:
        self.workers: dict[str, ModelledDecode] = {}

    def find(self, info: WorkerInfo) -> ModelledDecode | None:
        return self.workers.get(info.incarnation)

    def unreachable(self, views: Iterable[WorkerView]) -> frozenset[str]:
        return frozenset(
            view.info.incarnation
            for view in views
            if view.info.role is WorkerRole.DECODE and view.info.incarnation not in self.workers
        )


class ModelledPrefills:
    """The router's calls to modelled prefill workers, by incarnation."""

    def __init__(self, links: ModelledLinks) -> None:
        self.workers: dict[str, ModelledPrefill] = {}
        self._links = links

    def run(
        self, worker: WorkerInfo, spec: SequenceSpec, destination: KVDestination
    ) -> AsyncGenerator[PrefillEvent, None]:
        prefill, decode = self.workers.get(worker.incarnation), self._links.workers.get(destination.incarnation)
        if prefill is None or decode is None:
            raise WorkerLost("the worker is lost")
        return prefill.run(spec, decode)


class SimulatedMesh:
    """A router and its workers, on the running event loop. Use `simulated_mesh`."""

    def __init__(self, profile: MeshProfile, settings: RouterSettings) -> None:
        clock = asyncio.get_running_loop().time
        self.profile = profile
        self.settings = settings
        self._table = Membership(clock)
        self._links = ModelledLinks()
        self._prefills = ModelledPrefills(self._links)
        self.journal = Journal(clock)
        self.router = ModelRouter(
            settings,
            LocalLimiter(settings.max_concurrent_requests),
            membership=self._table,
            links=self._links,
            prefill_client=self._prefills,
            journal=self.journal,
            on_change=self._changed,
            on_gap=lambda _: None,
        )
        # A special token has no text, which saves the time of decoding it.
        self._token = SampledToken(min(self.router.model.tokenizer.special_ids), -1.0)
        self._left = {role: _Totals() for role in WorkerRole}
        self._neighbours = Neighbours()
        self._num_started = 0
        self.num_switches = 0
        """Workers that have changed their role."""
        self._table.on_change(lambda _: self._changed())

    @property
    def workers(self) -> Iterator[ModelledWorker]:
        """All workers that are there, draining ones included."""
        yield from self._prefills.workers.values()
        yield from self._links.workers.values()

    def of_role(self, role: WorkerRole) -> list[ModelledWorker]:
        """Workers of a role by number, draining ones included."""
        workers = (worker for worker in self.workers if worker.info.role is role)
        return sorted(workers, key=lambda worker: worker.info.worker_id)

    def add(self, role: WorkerRole) -> None:
        """A worker has loaded its model and registers, with the lowest free number: what the table knows of an earlier
        worker of this name is replaced."""
        self._num_started += 1
        used_ids = {worker.info.worker_id for worker in self.of_role(role)}
        names = (f"{role.value}-{number:04}" for number in count())
        info = worker_info(
            self.profile,
            role,
            worker_id=next(name for name in names if name not in used_ids),
            incarnation=str(self._num_started),
            model=self.router.model,
        )
        if role is WorkerRole.PREFILL:
            self._prefills.workers[info.incarnation] = ModelledPrefill(
                info, self.profile, self._token, self._neighbours
            )
        else:
            self._links.workers[info.incarnation] = ModelledDecode(info, self.profile, self._token, self._neighbours)
        self._table.join(info)

    def sample(self, at_s: float) -> Sample:
        """The mesh now, at this time since the first arrival. Work of workers that have left counts on."""
        roles = {role: self._sample_role(role) for role in WorkerRole}
        return Sample(at_s, self.router.queue.num_queued, roles)

    def _sample_role(self, role: WorkerRole) -> RoleSample:
        kv = slots = 0.0
        pending_tokens = num_workers = 0
        busy_s, prompt_tokens = self._left[role].busy_s, self._left[role].prompt_tokens
        for worker in self.of_role(role):
            load, info = worker.load, worker.info
            num_workers += 1
            kv += 1 - load.free_blocks / info.num_blocks
            slots += (load.num_running + load.num_waiting) / info.max_num_seqs
            pending_tokens += load.pending_tokens
            busy_s += worker.engine.busy_s
            prompt_tokens += worker.engine.prompt_tokens
        waiting_tokens = self.router.queue.num_tokens_waiting(role)
        return RoleSample(num_workers, kv, slots, busy_s, prompt_tokens, pending_tokens, waiting_tokens)

    def report(self, worker: ModelledWorker) -> None:
        """Send the router a heartbeat of a worker."""
        state = WorkerState.DRAINING if worker.is_draining else WorkerState.READY
        self._table.heartbeat(worker.info, worker.load, state)

    async def all_proven(self) -> None:
        """Return when canaries have proven all workers."""
        view = self.router.mesh
        while True:
            await asyncio.sleep(_POLL_S)
            with_transfers = bool(self._prefills.workers)
            num_serving = [len(view.serving(role, with_transfers=with_transfers)) for role in WorkerRole]
            if num_serving == [len(self.of_role(role)) for role in WorkerRole]:
                return

    async def retire(self, worker: ModelledWorker, grace_s: float) -> None:
        """Drain a worker, and end it when it is idle or `grace_s` have passed; the router replays what is left."""
        info, loop = worker.info, asyncio.get_running_loop()
        worker.is_draining = True
        self.report(worker)
        until_s = loop.time() + grace_s
        while True:
            await asyncio.sleep(_POLL_S)
            if worker.is_idle or loop.time() >= until_s:
                break
        self._prefills.workers.pop(info.incarnation, None)
        self._links.workers.pop(info.incarnation, None)
        self._table.lose(info)
        worker.lose()
        left = self._left[info.role]
        left.busy_s += worker.engine.busy_s
        left.prompt_tokens += worker.engine.prompt_tokens

    async def switch(self, worker_id: str, role: WorkerRole, grace_s: float) -> None:
        """Drain a worker as `retire` does; then it registers in this role, with a name of the role."""
        worker = next(worker for worker in self.workers if worker.info.worker_id == worker_id)
        await self.retire(worker, grace_s)
        await asyncio.sleep(_SWITCH_S)
        self.add(role)
        self.num_switches += 1

    def _changed(self) -> None:
        self.router.follow_mesh()


@asynccontextmanager
async def simulated_mesh(
    profile: MeshProfile, settings: RouterSettings, num_prefill: int, num_decode: int
) -> AsyncIterator[SimulatedMesh]:
    """A mesh whose workers are proven."""
    mesh = SimulatedMesh(profile, settings)
    canaries = asyncio.create_task(mesh.router.run())
    try:
        for role, count in ((WorkerRole.PREFILL, num_prefill), (WorkerRole.DECODE, num_decode)):
            for _ in range(count):
                mesh.add(role)
        await mesh.all_proven()
        yield mesh
    finally:
        await cancel_all([canaries])
        for worker in mesh.workers:
            worker.engine.stop()
        mesh.router.close()


def write_model(folder: Path, max_positions: int) -> None:
    """Write what a router reads of a model: a tokenizer, whose texts do not matter, and the longest sequence."""
    config = json.loads((BUNDLED / "config.json").read_text()) | {"max_position_embeddings": max_positions}
    write_without_weights(folder, config)
