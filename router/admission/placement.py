"""Chooses the workers of an attempt: filter, then policy, both pure.

    views of the registry + this router's work in flight
        ── filter: READY, reachable, same model and tokenizer, proven: a Roster for each role
        ── filter: has the adapter, big enough, has capacity
        ── policy: lowest cost, from cached prefix and this router's load; ties by reported load, then in the
                   router's own order, so that several routers do not all begin with the same worker
        ── Placement(prefill, decode), or the reason why there is none now

A Roster holds the figures of its workers as columns, so that a thousand workers cost little more than one. It lasts
until a worker joins, leaves, or is proven; loads change in place. To change the policy, change `prefill_cost` or
`decode_cost`, or what `place` asks of workers.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from mesh.domain.worker import WorkerInfo, WorkerRole, WorkerState
from router.admission.prefix_chain import PrefixChain
from router.admission.roster import InFlight, Mask, Numbers, Roster
from router.workers.membership import WorkerView, capacity_tokens

Costs = npt.NDArray[np.float64]
_Tokens = TypeVar("_Tokens", int, Numbers)

# A prefill worker gets work for this many steps ahead: enough to never idle, not enough to build up a queue.
_PREFILL_STEPS_AHEAD = 2
# While workers wait to be proven, this many slots of a decode worker are reserved for canaries. The worker itself
# keeps one of them for prompts that wait for blocks there.
_CANARY_SLOTS = 2
_KNOWN_AT_HOME = 0.5
_FACTOR_ALONE = 2  # of prefill_overflow, for a prompt that is alone at a decode worker
# A sequence that joins a batch costs each of its sequences about what so many prompt tokens would that are computed
# beside them: one for each token that it will still generate, of which most will come while they run.
_TOKENS_OF_SEQUENCE = 128


@dataclass(frozen=True, slots=True)
class PlacementQuery:
    """The needs of one attempt. `avoid`: incarnations of workers that failed this request; they are chosen only if
    there is no other. `cut_off`: incarnations of prefill workers whose KV did not arrive; they are not chosen at all.
    `num_seqs`: sequences that share the prompt. `adapter`: digest of the LoRA adapter that its workers must have; empty
    for none. `home`: incarnation of the decode worker that its conversation used last.
    """

    num_tokens: int
    max_total_tokens: int
    chain: PrefixChain
    num_seqs: int = 1
    avoid: frozenset[str] = frozenset()
    cut_off: frozenset[str] = frozenset()
    prefill_locally: bool = False
    adapter: str = ""
    home: str = ""


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


@dataclass(frozen=True)
class MeshSnapshot:
    """The input of placement. `prefill_threshold` and `prefill_overflow` are settings of the router; `router_id`: see
    Roster.

    Three sets hold incarnations: `unreachable` workers have no working connection, `unproven` workers need a canary,
    and `local_only` decode workers must prefill themselves. `views` and `in_flight` are those of the snapshot's
    creation; the rosters are brought up to date (`workers/mesh_view.py`).
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
    router_id: str = ""

    @property
    def num_canary_slots(self) -> int:
        """Slots of each decode worker that are reserved for canaries."""
        return _CANARY_SLOTS if self.unproven or self.local_only else 0

    @cached_property
    def usable(self) -> list[WorkerView]:
        """READY, reachable workers of this model and tokenizer, proven or not."""
        return [
            view
            for view in self.views
            if view.state is WorkerState.READY
            and view.info.model == self.model
            and view.info.tokenizer_fingerprint == self.tokenizer_fingerprint
            and view.info.incarnation not in self.unreachable
        ]

    @cached_property
    def prefill(self) -> Roster:
        """Prefill workers that may get clients' requests: usable and proven."""
        return self._roster(WorkerRole.PREFILL)

    @cached_property
    def decode(self) -> Roster:
        """Decode workers that may get clients' requests: usable and proven."""
        return self._roster(WorkerRole.DECODE)

    @cached_property
    def decode_capacities(self) -> frozenset[int]:
        """The lengths of the longest sequences that the known decode workers can hold, whatever their state."""
        return frozenset(capacity_tokens(view.info) for view in self.views if view.info.role is WorkerRole.DECODE)

    @cached_property
    def longest_short_tokens(self) -> float:
        """The longest prompt that is short for all prefill workers."""
        return min(longest_short(self.prefill.max_batch_tokens).tolist(), default=math.inf)

    def roster(self, role: WorkerRole) -> Roster:
        """The roster of a role."""
        return self.prefill if role is WorkerRole.PREFILL else self.decode

    def _roster(self, role: WorkerRole) -> Roster:
        proven = (view for view in self.usable if view.info.incarnation not in self.unproven)
        return Roster([view for view in proven if view.info.role is role], self.in_flight, self.router_id)


