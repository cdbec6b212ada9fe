"""The models of a router: per model its limiter, queue, in-flight table, worker health and canaries; and all by name.

Models share the registry, the connections to workers, the journal and the public port, and nothing else: a model that
is full, or whose workers are gone, does not affect the others.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from mesh.domain.errors import InvalidRequest, LayoutMismatch, MeshError, ModelNotFound
from mesh.domain.worker import WorkerInfo
from router.admission.forecast import Forecast
from router.admission.limiter import ConcurrencyLimiter
from router.admission.queue import PlacementQueue
from router.api.validation import GenerateParams
from router.generation.answer_stream import Answer
from router.generation.dispatch import Dispatcher
from router.generation.service import GenerationService
from router.observe.journal import Journal
from router.placement.in_flight import InFlightTable
from router.placement.mesh_view import MeshView
from router.served_model import ServedModel
from router.settings import RouterSettings
from router.text.model_text import ModelText
from router.workers.canary import CanaryRunner
from router.workers.decode_link import DecodeLinks
from router.workers.health import WorkerHealth
from router.workers.membership import Registry
from router.workers.prefill_call import PrefillClient

_MAX_SHOWN_CHARS = 128


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


class ServedModels:
    """All models of a router, by name. A request without a name means the only model."""

    def __init__(self, services: Sequence[GenerationService], journal: Journal) -> None:
        self._by_name = {service.model.name: service for service in services}
        self._journal = journal

    async def generate(self, params: GenerateParams, time_left_s: float | None) -> Answer:
        """Start generating with the request's model. Raises the errors of `find` and GenerationService.generate."""
        try:
            service = self.find(params.model)
        except MeshError as error:
            self._journal.refused(type(error).__name__)
            raise
        return await service.generate(params, time_left_s)

    def find(self, name: str) -> GenerationService:
        """Raises ModelNotFound; InvalidRequest if the name is empty and there are several models."""
        if name in self._by_name:
            return self._by_name[name]
        served = ", ".join(self._by_name)
        if name:
            raise ModelNotFound(f"model {name[:_MAX_SHOWN_CHARS]!r} is not served here; served: {served}")
        if len(self._by_name) > 1:
            raise InvalidRequest(f"model: name one of those served here: {served}")
        return next(iter(self._by_name.values()))

    def all(self) -> list[GenerationService]:
        """All services, in the order of the settings."""
        return list(self._by_name.values())

    async def drain(self, grace_s: float) -> None:
        """Drain all models at the same time; see GenerationService.drain."""
        await asyncio.gather(*(service.drain(grace_s) for service in self.all()))


def require_served(models: Sequence[ServedModel], info: WorkerInfo) -> None:
    """Raise LayoutMismatch, with both values, for a worker of another model or another tokenizer."""
    model = next((model for model in models if model.name == info.model), None)
    if model is None:
        names = " and ".join(repr(model.name) for model in models)
        raise LayoutMismatch(f"the router serves model {names}, worker {info.worker_id} {info.model!r}")
    model.require_fits(info)
