"""The mesh as one model sees it now: its workers, the trust in them, the links to them and the work in flight."""

import asyncio
from collections.abc import Collection
from itertools import islice

from mesh.domain.errors import ModelNotFound
from mesh.domain.worker import WorkerInfo, WorkerRole, WorkerState
from router.admission.in_flight import InFlightTable
from router.admission.placement import MeshSnapshot
from router.admission.roster import InFlight
from router.served_model import ServedModel
from router.workers.decode_link import Links
from router.workers.health import Trust, WorkerHealth
from router.workers.membership import Membership, WorkerView, capacity_tokens

_MAX_SHOWN_CHARS = 128
_MAX_SHOWN_NAMES = 20


def shown(names: Collection[str]) -> str:
    """Return the names for an error: all of them, or the first and how many there are beside these."""
    listed = ", ".join(islice(names, _MAX_SHOWN_NAMES))
    num_more = len(names) - _MAX_SHOWN_NAMES
    return f"{listed} and {num_more} more" if num_more > 0 else listed


class MeshView:
    """The workers of one model.

    The snapshot for placement is kept: `discard_snapshot` ends it, reports of load and work in flight change its
    rosters.
    """

    def __init__(
        self,
        model: ServedModel,
        *,
        membership: Membership,
        links: Links,
        in_flight: InFlightTable,
        health: WorkerHealth,
        prefill_threshold: int = 0,
        prefill_overflow: int = 0,
        router_id: str = "",
    ) -> None:
        self._model = model
        self._membership = membership
        self._links = links
        self._in_flight = in_flight
        self._health = health
        self._prefill_threshold = prefill_threshold
        self._prefill_overflow = prefill_overflow
        self._router_id = router_id
        self._snapshot: MeshSnapshot | None = None
        self._adapters: dict[str, str] | None = None
        self._changed = asyncio.Event()
        in_flight.watch(self._set_in_flight)

    def discard_snapshot(self) -> None:
        """Take a new snapshot for the next placement: a worker has joined or left, or its state, link or the trust in
        it has changed."""
        self._snapshot = self._adapters = None
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def changed(self) -> None:
        """Return at the next change that discards the snapshot."""
        await self._changed.wait()

    def reported(self, view: WorkerView) -> None:
        """A worker has reported its load or its prefix cache."""
        self._in_flight.reported(view)
        if self._snapshot is not None:
            self._snapshot.roster(view.info.role).set_load(view)

    def _set_in_flight(self, incarnation: str, work: InFlight) -> None:
        if self._snapshot is not None:
            for role in WorkerRole:
                self._snapshot.roster(role).set_in_flight(incarnation, work)

    def snapshot(self) -> MeshSnapshot:
        """Return the input of placement, as it is now. Its rosters change with every report."""
        if self._snapshot is None:
            self._snapshot = self._take()
        return self._snapshot

    def _take(self) -> MeshSnapshot:
        views = self.views()
        trust_levels = [(view.info, self._health.trust(view.info)) for view in views]
        can_transfer = any(view.info.role is WorkerRole.PREFILL for view in views)
        return MeshSnapshot(
            views=views,
            model=self._model.name,
            tokenizer_fingerprint=self._model.facts.tokenizer_fingerprint,
            in_flight=self._in_flight.by_worker(),
            unreachable=self._links.unreachable(views),
            unproven=frozenset(info.incarnation for info, trust in trust_levels if trust is Trust.NONE),
            local_only=frozenset(
                info.incarnation for info, trust in trust_levels if trust is Trust.LOCAL and can_transfer
            ),
            prefill_threshold=self._prefill_threshold,
            prefill_overflow=self._prefill_overflow,
            router_id=self._router_id,
        )

    def views(self) -> list[WorkerView]:
        """All known workers of the model with their load, lost ones included."""
        return [view for view in self._membership.views() if view.info.model == self._model.name]

    def serving(self, role: WorkerRole | None = None, *, with_transfers: bool = False) -> frozenset[str]:
        """Incarnations of workers that get clients' requests, in this role or in any. `with_transfers` leaves out
        decode workers that must prefill.
        """
        snapshot, roles = self.snapshot(), WorkerRole if role is None else (role,)
        serving = frozenset(view.info.incarnation for each in roles for view in snapshot.roster(each).views)
        return serving - snapshot.local_only if with_transfers else serving

    def usable(self) -> list[WorkerInfo]:
        """Workers that may get requests once a canary has proven them."""
        return [view.info for view in self.snapshot().usable]

    def to_abandon(self) -> list[WorkerInfo]:
        """Stalled workers whose requests should move. Empty if no other worker can serve: the stall may end."""
        return [view.info for view in self.views() if view.state is WorkerState.STALLED] if self.has_path else []

    def adapters(self) -> dict[str, str]:
        """Digests of the LoRA adapters of decode workers, by name.

        Adapters of lost workers stay known until the router forgets the worker, so that their requests wait or end with
        NoWorkers, not with ModelNotFound. If a worker that is here has another adapter of that name, it counts.
        """
        if self._adapters is None:
            decoders = self._decoders()
            decoders.sort(key=lambda view: not view.state.is_gone)  # the last one of a name counts
            digests = {adapter.name: adapter.digest for view in decoders for adapter in view.info.adapters}
            self._adapters = dict(sorted(digests.items()))
        return self._adapters

    @property
    def knows_adapters(self) -> bool:
        """True once a decode worker has joined: workers say which adapters there are."""
        return bool(self._decoders())

    def _decoders(self) -> list[WorkerView]:
        return [view for view in self.views() if view.info.role is WorkerRole.DECODE]

    def adapter_digest(self, name: str) -> str:
        """The digest of the adapter with this name, "" for no name. Raises ModelNotFound with names that exist."""
        adapters = self.adapters()
        if name and name not in adapters:
            served = shown(adapters) or "none; workers load them with --adapter NAME=FOLDER"
            raise ModelNotFound(
                f"model {self._model.name!r} has no adapter {name[:_MAX_SHOWN_CHARS]!r}; it has: {served}"
            )
        return adapters.get(name, "")

    @property
    def has_path(self) -> bool:
        """True if requests can be served. A proven decode worker suffices, because it can prefill itself."""
        return len(self.snapshot().decode) > 0

    @property
    def decode_capacities(self) -> frozenset[int]:
        """The lengths of the longest sequences that decode workers can hold, briefly lost ones included."""
        return self.snapshot().decode_capacities

    @property
    def serving_capacities(self) -> frozenset[int]:
        """Those of decode workers that get clients' requests."""
        return frozenset(capacity_tokens(view.info) for view in self.snapshot().decode.views)