def place(query: PlacementQuery, snapshot: MeshSnapshot) -> Placement | NoPlacement:
    """Choose the workers of an attempt, or return why none fit now."""
    decoders = snapshot.decode
    if not len(decoders):
        return NoPlacement.NO_DECODE_WORKER
    fit = decoders.with_adapter(query.adapter)
    if not fit.any():
        return NoPlacement.NO_ADAPTER
    fit = fit & (decoders.capacity_tokens >= query.max_total_tokens)
    if not fit.any():
        could_hold = max(snapshot.decode_capacities, default=0) >= query.max_total_tokens
        return NoPlacement.AWAY if could_hold else NoPlacement.TOO_LARGE
    blocks = _num_blocks(query, decoders)
    fit = fit & decode_has_capacity(query, decoders, blocks, snapshot.num_canary_slots)
    if not fit.any():
        return NoPlacement.NO_DECODE_CAPACITY
    fit = _untried(query, decoders, fit)
    cached = query.chain.num_cached_at(decoders.views)
    row = _cheapest(decoders, fit, decode_cost(query, decoders, fit, cached, blocks))
    decode = decoders.views[row].info
    uncached = query.num_tokens - query.chain.num_reusable_tokens(decoders.views[row])
    locally = query.prefill_locally or decode.incarnation in snapshot.local_only
    prefillers = snapshot.prefill
    fit = prefillers.with_adapter(query.adapter) & (prefillers.capacity_tokens >= query.num_tokens)
    fit = _without(query.cut_off, prefillers, fit)
    if not fit.any() or locally or uncached < snapshot.prefill_threshold:
        return Placement(None, decode)
    fit = fit & prefill_has_capacity(query, prefillers)
    if not fit.any():
        helps = _helps(int(decoders.prefill_tokens[row]), uncached, snapshot.prefill_overflow)
        return Placement(None, decode) if helps else NoPlacement.NO_PREFILL_CAPACITY
    cost = prefill_cost(query, prefillers, query.chain.num_reusable_at(prefillers.views))
    return Placement(prefillers.views[_cheapest(prefillers, _untried(query, prefillers, fit), cost)].info, decode)


def _helps(own_tokens: int, uncached: int, overflow: int) -> bool:
    """True if a decode worker with `own_tokens` of prompts computes one of `uncached` tokens while prefill workers are
    full. One that has the worker to itself may be longer. Several short ones do better in the queue, where the next
    worker that is free takes them.
    """
    return own_tokens + uncached <= (overflow if own_tokens else _FACTOR_ALONE * overflow)


