"""Chooses the workers of an attempt: filter, then policy, both pure.

    views of the registry + this router's work in flight
        ── filter: READY, reachable, same model and tokenizer, proven, big enough, has capacity
        ── policy: lowest cost, from cached prefix and load; ties by name
        ── Placement(prefill, decode), or the reason why there is none now

To add a policy, write another function with the signature of `prefill_cost` or `decode_cost`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from mesh.domain.kv import BlockHash, next_hash, root_hash
from mesh.domain.worker import WorkerInfo, WorkerRole, WorkerState
from router.workers.membership import WorkerView, capacity_tokens

# A prefill worker gets work for this many passes ahead: enough to never idle, not enough to build up a queue.
_PREFILL_PASSES_AHEAD = 2
# While workers wait to be proven, this many slots of a decode worker are reserved for canaries. The worker itself
# keeps one of them for prompts that wait for blocks there.
_CANARY_SLOTS = 2


@dataclass(frozen=True, slots=True)
class InFlight:
    """This router's work in flight at one worker.

    `num_blocks`: decode blocks that its sequences hold; `num_unreported_blocks`: the part that the worker's last report
    cannot include. `prefill_tokens`: prompt tokens sent and not yet computed; `short_prefill_tokens`: the part that
    belongs to short prompts (see `is_short`).
    """

    num_seqs: int = 0
    num_blocks: int = 0
    num_unreported_blocks: int = 0
    prefill_tokens: int = 0
    short_prefill_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker at the moment of placement."""

    view: WorkerView
    in_flight: InFlight

    @property
    def info(self) -> WorkerInfo:
        return self.view.info


class PrefixChain:
    """Block hashes of a prompt, computed lazily as far as some worker has them cached, and only once."""

    def __init__(self, token_ids: Sequence[int], kv_scope: str, whole_prompt: Sequence[int] = ()) -> None:
        self._token_ids = token_ids
        self._root = root_hash(kv_scope, whole_prompt)
        self._hashes: list[BlockHash] = []

    def num_cached_tokens(self, view: WorkerView) -> int:
        """Number of leading prompt tokens whose blocks this worker has cached."""
        if not view.cached:
            return 0
        size = view.info.layout.block_size
        num_blocks = 0
        while (num_blocks + 1) * size <= len(self._token_ids) and self._hash(num_blocks, size) in view.cached:
            num_blocks += 1
        return num_blocks * size

    def _hash(self, index: int, size: int) -> BlockHash:
        if index == len(self._hashes):
            parent = self._hashes[-1] if self._hashes else self._root
            self._hashes.append(next_hash(parent, self._token_ids[index * size : (index + 1) * size]))
        return self._hashes[index]


@dataclass(frozen=True, slots=True)
class PlacementQuery:
    """The needs of one attempt. `avoid`: incarnations of workers that failed this request. `num_seqs`: sequences that
    share the prompt. `adapter`: digest of the LoRA adapter that its workers must have; empty for none.
    """

    num_tokens: int
    max_total_tokens: int
    chain: PrefixChain
    num_seqs: int = 1
    avoid: frozenset[str] = frozenset()
    prefill_locally: bool = False
    adapter: str = ""

    def fits(self, info: WorkerInfo) -> bool:
        """True if the worker has the adapter that the attempt needs."""
        return not self.adapter or any(adapter.digest == self.adapter for adapter in info.adapters)


@dataclass(frozen=True, slots=True)
class Placement:
    """The workers of an attempt. Without a prefill worker the decode worker prefills the prompt itself."""

    prefill: WorkerInfo | None
    decode: WorkerInfo


class NoPlacement(Enum):
    """The reason why an attempt cannot be placed now."""

    NO_DECODE_WORKER = "no decode worker"
    NO_ADAPTER = "no decode worker has its adapter"
    NO_DECODE_CAPACITY = "no decode worker has capacity"
    NO_PREFILL_CAPACITY = "no prefill worker has capacity"
    AWAY = "the decode workers that could hold it are away"
    TOO_LARGE = "too large for every decode worker"


