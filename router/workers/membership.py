"""The table of workers that one router knows, fed by their heartbeats. No I/O, no clocks of its own."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from mesh.domain.errors import LayoutMismatch
from mesh.domain.worker import PROTOCOL_VERSION, CacheEvent, WorkerInfo, WorkerLoad, WorkerState

_MAX_SWITCH_S = 60.0  # a worker that needs longer between two roles ends


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker at one moment. `cached` is a live view of its prefix cache's block hashes: read it at once."""

    info: WorkerInfo
    load: WorkerLoad
    state: WorkerState
    last_seen_s: float
    cached: frozenset[bytes] | set[bytes] = field(repr=False)


def capacity_tokens(info: WorkerInfo) -> int:
    """Return the length of the longest sequence that the worker can hold."""
    layout = info.layout
    return layout.max_tokens_in(info.num_blocks + layout.num_unused, info.max_batch_tokens, info.max_model_len)


class Membership:
    """The workers that a router can use, fed over gRPC or by RedisRegistry. Reports about a former run of a worker are
    ignored. Used by one event loop; `clock` returns monotonic seconds.

    `require_fits` is called with each worker that joins, and raises LayoutMismatch if this router cannot use it.
    """

    def __init__(
        self, clock: Callable[[], float], require_fits: Callable[[WorkerInfo], None] = lambda info: None
    ) -> None:
        self._clock = clock
        self._require_fits = require_fits
        self._views: dict[str, WorkerView] = {}  # by id
        self._is_in_order = True  # that of `views`
        self._next_event: dict[str, int] = {}
        self._callbacks: list[Callable[[WorkerView], None]] = []
        self._report_callbacks: list[Callable[[WorkerView], None]] = []

    def views(self) -> list[WorkerView]:
        """Return all known workers, by role and id. Lost workers stay listed for a while, as LOST, for operators."""
        if not self._is_in_order:
            in_order = sorted(self._views.values(), key=lambda view: (view.info.role.value, view.info.worker_id))
            self._views = {view.info.worker_id: view for view in in_order}
            self._is_in_order = True
        return list(self._views.values())

    def find(self, worker_id: str) -> WorkerView | None:
        return self._views.get(worker_id)

    def on_change(self, callback: Callable[[WorkerView], None]) -> None:
        """Call `callback` with each worker of which more than the load has changed, or that was dropped."""
        self._callbacks.append(callback)

    def on_report(self, callback: Callable[[WorkerView], None]) -> None:
        """Call `callback` with each worker that reports its load or prefix cache, and whose state is as before. A
        thousand workers report two thousand times a second.
        """
        self._report_callbacks.append(callback)

    def join(self, info: WorkerInfo) -> None:
        """Add a worker that has registered. Raises LayoutMismatch if it is incompatible with the known workers.

        A worker that only connects again keeps its load and state until its first heartbeat, which follows at once.
        """
        self._require_fits(info)
        self._require_compatible(info)
        member = self._current(info)
        load = WorkerLoad(free_blocks=info.num_blocks) if member is None else member.load
        state = WorkerState.READY if member is None else member.state
        view = self._views[info.worker_id] = WorkerView(info, load, state, self._clock(), set())
        self._is_in_order = False
        self._next_event[info.worker_id] = 0
        self._changed(view)

    def _require_compatible(self, info: WorkerInfo) -> None:
        if info.protocol_version != PROTOCOL_VERSION:
            raise LayoutMismatch(
                f"worker {info.worker_id} speaks protocol {info.protocol_version}, this router {PROTOCOL_VERSION}"
            )
        for view in self._views.values():
            peer = view.info
            if view.state.is_gone or peer.worker_id == info.worker_id or peer.model != info.model:
                continue
            if _are_alike(peer, info):
                return  # the peer has been compared with all others
            peer.layout.require_same(info.layout)
            if peer.tokenizer_fingerprint != info.tokenizer_fingerprint:
                raise LayoutMismatch(
                    f"tokenizers differ: {peer.tokenizer_fingerprint} at {peer.worker_id}, "
                    f"{info.tokenizer_fingerprint} at {info.worker_id}"
                )
            _require_same_adapters(peer, info)

    def heartbeat(self, info: WorkerInfo, load: WorkerLoad, state: WorkerState) -> None:
        """Update the load and the state of a worker. Raises LayoutMismatch for one that was gone and is incompatible
        with those that have joined since.
        """
        view = self._current(info)
        if view is not None:
            if view.state.is_gone:
                self._require_compatible(view.info)
            now = self._views[info.worker_id] = replace(view, load=load, state=state, last_seen_s=self._clock())
            if state is view.state:
                self._reported(now)
            else:
                self._changed(now)

    def apply_cache_events(self, info: WorkerInfo, first_number: int, events: Iterable[CacheEvent]) -> bool:
        """Apply changes of a worker's prefix cache. False if events are missing: the caller must request a snapshot."""
        view = self._current(info)
        if view is None:
            return True
        if first_number != self._next_event[info.worker_id]:
            return False
        assert isinstance(view.cached, set)
        for event in events:
            self._next_event[info.worker_id] += 1
            if event.evicted:
                view.cached.discard(event.block_hash)
            else:
                view.cached.add(event.block_hash)
        return True

    def replace_cache(self, info: WorkerInfo, next_number: int, hashes: Iterable[bytes]) -> None:
        """Replace a worker's cached hashes by a snapshot; `next_number` is the number of its next event."""
        view = self._current(info)
        if view is not None:
            now = self._views[info.worker_id] = replace(view, cached=set(hashes))
            self._next_event[info.worker_id] = next_number
            self._reported(now)

    def lose(self, info: WorkerInfo) -> None:
        """Mark an unreachable worker LOST, unless it has left in order. A later heartbeat of the same run
        brings it back.
        """
        view = self._current(info)
        if view is not None and not view.state.is_gone:
            self._set_gone(view, WorkerState.LOST)

    def leave(self, info: WorkerInfo, state: WorkerState) -> None:
        """Mark a worker that has said farewell. `state`: STOPPED or SWITCHING."""
        view = self._current(info)
        if view is not None:
            self._set_gone(replace(view, last_seen_s=self._clock()), state)

    def _set_gone(self, view: WorkerView, state: WorkerState) -> None:
        worker_id = view.info.worker_id
        gone = self._views[worker_id] = replace(view, state=state, cached=set())
        self._next_event[worker_id] = -1  # any next event is a gap, so that a returning worker sends a snapshot
        self._changed(gone)

    def expire(self, *, silent_s: float, forget_s: float) -> None:
        """Mark workers LOST after `silent_s` without a heartbeat, or if they do not come back in another role within a
        minute; drop them after `forget_s`."""
        now = self._clock()
        for view in list(self._views.values()):
            silence = now - view.last_seen_s
            if silence > silent_s:
                self.lose(view.info)
            if silence > _MAX_SWITCH_S and view.state is WorkerState.SWITCHING:
                self._set_gone(view, WorkerState.LOST)
            if silence > forget_s:
                del self._next_event[view.info.worker_id]
                self._changed(self._views.pop(view.info.worker_id))

    def _current(self, info: WorkerInfo) -> WorkerView | None:
        """The worker, if this is its current run."""
        view = self._views.get(info.worker_id)
        return view if view is not None and view.info.incarnation == info.incarnation else None

    def _changed(self, view: WorkerView) -> None:
        for callback in self._callbacks:
            callback(view)

    def _reported(self, view: WorkerView) -> None:
        for callback in self._report_callbacks:
            callback(view)


def _are_alike(peer: WorkerInfo, info: WorkerInfo) -> bool:
    """True if all that must fit is equal."""
    return (peer.layout, peer.tokenizer_fingerprint, peer.adapters) == (
        info.layout,
        info.tokenizer_fingerprint,
        info.adapters,
    )


def _require_same_adapters(peer: WorkerInfo, info: WorkerInfo) -> None:
    """Raise LayoutMismatch if two workers have other adapters under one name. One of them may lack some."""
    digests = {adapter.name: adapter.digest for adapter in peer.adapters}
    for adapter in info.adapters:
        if digests.get(adapter.name, adapter.digest) != adapter.digest:
            raise LayoutMismatch(
                f"adapters named {adapter.name} differ: {digests[adapter.name]} at {peer.worker_id}, "
                f"{adapter.digest} at {info.worker_id}: give a changed adapter another name"
            )