def decode_has_capacity(query: PlacementQuery, roster: Roster, blocks: Numbers, num_canary_slots: int) -> Mask:
    """The workers with a free slot for each sequence (canaries' slots do not count), and with free blocks for the
    prompt, which takes `blocks`, plus one or two per sequence.

    More sequences than there are slots go to an empty worker. Free blocks have two lower bounds: the worker's last
    report minus blocks sent since, and all blocks minus this router's own. The first lags behind finished sequences,
    the second does not see shared prefixes; the higher one counts. The worker may still refuse.
    """
    free = np.maximum(roster.free_blocks - roster.unreported_blocks, roster.num_blocks - roster.held_blocks)
    num_groups = roster.num_groups
    needed = blocks + (query.num_seqs - 1) * (roster.state_blocks + 2 * num_groups) + num_groups
    num_slots = roster.max_num_seqs - np.minimum(num_canary_slots, roster.max_num_seqs // 2)
    num_new_seqs = np.maximum(1, np.minimum(query.num_seqs, num_slots))
    return (roster.num_seqs + num_new_seqs <= num_slots) & (free >= np.minimum(needed, roster.num_blocks))


def longest_short(max_batch_tokens: _Tokens) -> _Tokens:
    """The longest prompt that is short for a worker, or for each of many: one that fits into half of a step, so that
    the worker computes it beside a long prompt.
    """
    return max_batch_tokens // 2


def is_short_in(snapshot: MeshSnapshot) -> Callable[[PlacementQuery], bool]:
    """Return a predicate: is the prompt short for all prefill workers?"""
    longest = snapshot.longest_short_tokens
    return lambda query: query.num_tokens <= longest


def prefill_has_capacity(query: PlacementQuery, roster: Roster) -> Mask:
    """The workers with memory and token budget for the prompt; an idle worker takes a prompt of any length.

    Short and long prompts have separate budgets: the worker gives half of each step to its oldest prompt and the other
    half to short prompts, so neither kind waits for the other.
    """
    has_memory = roster.held_blocks + _num_blocks(query, roster) <= roster.num_blocks
    num_short = roster.short_prefill_tokens
    num_ahead = np.where(_is_short_at(query, roster), num_short, roster.prefill_tokens - num_short)
    has_budget = num_ahead < _PREFILL_STEPS_AHEAD * roster.max_batch_tokens
    idle: Mask = roster.num_seqs == 0
    return idle | (has_memory & has_budget)


def prefill_cost(query: PlacementQuery, roster: Roster, cached: Numbers) -> Costs:
    """Tokens to compute until the first token: those ahead of the prompt and its own uncached ones. `cached`: the
    prompt's tokens that each worker has cached.

    Long prompts ahead of a short one take as much of each step as the short prompts do.
    """
    uncached = query.num_tokens - cached
    num_long = roster.prefill_tokens - roster.short_prefill_tokens
    short_tokens = roster.short_prefill_tokens + uncached
    beside_long = short_tokens + np.minimum(num_long, short_tokens)
    return np.where(_is_short_at(query, roster), beside_long, roster.prefill_tokens + uncached).astype(np.float64)


def decode_cost(query: PlacementQuery, roster: Roster, fit: Mask, cached: Numbers, blocks: Numbers) -> Costs:
    """The worker's utilisation; and for each `_TOKENS_OF_SEQUENCE` prompt tokens that it lacks and another one that
    fits has cached, once more its utilisation with this sequence, whose prompt takes `blocks`.

    A token to compute there delays every sequence in the batch, as a further sequence does for each token. So tokens
    count, not their share of the prompt: a short template that all prompts have in common draws no crowd to a worker,
    and a long conversation stays with its KV. Where prefill workers compute, a token counts as much: it is sent. The
    conversation's home counts as if it had cached some of the prompt: it may not have reported it yet, or have it on
    disk.
    """
    utilisation = np.maximum(roster.num_seqs * roster.share_of_slot, roster.held_blocks * roster.share_of_block)
    known = cached.astype(np.float64)
    home = roster.row(query.home)
    if home is not None:
        known[home] = max(known[home], _KNOWN_AT_HOME * query.num_tokens)
    most = known.max(where=fit, initial=0.0)
    if not most:
        return np.asarray(utilisation)
    with_this = utilisation + np.maximum(roster.share_of_slot, blocks * roster.share_of_block)
    return np.asarray(utilisation + with_this * ((most - known) / _TOKENS_OF_SEQUENCE))


def _num_blocks(query: PlacementQuery, roster: Roster) -> Numbers:
    positions = -(-query.num_tokens // roster.block_size)
    return np.asarray(roster.state_blocks + np.minimum(positions[:, None], roster.most_blocks).sum(1))


def _is_short_at(query: PlacementQuery, roster: Roster) -> Mask:
    return np.asarray(query.num_tokens <= longest_short(roster.max_batch_tokens))


def _untried(query: PlacementQuery, roster: Roster, fit: Mask) -> Mask:
    """The workers that fit and have not failed this request; if there are none, all that fit."""
    untried = _without(query.avoid, roster, fit)
    return untried if untried.any() else fit


def _cheapest(roster: Roster, fit: Mask, cost: Costs) -> int:
    """The row of the cheapest worker that fits. Of equal ones the one with the fewest sequences by its last report,
    which counts those of other routers, too; the first of these.
    """
    cost = np.where(fit, cost, np.inf)
    return int(np.argmin(np.where(cost == cost.min(), roster.reported_seqs, np.inf)))


def _without(incarnations: frozenset[str], roster: Roster, fit: Mask) -> Mask:
    """The workers that fit, without these runs of workers."""
    if not incarnations:
        return fit
    remaining = fit.copy()
    for incarnation in incarnations:
        row = roster.row(incarnation)
        if row is not None:
            remaining[row] = False
    return remaining
