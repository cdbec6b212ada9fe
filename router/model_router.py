"""What one model has of its own in a router: caps, queue, bookings, proofs and canaries.

Models of a router share the registry, the connections to workers, the journal and the public port, and nothing else: a
model that is full, or whose workers are gone, keeps no other from being served.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mesh.registry.membership import Registry
from router.admission import Admission
from router.canary import CanaryRunner
from router.decode_links import DecodeLinks
from router.dispatch import Dispatcher, Paths
from router.forecast import Forecast
from router.grammars import Grammars
from router.journal import Journal
from router.ledger import Ledger
from router.limits import LimitPolicy
from router.mesh_view import MeshView, ModelWorkers, Sources
from router.prefill_call import PrefillClient
from router.prompts import PromptEncoder
from router.prover import Prover
from router.proving import Proving
from router.queue import Outlook, PlacementQueue
from router.served_model import ServedModel
from router.service import GenerationService, ServiceParts
from router.settings import RouterSettings


@dataclass(frozen=True, slots=True)
class SharedParts:
    """What models share. `on_change` is to be called when a worker has been proven or has lost its trust, `on_gap` with
    the seconds between two tokens of a choice.
    """

    registry: Registry
    links: DecodeLinks
    prefills: PrefillClient
    journal: Journal
    on_change: Callable[[], None]
    on_gap: Callable[[float], None]


class ModelRouter:
    """One model, from its permits to its workers. `run` is its task; `close` comes after the last stream has ended."""

    def __init__(self, settings: RouterSettings, permits: Admission, shared: SharedParts) -> None:
        """`settings.model` is a folder. Raises ConfigurationError for a wrong one, or limits that do not fit it."""
        model_dir = Path(settings.model)
        model = ServedModel.load(settings.served_name, model_dir)
        limits = LimitPolicy(settings, model.facts)
        self.model = model
        self.permits = permits
        self.ledger = Ledger(time.monotonic)
        self.proving = Proving(time.monotonic, trip_after=settings.trip_after)
        workers = ModelWorkers(shared.registry, model.name)
        self.mesh = MeshView(
            model,
            Sources(workers, shared.links, self.ledger, self.proving),
            prefill_threshold=settings.prefill_threshold,
            prefill_overflow=settings.prefill_overflow,
        )
        forecast = Forecast(time.monotonic)
        self.queue = PlacementQueue(
            self.ledger,
            Outlook(self.mesh.snapshot, forecast),
            max_queued=settings.max_queued_requests,
            no_worker_timeout_s=settings.no_worker_timeout_s,
        )
        paths = Paths(self.queue, shared.links, shared.prefills, self.proving, shared.journal)
        canaries = CanaryRunner(model, paths, timeout_s=settings.canary_timeout_s)
        self._prover = Prover(self.proving, self.mesh, canaries.run, shared.on_change)
        self._grammars = Grammars(model_dir, disabled=settings.disable_grammar_support)
        self._encoders = PromptEncoder(model), PromptEncoder(model, num_threads=1)
        self.service = GenerationService(
            ServiceParts(
                model=model,
                encoder=self._encoders[0],
                tokenize_encoder=self._encoders[1],
                grammars=self._grammars,
                limits=limits,
                permits=permits,
                forecast=forecast,
                mesh=self.mesh,
                dispatcher=Dispatcher(model, settings, paths, shared.on_change),
                journal=shared.journal,
                slow_reader_s=settings.slow_reader_s,
                ttft_target_s=settings.ttft_target_s,
                on_gap=shared.on_gap,
            )
        )
        self.ledger.on_change(self.queue.wake)

    async def run(self) -> None:
        """Prove workers until cancelled."""
        await self._prover.run()

    def mesh_changed(self) -> None:
        """A worker has joined, left, reported, been proven or tripped; or a link has come up or broken."""
        self.ledger.follow(self.mesh.views())
        self._prover.wake()
        for stalled in self.mesh.to_be_left():
            self.ledger.abandon(stalled)
        self.queue.wake()

    def close(self) -> None:
        """Nobody waits any more."""
        self.queue.close()
        for encoder in self._encoders:
            encoder.close()
        self._grammars.close()
