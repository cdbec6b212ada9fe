"""Which workers serve an attempt: filter, then policy, both pure.

    views of the registry + what this router has in flight
        ── filter: READY, reachable, same model and tokenizer, proven, big enough, has room
        ── policy: cached prefix minus load; equal ones by name
        ── Placement(prefill, decode), or why there is none now

To add a policy, write another function with the signature of `prefill_cost` or `decode_cost`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from mesh.domain.prefix import BlockHash, next_hash, root_hash
from mesh.domain.worker import WorkerInfo, WorkerRole, WorkerState
from mesh.registry.membership import WorkerView
from router.limits import capacity_tokens

# A prefill worker gets work for this many passes ahead, so that it never idles and never hoards.
_PREFILL_PASSES_AHEAD = 2
# While workers wait to be proven, clients leave so many seats of a decode worker to canaries; it keeps one of them for
# prompts that wait for room there.
_CANARY_SEATS = 2


@dataclass(frozen=True, slots=True)
class InFlight:
    """What this router has in flight at one worker.

    `num_blocks`: decode blocks its sequences hold; `num_unreported_blocks`: those of them that the worker's last report
    cannot contain. `prefill_tokens`: prompt tokens sent and not computed.
    """

    num_seqs: int = 0
    num_blocks: int = 0
    num_unreported_blocks: int = 0
    prefill_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker at the moment of the choice."""

    view: WorkerView
    in_flight: InFlight

    @property
    def info(self) -> WorkerInfo:
        """Who it is."""
        return self.view.info


class PrefixChain:
    """Block hashes of a prompt, computed as far as somebody has them cached, and only once."""

    def __init__(self, token_ids: Sequence[int], namespace: str, whole_prompt: Sequence[int] = ()) -> None:
        self._token_ids = token_ids
        self._root = root_hash(namespace, whole_prompt)
        self._hashes: list[BlockHash] = []

    def num_cached_tokens(self, view: WorkerView) -> int:
        """Leading prompt tokens whose blocks this worker has cached."""
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
    """What an attempt needs. `avoid` holds incarnations of workers that failed this request. `num_seqs` sequences are
    to share its prompt."""

    num_tokens: int
    max_total_tokens: int
    chain: PrefixChain
    num_seqs: int = 1
    avoid: frozenset[str] = frozenset()
    prefill_locally: bool = False


@dataclass(frozen=True, slots=True)
class Placement:
    """Where an attempt runs. Without a prefill worker the decode worker prefills the prompt itself."""

    prefill: WorkerInfo | None
    decode: WorkerInfo


class NoPlacement(Enum):
    """Why an attempt cannot be placed now."""

    NO_DECODE_WORKER = "no decode worker"
    NO_DECODE_ROOM = "no decode worker has room"
    NO_PREFILL_ROOM = "no prefill worker has room"
    AWAY = "those decode workers that could hold it are away"
    TOO_LARGE = "too large for every decode worker"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that placement looks at. Three sets hold incarnations: `unreachable` of workers the router has no working
    connection to, `unproven` of those it does not trust, `local_only` of decode workers that have to prefill. The two
    numbers are settings of the router.
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
    def num_canary_seats(self) -> int:
        """Seats of each decode worker that canaries may need."""
        return _CANARY_SEATS if self.unproven or self.local_only else 0


Cost = Callable[[PlacementQuery, Candidate], float]
"""A policy: the candidate with the lowest cost is chosen."""


