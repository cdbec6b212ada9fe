"""Placement one worker at a time, as it is defined: what `router/admission/placement.py` computes in columns must equal
it. Likewise the sums of claims, added up."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from mesh.domain.worker import WorkerInfo, WorkerRole
from router.admission.in_flight import CapacityClaim
from router.admission.placement import MeshSnapshot, NoPlacement, Placement, PlacementQuery
from router.admission.roster import InFlight
from router.workers.membership import WorkerView, capacity_tokens

_PREFILL_PASSES_AHEAD = 2
_REPORT_DELAY_S = 0.1
_TOKENS_OF_SEQUENCE = 128


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker at the moment of placement."""

    view: WorkerView
    in_flight: InFlight

    @property
    def info(self) -> WorkerInfo:
        return self.view.info


Cost = Callable[[PlacementQuery, Candidate], float]


def is_short(num_tokens: int, info: WorkerInfo) -> bool:
    """True for prompts that fit into half of a step."""
    return num_tokens <= info.max_batch_tokens // 2


def place(query: PlacementQuery, snapshot: MeshSnapshot) -> Placement | NoPlacement:
    """Choose the workers of an attempt, or return why none fit now."""
    decoders = healthy(snapshot, WorkerRole.DECODE)
    if not decoders:
        return NoPlacement.NO_DECODE_WORKER
    decoders = [c for c in decoders if _fits(query, c.info)]
    if not decoders:
        return NoPlacement.NO_ADAPTER
    big_enough = [c for c in decoders if capacity_tokens(c.info) >= query.max_total_tokens]
    if not big_enough:
        known = (view.info for view in snapshot.views if view.info.role is WorkerRole.DECODE)
        could_hold = any(capacity_tokens(info) >= query.max_total_tokens for info in known)
        return NoPlacement.AWAY if could_hold else NoPlacement.TOO_LARGE
    fit = [c for c in big_enough if decode_has_capacity(query, c, snapshot.num_canary_slots)]
    fit = [c for c in fit if c.info.incarnation not in query.avoid] or fit
    most = max((num_known_tokens(query, c) for c in fit), default=0.0)
    decode = _choose(query, fit, lambda query, c: decode_cost(query, c, most))
    if decode is None:
        return NoPlacement.NO_DECODE_CAPACITY
    prefillers = [
        c
        for c in healthy(snapshot, WorkerRole.PREFILL)
        if _fits(query, c.info)
        and capacity_tokens(c.info) >= query.num_tokens
        and c.info.incarnation not in query.cut_off
    ]
    uncached = query.num_tokens - query.chain.num_reusable_tokens(decode.view)
    locally = query.prefill_locally or decode.info.incarnation in snapshot.local_only
    if not prefillers or locally or uncached < snapshot.prefill_threshold:
        return Placement(None, decode.info)
    prefill = _choose(query, [c for c in prefillers if prefill_has_capacity(query, c)], prefill_cost)
    if prefill is None and not helps(decode, uncached, snapshot.prefill_overflow):
        return NoPlacement.NO_PREFILL_CAPACITY
    return Placement(None if prefill is None else prefill.info, decode.info)


def helps(decode: Candidate, uncached: int, overflow: int) -> bool:
    """A decode worker takes one prompt of up to twice as many tokens, or several that do not exceed the limit."""
    own = decode.in_flight.prefill_tokens
    return own + uncached <= overflow or (own == 0 and uncached <= 2 * overflow)


def _fits(query: PlacementQuery, info: WorkerInfo) -> bool:
    return not query.adapter or any(adapter.digest == query.adapter for adapter in info.adapters)


def healthy(snapshot: MeshSnapshot, role: WorkerRole) -> list[Candidate]:
    """Return workers of a role that may get clients' requests: usable and proven."""
    return [
        Candidate(view, snapshot.in_flight.get(view.info.incarnation, InFlight()))
        for view in snapshot.usable
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
    in_flight, uncached = candidate.in_flight, query.num_tokens - query.chain.num_reusable_tokens(candidate.view)
    if not is_short(query.num_tokens, candidate.info):
        return in_flight.prefill_tokens + uncached
    num_long = in_flight.prefill_tokens - in_flight.short_prefill_tokens
    return in_flight.short_prefill_tokens + uncached + min(num_long, in_flight.short_prefill_tokens + uncached)


def num_known_tokens(query: PlacementQuery, candidate: Candidate) -> float:
    """The prompt's cached tokens, at the conversation's home at least half of the prompt."""
    at_home = query.num_tokens / 2 if candidate.info.incarnation == query.home else 0.0
    return max(query.chain.num_cached_tokens(candidate.view), at_home)


def decode_cost(query: PlacementQuery, candidate: Candidate, most: float) -> float:
    """The worker's utilisation, and once more, with this sequence, for each `_TOKENS_OF_SEQUENCE` tokens that it
    lacks of the `most` that any candidate has."""
    info, in_flight = candidate.info, candidate.in_flight
    slot, block = 1 / max(1, info.max_num_seqs), 1 / max(1, info.num_blocks)
    utilisation = max(in_flight.num_seqs * slot, in_flight.num_blocks * block)
    with_this = utilisation + max(slot, info.layout.num_blocks_for(query.num_tokens) * block)
    return utilisation + with_this * ((most - num_known_tokens(query, candidate)) / _TOKENS_OF_SEQUENCE)


def _choose(query: PlacementQuery, candidates: Iterable[Candidate], cost: Cost) -> Candidate | None:
    """Return the cheapest candidate. Workers that failed this request are chosen only if there is no other."""
    return min(
        candidates,
        key=lambda c: (c.info.incarnation in query.avoid, cost(query, c), _num_reported(c.view), c.info.worker_id),
        default=None,
    )


def _num_reported(view: WorkerView) -> int:
    return view.load.num_running + view.load.num_waiting


def sums_of(claims: Iterable[CapacityClaim], views: Iterable[WorkerView]) -> Mapping[str, InFlight]:
    """The sum of the claims of each worker, by incarnation."""
    last_seen_s = {view.info.incarnation: view.last_seen_s for view in views}
    sums: dict[str, InFlight] = {}

    def add(info: WorkerInfo, more: InFlight) -> None:
        sums[info.incarnation] = sums.get(info.incarnation, InFlight()).plus(more)

    for claim in claims:
        decode, prefill = claim.placement.decode, claim.placement.prefill
        blocks = decode.layout.num_blocks_for(claim.num_tokens) + 1
        blocks -= claim.num_shared_tokens // decode.layout.block_size
        seen_s, confirmed_s = last_seen_s.get(decode.incarnation, 0.0), claim.confirmed_at_s
        reported = confirmed_s is not None and seen_s > confirmed_s + _REPORT_DELAY_S
        own_tokens = claim.prefill_tokens if prefill is None else 0
        add(decode, InFlight(1, blocks, 0 if reported else blocks, own_tokens))
        if prefill is not None and claim.holds_prefill:
            blocks = prefill.layout.num_blocks_for(claim.num_tokens)
            short_tokens = claim.prefill_tokens if is_short(claim.prefill_tokens, prefill) else 0
            add(prefill, InFlight(1, blocks, 0, claim.prefill_tokens, short_tokens))
    return sums
