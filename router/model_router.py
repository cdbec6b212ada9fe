"""Puts the parts of one model together: limiter, queue, in-flight table, worker health and canaries.

Models share the registry, the connections to workers, the journal and the public port, and nothing else: a model that
is full, or whose workers are gone, does not affect the others.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

import structlog

from mesh.domain.worker import WorkerRole
from router.admission.forecast import Forecast
from router.admission.in_flight import InFlightTable
from router.admission.limiter import ConcurrencyLimiter
from router.admission.placement import NoPlacement
from router.admission.queue import PlacementQueue
from router.advice import DEFAULT_TTFT_TARGET_S, Adviser, RoleLoad, Sample
from router.dispatch import Dispatcher
from router.journal import Journal
from router.served_model import ServedModel
from router.service import GenerationService
from router.settings import RouterSettings
from router.text.input_processor import InputProcessor
from router.workers.canary import CanaryRunner
from router.workers.decode_link import Links
from router.workers.health import WorkerHealth
from router.workers.membership import Membership, WorkerView
from router.workers.mesh_view import MeshView
from router.workers.prefill_client import PrefillCaller

log = structlog.get_logger(__name__)


class ModelRouter:
    """One model, on the running event loop, whose clock is its own. `run` is its background task; call `close` after
    the last stream has ended.

    `on_change` is called when a canary has proven a worker or a circuit breaker has tripped, `on_gap` with the seconds
    between two tokens of a choice. `router_id` is that of a router beside others, which share its workers; else empty.
    """

    def __init__(
        self,
        settings: RouterSettings,
        limiter: ConcurrencyLimiter,
        *,
        membership: Membership,
        links: Links,
        prefill_client: PrefillCaller,
        journal: Journal,
        on_change: Callable[[], None],
        on_gap: Callable[[float], None],
        router_id: str = "",
    ) -> None:
        """`settings.model` is a folder. Raises ConfigurationError if it is broken or the limits do not fit it."""
        self.model = ServedModel.load(
            settings.served_name,
            Path(settings.model),
            settings.rope_override(),
            with_recommended=settings.generation_config == "auto",
        )
        if defaults := self.model.sampling_defaults:
            log.info("HTTP requests sample as generation_config.json says", model=self.model.name, defaults=defaults)
        if stops := self.model.stop_strings:
            log.info("answers end with the stop strings of generation_config.json", model=self.model.name, stop=stops)
        self.limiter = limiter
        clock = asyncio.get_running_loop().time
        self.in_flight = InFlightTable(clock)
        self.health = WorkerHealth(clock, trip_after=settings.trip_after)
        self.mesh = MeshView(
            self.model,
            membership=membership,
            links=links,
            in_flight=self.in_flight,
            health=self.health,
            prefill_threshold=settings.prefill_threshold,
            prefill_overflow=settings.prefill_overflow,
            router_id=router_id,
        )
        forecast = Forecast(clock)
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
            prefill_client=prefill_client,
            timeout_s=settings.canary_timeout_s,
            on_change=on_change,
        )
        self._inputs = InputProcessor(
            self.model, Path(settings.model), disable_grammars=settings.disable_grammar_support
        )
        dispatcher = Dispatcher(
            self.model,
            settings,
            queue=self.queue,
            links=links,
            prefill_client=prefill_client,
            health=self.health,
            journal=journal,
            on_trip=on_change,
        )
        self.service = GenerationService(
            self._inputs,
            settings,
            limiter=limiter,
            forecast=forecast,
            mesh=self.mesh,
            dispatcher=dispatcher,
            journal=journal,
            on_gap=on_gap,
        )
        self.adviser = Adviser(
            lambda: _sample(clock(), self), ttft_target_s=settings.ttft_target_s or DEFAULT_TTFT_TARGET_S
        )
        self.in_flight.on_change(self.queue.wake)
        membership.on_report(self._reported)

    async def start(self) -> None:
        """Raises ConfigurationError if the chat template cannot be compiled."""
        await self._inputs.start()

    async def run(self) -> None:
        """Send canaries to the workers, and form advice, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._canaries.run())
            tasks.create_task(self.adviser.run())

    def follow_mesh(self) -> None:
        """Look at all workers again: one has joined, left, changed its state, been proven or tripped; or a link has
        come up or broken."""
        self.mesh.discard_snapshot()
        self.in_flight.follow(self.mesh.views())
        self._canaries.wake()
        for stalled in self.mesh.to_abandon():
            self.in_flight.abandon(stalled)
        self.queue.wake()

    def _reported(self, view: WorkerView) -> None:
        if view.info.model == self.model.name:
            self.mesh.reported(view)
            self.queue.wake()

    def close(self) -> None:
        """Stop timers, threads and the template process."""
        self.queue.close()
        self._inputs.close()


def _sample(at_s: float, router: ModelRouter) -> Sample:
    snapshot, queue = router.mesh.snapshot(), router.queue
    prefill, decode = snapshot.prefill, snapshot.decode
    lacks_prefill = queue.shortage is NoPlacement.NO_PREFILL_CAPACITY
    lacks_decode = queue.shortage is NoPlacement.NO_DECODE_CAPACITY
    return Sample(
        at_s,
        RoleLoad(len(prefill), prefill.busy_share(), lacks_prefill),
        RoleLoad(len(decode), decode.used_share(), lacks_decode),
        prompt_tokens=int(prefill.prefill_tokens.sum()) + queue.num_tokens_waiting(WorkerRole.PREFILL),
        computed_tokens=router.in_flight.prefilled_tokens,
    )