@dataclass(frozen=True, slots=True)
class MeshSnapshot:
    """The input of placement. `prefill_threshold` and `prefill_overflow` are settings of the router.

    Three sets hold incarnations: `unreachable` workers have no working connection, `unproven` workers need a canary,
    and `local_only` decode workers must prefill themselves.
    """

    views: Sequence[WorkerView]
    model: str
    tokenizer_fingerprint: str
    in_flight: Mapping[str, InFlight] = field(default_factory=dict)
    unreachable: frozenset[str] = frozenset()
    unproven: frozenset[str] = frozenset()
    local_only: frozenset[str] = frozenset()
    prefill_threshold: int = 0
    prefill_overflow: int = 0

    @property
    def num_canary_slots(self) -> int:
        """Slots of each decode worker that are reserved for canaries."""
        return _CANARY_SLOTS if self.unproven or self.local_only else 0


Cost = Callable[[PlacementQuery, Candidate], float]
"""A policy: placement chooses the candidate with the lowest cost."""


def place(query: PlacementQuery, snapshot: MeshSnapshot) -> Placement | NoPlacement:
    """Choose the workers of an attempt, or return why none fit now."""
    decoders = healthy(snapshot, WorkerRole.DECODE)
    if not decoders:
        return NoPlacement.NO_DECODE_WORKER
    decoders = [c for c in decoders if query.fits(c.info)]
    if not decoders:
        return NoPlacement.NO_ADAPTER
    big_enough = [c for c in decoders if capacity_tokens(c.info) >= query.max_total_tokens]
    if not big_enough:
        known = (view.info for view in snapshot.views if view.info.role is WorkerRole.DECODE)
        could_hold = any(capacity_tokens(info) >= query.max_total_tokens for info in known)
        return NoPlacement.AWAY if could_hold else NoPlacement.TOO_LARGE
    decode = _choose(
        query, [c for c in big_enough if decode_has_capacity(query, c, snapshot.num_canary_slots)], decode_cost
    )
    if decode is None:
        return NoPlacement.NO_DECODE_CAPACITY
    prefillers = [
        c
        for c in healthy(snapshot, WorkerRole.PREFILL)
        if query.fits(c.info) and capacity_tokens(c.info) >= query.num_tokens
    ]
    uncached = query.num_tokens - query.chain.num_cached_tokens(decode.view)
    locally = query.prefill_locally or decode.info.incarnation in snapshot.local_only
    if not prefillers or locally or uncached < snapshot.prefill_threshold:
        return Placement(None, decode.info)
    prefill = _choose(query, [c for c in prefillers if prefill_has_capacity(query, c)], prefill_cost)
    if prefill is None and decode.in_flight.prefill_tokens + uncached > snapshot.prefill_overflow:
        return NoPlacement.NO_PREFILL_CAPACITY
    return Placement(None if prefill is None else prefill.info, decode.info)


def usable(snapshot: MeshSnapshot) -> list[WorkerView]:
    """Return READY, reachable workers of this model and tokenizer, proven or not."""
    return [
        view
        for view in snapshot.views
        if view.state is WorkerState.READY
        and view.info.model == snapshot.model
        and view.info.tokenizer_fingerprint == snapshot.tokenizer_fingerprint
        and view.info.incarnation not in snapshot.unreachable
    ]


def healthy(snapshot: MeshSnapshot, role: WorkerRole) -> list[Candidate]:
    """Return workers of a role that may get clients' requests: usable and proven."""
    return [
        Candidate(view, snapshot.in_flight.get(view.info.incarnation, InFlight()))
        for view in usable(snapshot)
        if view.info.role is role and view.info.incarnation not in snapshot.unproven
    ]


