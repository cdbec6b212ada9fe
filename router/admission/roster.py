"""Roster: the workers of one role, with their sizes and loads as columns, as placement asks all of them at once."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from mesh.domain.kv_groups import KVGroups
from router.workers.membership import WorkerView, capacity_tokens

Numbers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_ALL_BLOCKS = 1 << 40
"""The limit of a group that sees all tokens: none."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """This router's work in flight at one worker.

    `num_blocks`: decode blocks that its sequences hold; `num_unreported_blocks`: the part that the worker's last report
    cannot include. `prefill_tokens`: prompt tokens sent and not yet computed; `short_prefill_tokens`: the part that
    belongs to short prompts (see `longest_short`).
    """

    num_seqs: int = 0
    num_blocks: int = 0
    num_unreported_blocks: int = 0
    prefill_tokens: int = 0
    short_prefill_tokens: int = 0

    def plus(self, other: "InFlight", sign: int = 1) -> "InFlight":
        """The sum of both; the difference if `sign` is -1."""
        return InFlight(
            self.num_seqs + sign * other.num_seqs,
            self.num_blocks + sign * other.num_blocks,
            self.num_unreported_blocks + sign * other.num_unreported_blocks,
            self.prefill_tokens + sign * other.prefill_tokens,
            self.short_prefill_tokens + sign * other.short_prefill_tokens,
        )


class Roster:
    """Workers of one role that may get clients' requests. Each array has an element for each worker.

    They are in the order of their ids; with `router_id`, in one that each router has for itself (rendezvous hashing,
    Thaler and Ravishankar 1998).
    """

    def __init__(self, views: Sequence[WorkerView], in_flight: Mapping[str, InFlight], router_id: str = "") -> None:
        self.views = sorted(views, key=lambda view: _rank(view.info.worker_id, router_id))
        infos = [view.info for view in self.views]
        self._rows = {info.incarnation: row for row, info in enumerate(infos)}
        self.capacity_tokens = _column(capacity_tokens(info) for info in infos)
        self.max_num_seqs = _column(info.max_num_seqs for info in infos)
        self.max_batch_tokens = _column(info.max_batch_tokens for info in infos)
        self.num_blocks = _column(info.num_blocks for info in infos)
        self.block_size = _column(info.layout.block_size for info in infos)
        self.state_blocks = _column(info.layout.state_blocks for info in infos)
        self.most_blocks = _most_blocks([info.layout.groups for info in infos])
        self.num_groups = _column(info.layout.groups.count for info in infos)
        self.share_of_slot = 1 / np.maximum(1, self.max_num_seqs)
        self.share_of_block = 1 / np.maximum(1, self.num_blocks)
        self.free_blocks = _column(view.load.free_blocks for view in self.views)
        self.reported_seqs = _column(_reported_seqs(view) for view in self.views)
        self.num_seqs, self.held_blocks, self.unreported_blocks = (np.zeros(len(infos), np.int64) for _ in range(3))
        self.prefill_tokens, self.short_prefill_tokens = (np.zeros(len(infos), np.int64) for _ in range(2))
        self._all = np.ones(len(infos), np.bool_)
        for info in infos:
            self.set_in_flight(info.incarnation, in_flight.get(info.incarnation, InFlight()))

    def __len__(self) -> int:
        return len(self.views)

    def row(self, incarnation: str) -> int | None:
        """The place of a worker in the arrays; None if it is not there."""
        return self._rows.get(incarnation)

    def set_load(self, view: WorkerView) -> None:
        """A worker has reported, and only its load or its prefix cache is new. Ignored if it is not there."""
        row = self.row(view.info.incarnation)
        if row is not None:
            self.views[row] = view
            self.free_blocks[row] = view.load.free_blocks
            self.reported_seqs[row] = _reported_seqs(view)

    def set_in_flight(self, incarnation: str, work: InFlight) -> None:
        """This router's work at a worker has changed. Ignored if it is not there."""
        row = self.row(incarnation)
        if row is not None:
            self.num_seqs[row] = work.num_seqs
            self.held_blocks[row] = work.num_blocks
            self.unreported_blocks[row] = work.num_unreported_blocks
            self.prefill_tokens[row] = work.prefill_tokens
            self.short_prefill_tokens[row] = work.short_prefill_tokens

    def busy_share(self) -> float:
        """Share of workers that have prompts, of this router or of others; 0.0 without workers."""
        pending = _column(view.load.pending_tokens for view in self.views)
        return float(np.mean((self.prefill_tokens > 0) | (pending > 0))) if self.views else 0.0

    def used_share(self) -> float:
        """Mean share of slots or of KV blocks in use, whichever is larger at a worker; 0.0 without workers."""
        if not self.views:
            return 0.0
        slots = np.maximum(self.reported_seqs, self.num_seqs) / np.maximum(1, self.max_num_seqs)
        blocks = np.maximum(self.num_blocks - self.free_blocks, self.held_blocks) / np.maximum(1, self.num_blocks)
        return float(np.mean(np.maximum(slots, blocks)))

    def with_adapter(self, digest: str) -> Mask:
        """The workers that have this adapter; all for "", which is none. Not to be changed in place."""
        if not digest:
            return self._all
        has = (any(adapter.digest == digest for adapter in view.info.adapters) for view in self.views)
        return np.fromiter(has, np.bool_, len(self))


def _rank(worker_id: str, router_id: str) -> tuple[bytes, str]:
    return blake2b(f"{router_id} {worker_id}".encode()).digest() if router_id else b"", worker_id


def _reported_seqs(view: WorkerView) -> int:
    return view.load.num_running + view.load.num_waiting


def _column(values: Iterable[int]) -> Numbers:
    return np.array(list(values), np.int64)


def _most_blocks(of_workers: Sequence[KVGroups]) -> Numbers:
    """The most blocks of each group that a sequence holds, [workers, groups]; 0 for groups that a worker lacks."""
    most = np.zeros((len(of_workers), max((groups.count for groups in of_workers), default=1)), np.int64)
    for row, groups in enumerate(of_workers):
        for group, window in enumerate(groups.windows):
            most[row, group] = groups.most_visible(group) if window else _ALL_BLOCKS
    return most
