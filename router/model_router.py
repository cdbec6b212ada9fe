"""The models of a router: per model its limiter, queue, in-flight table, worker health and canaries.

Models share the registry, the connections to workers, the journal and the public port, and nothing else: a model that
is full, or whose workers are gone, does not affect the others.

Readiness reports over all models: the health of the public port, and the one "ready" announcement. Service names of
grpc.health.v1: "" and the port's services tell whether requests are served; `prefill` and `decode` tell whether any
worker of that role gets requests.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from mesh.domain.errors import LayoutMismatch
from mesh.domain.worker import WorkerInfo, WorkerRole
from mesh.rpc.server import Server
from router.admission.in_flight import InFlightTable
from router.admission.limiter import ConcurrencyLimiter, Forecast
from router.admission.queue import PlacementQueue
from router.attempt import PrefillClient
from router.dispatch import Dispatcher
from router.journal import Journal
from router.served_model import ModelText, ServedModel
from router.service import GenerationService
from router.settings import RouterSettings
from router.workers.canary import CanaryRunner
from router.workers.decode_link import DecodeLinks
from router.workers.health import MeshView, WorkerHealth
from router.workers.membership import Registry

SERVICES = ("tandem.v1.Generation", "tandem.v1.Mesh")
_ROUTER_NAMES = ("", *SERVICES)
_NAMES = (*_ROUTER_NAMES, *(role.value for role in WorkerRole))


class ModelRouter:
    """One model. `run` is its background task; call `close` after the last stream has ended.

    `on_change` is called when a canary has proven a worker or a circuit breaker has tripped, `on_gap` with the seconds
    between two tokens of a choice.
    """

    def __init__(
        self,
        settings: RouterSettings,
        limiter: ConcurrencyLimiter,
        *,
        registry: Registry,
        links: DecodeLinks,
        prefills: PrefillClient,
        journal: Journal,
        on_change: Callable[[], None],
        on_gap: Callable[[float], None],
    ) -> None:
        """`settings.model` is a folder. Raises ConfigurationError if it is broken or the limits do not fit it."""
        self.model = ServedModel.load(settings.served_name, Path(settings.model), settings.rope_override())
        self.limiter = limiter
        self.in_flight = InFlightTable(time.monotonic)
        self.health = WorkerHealth(time.monotonic, trip_after=settings.trip_after)
        self.mesh = MeshView(
            self.model,
            registry=registry,
            links=links,
            in_flight=self.in_flight,
            health=self.health,
            prefill_threshold=settings.prefill_threshold,
            prefill_overflow=settings.prefill_overflow,
        )
        forecast = Forecast(time.monotonic)
        self.queue = PlacementQueue(
            self.in_flight,
            self.mesh.snapshot,
            forecast,
            max_queued=settings.max_queued_requests,
            no_worker_timeout_s=settings.no_worker_timeout_s,
        )
        self._canaries = CanaryRunner(
            self.model,
            health=self.health,
            mesh=self.mesh,
            links=links,
            prefills=prefills,
            timeout_s=settings.canary_timeout_s,
            on_change=on_change,
        )
        self._text = ModelText(self.model, Path(settings.model), disable_grammars=settings.disable_grammar_support)
        dispatcher = Dispatcher(
            self.model,
            settings,
            queue=self.queue,
            links=links,
            prefills=prefills,
            health=self.health,
            journal=journal,
            on_trip=on_change,
        )
        self.service = GenerationService(
            self._text,
            settings,
            limiter=limiter,
            forecast=forecast,
            mesh=self.mesh,
            dispatcher=dispatcher,
            journal=journal,
            on_gap=on_gap,
        )
        self.in_flight.on_change(self.queue.wake)

    async def start(self) -> None:
        """Raises ConfigurationError if the chat template cannot be compiled."""
        await self._text.start()

    async def run(self) -> None:
        """Send canaries until cancelled."""
        await self._canaries.run()

    def mesh_changed(self) -> None:
        """A worker has joined, left, reported, been proven or tripped; or a link has come up or broken."""
        self.in_flight.follow(self.mesh.views())
        self._canaries.wake()
        for stalled in self.mesh.to_abandon():
            self.in_flight.abandon(stalled)
        self.queue.wake()

    def close(self) -> None:
        """Stop timers, threads and the template process."""
        self.queue.close()
        self._text.close()


def require_served(models: Sequence[ServedModel], info: WorkerInfo) -> None:
    """Raise LayoutMismatch, with both values, for a worker of another model or another tokenizer."""
    model = next((model for model in models if model.name == info.model), None)
    if model is None:
        names = " and ".join(repr(model.name) for model in models)
        raise LayoutMismatch(f"the router serves model {names}, worker {info.worker_id} {info.model!r}")
    model.require_fits(info)


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
            await self._report(self._health())
            self._announce()
            await self._changed.wait()
            self._changed.clear()

    async def end(self) -> None:
        """Report NOT_SERVING for good. Call it after `run` has ended."""
        for name in _NAMES:
            await self._server.set_serving(False, name)

    def _health(self) -> dict[str, bool]:
        """Return by service name whether it is serving now."""
        has = {role: self._num_healthy(role) > 0 for role in WorkerRole}
        needs_prefill = self._expect_prefill > 0 and not self._has_served
        serving = has[WorkerRole.DECODE] and (has[WorkerRole.PREFILL] or not needs_prefill)
        self._has_served |= serving
        return dict.fromkeys(_ROUTER_NAMES, serving) | {role.value: has[role] for role in WorkerRole}

    async def _report(self, health: dict[str, bool]) -> None:
        for name, serving in health.items():
            if self._reported.get(name) is not serving:
                await self._server.set_serving(serving, name)
                self._reported[name] = serving

    def _announce(self) -> None:
        if not self._announced and self._is_complete():
            self._announced = True
            self._on_ready()

    def _is_complete(self) -> bool:
        num_decode = self._num_healthy(WorkerRole.DECODE, with_transfers=self._expect_prefill > 0)
        return (
            self._num_healthy(WorkerRole.PREFILL) >= self._expect_prefill
            and num_decode >= self._expect_decode
            and all(mesh.has_path for mesh in self._meshes if self._expect_decode)
        )

    def _num_healthy(self, role: WorkerRole, *, with_transfers: bool = False) -> int:
        return sum(mesh.num_healthy(role, with_transfers=with_transfers) for mesh in self._meshes)