def decode_has_capacity(query: PlacementQuery, candidate: Candidate, num_canary_slots: int = 0) -> bool:
    """True if there is a slot per sequence, besides those for canaries, and blocks for the prompt and 1-2 per
    sequence.

    More sequences than there are slots go to an empty worker. Free blocks have two lower bounds: the worker's last
    report minus blocks sent since, and all blocks minus this router's own. The first lags behind finished sequences,
    the second does not see shared prefixes; the higher one counts. The worker may still refuse.
    """
    info, in_flight = candidate.info, candidate.in_flight
    reported = candidate.view.load.free_blocks - in_flight.num_unreported_blocks
    free = max(reported, info.num_blocks - in_flight.num_blocks)
    needed = min(info.layout.num_blocks_for(query.num_tokens) + 2 * query.num_seqs - 1, info.num_blocks)
    num_slots = info.max_num_seqs - min(num_canary_slots, info.max_num_seqs // 2)
    return in_flight.num_seqs + max(1, min(query.num_seqs, num_slots)) <= num_slots and free >= needed


def is_short(num_tokens: int, info: WorkerInfo) -> bool:
    """True for prompts that fit into half of a pass: the worker computes them beside a long prompt."""
    return num_tokens <= info.max_batch_tokens // 2


def is_short_in(snapshot: MeshSnapshot) -> Callable[[PlacementQuery], bool]:
    """Return a predicate: is the prompt short for all prefill workers?"""
    workers = [candidate.info for candidate in healthy(snapshot, WorkerRole.PREFILL)]
    return lambda query: all(is_short(query.num_tokens, info) for info in workers)


def prefill_has_capacity(query: PlacementQuery, candidate: Candidate) -> bool:
    """True if the worker has memory and token budget for the prompt; an idle worker takes a prompt of any length.

    Short and long prompts have separate budgets: the worker gives half of each pass to its oldest prompt and the other
    half to short prompts, so neither kind waits for the other.
    """
    info, in_flight = candidate.info, candidate.in_flight
    if in_flight.num_seqs == 0:
        return True
    has_memory = in_flight.num_blocks + info.layout.num_blocks_for(query.num_tokens) <= info.num_blocks
    num_short = in_flight.short_prefill_tokens
    num_ahead = num_short if is_short(query.num_tokens, info) else in_flight.prefill_tokens - num_short
    return has_memory and num_ahead < _PREFILL_PASSES_AHEAD * info.max_batch_tokens


def prefill_cost(query: PlacementQuery, candidate: Candidate) -> float:
    """Tokens to compute until the first token: those ahead of the prompt and its own uncached ones.

    Long prompts ahead of a short one take as much of each pass as the short prompts do.
    """
    in_flight, uncached = candidate.in_flight, query.num_tokens - query.chain.num_cached_tokens(candidate.view)
    if not is_short(query.num_tokens, candidate.info):
        return in_flight.prefill_tokens + uncached
    num_long = in_flight.prefill_tokens - in_flight.short_prefill_tokens
    return in_flight.short_prefill_tokens + uncached + min(num_long, in_flight.short_prefill_tokens + uncached)


def decode_cost(query: PlacementQuery, candidate: Candidate) -> float:
    """The worker's utilisation minus the cached share of the prompt; both in [0, 1]."""
    info, in_flight = candidate.info, candidate.in_flight
    fullness = max(in_flight.num_seqs / max(1, info.max_num_seqs), in_flight.num_blocks / max(1, info.num_blocks))
    return fullness - query.chain.num_cached_tokens(candidate.view) / query.num_tokens


def _choose(query: PlacementQuery, candidates: Iterable[Candidate], cost: Cost) -> Candidate | None:
    """Return the cheapest candidate. Workers that failed this request are chosen only if there is no other."""
    return min(
        candidates,
        key=lambda c: (c.info.incarnation in query.avoid, cost(query, c), c.info.worker_id),
        default=None,
    )