def place(query: PlacementQuery, snapshot: Snapshot) -> Placement | NoPlacement:
    """Choose workers for an attempt."""
    decoders = healthy(snapshot, WorkerRole.DECODE)
    if not decoders:
        return NoPlacement.NO_DECODE_WORKER
    big_enough = [c for c in decoders if capacity_tokens(c.info) >= query.max_total_tokens]
    if not big_enough:
        known = (view.info for view in snapshot.views if view.info.role is WorkerRole.DECODE)
        could_hold = any(capacity_tokens(info) >= query.max_total_tokens for info in known)
        return NoPlacement.AWAY if could_hold else NoPlacement.TOO_LARGE
    decode = _choose(
        query, [c for c in big_enough if decode_has_room(query, c, snapshot.num_canary_seats)], decode_cost
    )
    if decode is None:
        return NoPlacement.NO_DECODE_ROOM
    prefillers = [c for c in healthy(snapshot, WorkerRole.PREFILL) if capacity_tokens(c.info) >= query.num_tokens]
    uncached = query.num_tokens - query.chain.num_cached_tokens(decode.view)
    locally = query.prefill_locally or decode.info.incarnation in snapshot.local_only
    if not prefillers or locally or uncached < snapshot.prefill_threshold:
        return Placement(None, decode.info)
    prefill = _choose(query, [c for c in prefillers if prefill_has_room(query, c)], prefill_cost)
    if prefill is None and decode.in_flight.prefill_tokens + uncached > snapshot.prefill_overflow:
        return NoPlacement.NO_PREFILL_ROOM
    return Placement(None if prefill is None else prefill.info, decode.info)


def usable(snapshot: Snapshot) -> list[WorkerView]:
    """Workers that are READY, reachable, and speak this model's tokens: proven or not."""
    return [
        view
        for view in snapshot.views
        if view.state is WorkerState.READY
        and view.info.model == snapshot.model
        and view.info.tokenizer_fingerprint == snapshot.tokenizer_fingerprint
        and view.info.incarnation not in snapshot.unreachable
    ]


def healthy(snapshot: Snapshot, role: WorkerRole) -> list[Candidate]:
    """Workers of a role that may get clients' requests: usable and proven."""
    return [
        Candidate(view, snapshot.in_flight.get(view.info.incarnation, InFlight()))
        for view in usable(snapshot)
        if view.info.role is role and view.info.incarnation not in snapshot.unproven
    ]


def decode_has_room(query: PlacementQuery, candidate: Candidate, num_canary_seats: int = 0) -> bool:
    """A seat for each sequence, beside those for canaries, and blocks for the prompt and one or two more for each. More
    sequences than there are seats go to an empty worker.

    Two bounds hold for the free blocks: what the worker last reported minus what was sent since, and all blocks minus
    what this router has there. The first lags behind finished sequences, the second does not see shared prefixes; the
    better one counts. The worker itself has the last word.
    """
    info, mine = candidate.info, candidate.in_flight
    reported = candidate.view.load.free_blocks - mine.num_unreported_blocks
    free = max(reported, info.num_blocks - mine.num_blocks)
    needed = min(info.layout.num_blocks_for(query.num_tokens) + 2 * query.num_seqs - 1, info.num_blocks)
    num_seats = info.max_num_seqs - min(num_canary_seats, info.max_num_seqs // 2)
    return mine.num_seqs + max(1, min(query.num_seqs, num_seats)) <= num_seats and free >= needed


def prefill_has_room(query: PlacementQuery, candidate: Candidate) -> bool:
    """Memory for the prompt, and under its token budget; an idle worker takes a prompt of any length."""
    info, mine = candidate.info, candidate.in_flight
    if mine.num_seqs == 0:
        return True
    has_memory = mine.num_blocks + info.layout.num_blocks_for(query.num_tokens) <= info.num_blocks
    return has_memory and mine.prefill_tokens < _PREFILL_PASSES_AHEAD * info.max_batch_tokens


def prefill_cost(query: PlacementQuery, candidate: Candidate) -> float:
    """Tokens to compute before the first token comes: those ahead of it, and its own uncached ones."""
    return candidate.in_flight.prefill_tokens + query.num_tokens - query.chain.num_cached_tokens(candidate.view)


def decode_cost(query: PlacementQuery, candidate: Candidate) -> float:
    """How full the worker is, minus the part of the prompt that need not be sent; both in [0, 1]."""
    info, mine = candidate.info, candidate.in_flight
    fullness = max(mine.num_seqs / max(1, info.max_num_seqs), mine.num_blocks / max(1, info.num_blocks))
    return fullness - query.chain.num_cached_tokens(candidate.view) / query.num_tokens


def _choose(query: PlacementQuery, candidates: Iterable[Candidate], cost: Cost) -> Candidate | None:
    """The cheapest candidate; those that failed this request before only if there is no other."""
    return min(
        candidates,
        key=lambda c: (c.info.incarnation in query.avoid, cost(query, c), c.info.worker_id),
        default=None,
    )
