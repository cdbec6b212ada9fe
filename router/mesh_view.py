"""The mesh as one of the router's models sees it now: registry, links, ledger and proofs put together."""

from collections.abc import Callable
from dataclasses import dataclass

from mesh.domain.worker import WorkerInfo, WorkerRole, WorkerState
from mesh.registry.membership import Registry, WorkerView
from router.decode_links import DecodeLinks
from router.ledger import Ledger
from router.placement import Snapshot, healthy, usable
from router.proving import Proof, Proving
from router.served_model import ServedModel


class ModelWorkers:
    """A Registry of one model's workers."""

    def __init__(self, registry: Registry, model: str) -> None:
        self._registry = registry
        self._model = model

    def workers(self) -> list[WorkerView]:
        """See Registry.workers."""
        return [view for view in self._registry.workers() if view.info.model == self._model]

    def find(self, worker_id: str) -> WorkerView | None:
        """See Registry.find."""
        view = self._registry.find(worker_id)
        return view if view is not None and view.info.model == self._model else None

    def lose(self, worker_id: str, incarnation: str) -> None:
        """See Registry.lose."""
        self._registry.lose(worker_id, incarnation)

    def on_change(self, callback: Callable[[], None]) -> None:
        """See Registry.on_change."""
        self._registry.on_change(callback)


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the view comes from."""

    registry: Registry
    links: DecodeLinks
    ledger: Ledger
    proving: Proving


class MeshView:
    """Cheap to ask; keeps nothing."""

    def __init__(
        self, model: ServedModel, sources: Sources, *, prefill_threshold: int = 0, prefill_overflow: int = 0
    ) -> None:
        self._model = model
        self._sources = sources
        self._prefill_threshold = prefill_threshold
        self._prefill_overflow = prefill_overflow

    def snapshot(self) -> Snapshot:
        """For placement."""
        views = self._sources.registry.workers()
        proofs = [(view.info, self._sources.proving.proof(view.info)) for view in views]
        can_transfer = any(view.info.role is WorkerRole.PREFILL for view in views)
        return Snapshot(
            views=views,
            model=self._model.name,
            tokenizer_fingerprint=self._model.facts.tokenizer_fingerprint,
            in_flight=self._sources.ledger.in_flight(views),
            unreachable=self._sources.links.unreachable(views),
            unproven=frozenset(info.incarnation for info, proof in proofs if proof is Proof.NONE),
            local_only=frozenset(info.incarnation for info, proof in proofs if proof is Proof.LOCAL and can_transfer),
            prefill_threshold=self._prefill_threshold,
            prefill_overflow=self._prefill_overflow,
        )

    def num_healthy(self, role: WorkerRole, *, with_transfers: bool = False) -> int:
        """Workers of a role that could get work; `with_transfers`: also KV from others."""
        snapshot = self.snapshot()
        left_out = snapshot.local_only if with_transfers else frozenset()
        return sum(candidate.info.incarnation not in left_out for candidate in healthy(snapshot, role))

    def views(self) -> list[WorkerView]:
        """All that the registry knows, also lost ones, with their load."""
        return self._sources.registry.workers()

    def serving(self) -> frozenset[str]:
        """Incarnations of those that get clients' requests."""
        snapshot = self.snapshot()
        return frozenset(each.info.incarnation for role in WorkerRole for each in healthy(snapshot, role))

    def workers(self) -> list[WorkerInfo]:
        """All that the registry knows, also lost ones."""
        return [view.info for view in self._sources.registry.workers()]

    def usable(self) -> list[WorkerInfo]:
        """Workers that could get work if they were proven."""
        return [view.info for view in usable(self.snapshot())]

    def to_be_left(self) -> list[WorkerInfo]:
        """Workers whose work should move: stalled ones, if others can take it. If not, it waits: stalls may end."""
        views = self._sources.registry.workers()
        stalled = [view.info for view in views if view.state is WorkerState.STALLED]
        return stalled if stalled and self.has_path else []

    @property
    def has_path(self) -> bool:
        """True if requests can be served: a proven decode worker suffices, because it can prefill by itself."""
        return self.num_healthy(WorkerRole.DECODE) > 0

    def decode_workers(self) -> list[WorkerInfo]:
        """Decode workers, also those that are away for a moment."""
        return [view.info for view in self._sources.registry.workers() if view.info.role is WorkerRole.DECODE]
