"""KV blocks by id: reference counts, and an index of full blocks by content hash. No tensors.

In the BlockPool a block is indexed if its content can be found by hash and reused. It is held (reference count > 0,
indexed or not), cached (free and indexed), or blank (free and not indexed). Cached blocks are evicted only when no
blank block remains: oldest first, unless clients have said what their KV is worth (eviction.py). (PagedAttention, Kwon
et al. 2023, §4.3.)
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from engine.kv.eviction import EvictionQueue, Worth, combined, worth_of
from mesh.domain.block_hashes import BlockHash, state_block_hashes, state_hash
from mesh.domain.cache_hints import NO_HINTS, CacheHints, KeepPriority
from mesh.domain.worker import CacheEvent


@dataclass(slots=True)
class CacheLog:
    """Numbered cache events since the last `take`. Beyond `max_events` the log is dropped: readers notice the gap in
    the numbers and request a snapshot.
    """

    max_events: int
    next_number: int = 0
    _events: list[CacheEvent] = field(default_factory=list)

    def add(self, block_hash: BlockHash, *, evicted: bool) -> None:
        """Append the event that a block was indexed or evicted."""
        self.next_number += 1
        self._events.append(CacheEvent(block_hash, evicted))
        if len(self._events) > self.max_events:
            self._events.clear()

    def take(self) -> tuple[int, list[CacheEvent]]:
        """Remove all events; returns the number of the first one, and the events."""
        events, self._events = self._events, []
        return self.next_number - len(events), events


class BlockPool:
    """Allocates block ids `0 .. num_blocks - 1`. Freed blocks stay findable by the hash of their content.

    A snapshot is several blocks with a recurrent state, under the hash of the block at whose end the sequence had it.
    They are cached together, and leave together, at the latest with that block.

    `on_evict` is called with a block and its hash before the block is used anew, unless its content is worth nothing;
    for a snapshot with each block and its hash of `state_block_hashes`.
    `on_first_use` is called with each block that is allocated for the first time, in ascending order.
    `clock` measures times to live, in seconds.
    """

    def __init__(
        self,
        num_blocks: int,
        on_evict: Callable[[int, BlockHash], None] | None = None,
        on_first_use: Callable[[int], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_blocks = num_blocks
        self.log = CacheLog(max_events=4 * num_blocks)
        self._references = [0] * num_blocks
        self._hash_of: list[BlockHash | None] = [None] * num_blocks
        self._block_of: dict[BlockHash, int] = {}
        self._snapshots: dict[BlockHash, tuple[int, ...]] = {}
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._cached = EvictionQueue(num_blocks, clock)
        self._hinted: dict[int, Worth] = {}  # of the blocks that clients have given hints for
        # The conversation that used a block without a hint; "": unknown, or several. Hints of others count for less.
        self._unhinted: dict[int, str] = {}
        self._on_evict = on_evict
        self._on_first_use = on_first_use
        self._num_used = 0
        self._clock = clock

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now; cached ones count."""
        return len(self._blank) + len(self._cached)

    @property
    def indexed_hashes(self) -> list[BlockHash]:
        """Hashes of all blocks in the index, held or free, and those that announce snapshots."""
        return [*self._block_of, *map(state_hash, self._snapshots)]

    def match(self, hashes: Iterable[BlockHash]) -> list[int]:
        """Blocks with the longest indexed prefix of `hashes`. They are not held yet: call `hold` before `allocate`."""
        matched: list[int] = []
        for block_hash in hashes:
            block_id = self._block_of.get(block_hash)
            if block_id is None:
                break
            matched.append(block_id)
        return matched

    def find(self, block_hash: BlockHash) -> int | None:
        """The indexed block with this hash; see `match`."""
        return self._block_of.get(block_hash)

    def snapshot(self, block_hash: BlockHash) -> tuple[int, ...]:
        """Blocks with the state at the end of the block with this hash; none if there is no snapshot. `hold` them
        before `allocate`.
        """
        return self._snapshots.get(block_hash, ())

    def num_allocatable_beside(self, matched: Sequence[int]) -> int:
        """Blocks that could still be allocated once `matched` are held."""
        return self.num_free - sum(1 for block_id in matched if self._references[block_id] == 0)

    def hold(self, block_ids: Iterable[int]) -> None:
        """Add a holder to blocks found by `match`."""
        for block_id in block_ids:
            if self._references[block_id] == 0:
                self._cached.remove(block_id)
            self._references[block_id] += 1

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one holder and undefined content, or None (and no change) if fewer are free.

        Block ids are ascending: contiguous blocks are read and transferred faster.
        """
        if count > self.num_free:
            return None
        return sorted(self._take_one() for _ in range(count))

    def _take_one(self) -> int:
        if self._blank:
            block_id = self._blank.pop()
            if block_id == self._num_used:
                self._num_used += 1
                if self._on_first_use is not None:
                    self._on_first_use(block_id)
        else:
            block_id, is_worth_keeping = self._cached.take()
            self._forget_content(block_id, is_worth_keeping=is_worth_keeping)
        self._references[block_id] = 1
        return block_id

    def _forget_content(self, block_id: int, *, is_worth_keeping: bool) -> None:
        block_hash = self._hash_of[block_id]
        assert block_hash is not None
        if self._block_of[block_hash] != block_id:
            self._forget_snapshot(block_hash, taken=block_id, is_worth_keeping=is_worth_keeping)
            return
        if self._on_evict is not None and is_worth_keeping:
            self._on_evict(block_id, block_hash)
        self._forget_hash(block_id)
        del self._block_of[block_hash]
        self.log.add(block_hash, evicted=True)
        self._forget_snapshot(block_hash, is_worth_keeping=is_worth_keeping)

    def _forget_snapshot(
        self, block_hash: BlockHash, taken: int | None = None, *, is_worth_keeping: bool = False
    ) -> None:
        """Make the blocks of the snapshot, if there is one, blank, except one that is `taken` already. None is held: a
        holder of the snapshot would hold the block with this hash, too.
        """
        blocks = self._snapshots.pop(block_hash, ())
        if self._on_evict is not None and is_worth_keeping:
            for block_id, name in zip(blocks, state_block_hashes(block_hash, len(blocks)), strict=True):
                self._on_evict(block_id, name)
        for block_id in blocks:
            self._forget_hash(block_id)
            if block_id != taken:
                self._cached.remove(block_id)
                self._blank.append(block_id)
        if blocks:
            self.log.add(state_hash(block_hash), evicted=True)

    def _forget_hash(self, block_id: int) -> None:
        self._hinted.pop(block_id, None)
        self._unhinted.pop(block_id, None)
        self._hash_of[block_id] = None

    def publish(self, block_id: int, block_hash: BlockHash) -> None:
        """Index a held, complete block by the hash of its content. A second copy of the same content stays private."""
        if block_hash not in self._block_of and self._hash_of[block_id] is None:
            self._hash_of[block_id] = block_hash
            self._block_of[block_hash] = block_id
            self.log.add(block_hash, evicted=False)

    def publish_snapshot(self, block_ids: Sequence[int], block_hash: BlockHash) -> None:
        """Index held blocks as the snapshot at the end of an indexed block. A second one stays private."""
        if block_hash in self._block_of and block_hash not in self._snapshots:
            self._snapshots[block_hash] = tuple(block_ids)
            for block_id in block_ids:
                self._hash_of[block_id] = block_hash
            self.log.add(state_hash(block_hash), evicted=False)

    def drop_snapshot(self, block_hash: BlockHash) -> None:
        """Give up a snapshot, unless it is held."""
        if all(self._references[block_id] == 0 for block_id in self.snapshot(block_hash)):
            self._forget_snapshot(block_hash)

    def demote_snapshot(self, block_hash: BlockHash, tenant: str, conversation: str) -> None:
        """Evict a snapshot before all others, if it is not held, and only this conversation used it, without hints."""
        blocks = self.snapshot(block_hash)
        is_own = all(self._unhinted.get(each) == conversation and each not in self._hinted for each in blocks)
        if is_own and all(self._references[each] == 0 for each in blocks):
            for block_id in blocks:
                self._cached.remove(block_id)
                self._cached.add([block_id], Worth(tenant, conversation, KeepPriority.LOW))

    def free(self, block_ids: Sequence[int], tenant: str = "", hints: CacheHints = NO_HINTS) -> None:
        """Drop one holder of each block, with its tenant and its client's hints. Pass a sequence's blocks in order: the
        tail is then evicted first.

        Raises ValueError for a block that is not held.
        """
        worth = worth_of(tenant, hints, self._clock())
        may_differ = worth.is_hinted or bool(self._hinted)
        cached: list[int] = []
        for block_id in reversed(block_ids):
            if self._references[block_id] <= 0:
                raise ValueError(f"block {block_id} is freed but not held")
            self._references[block_id] -= 1
            is_indexed, is_free = self._hash_of[block_id] is not None, self._references[block_id] == 0
            own = self._note_worth(block_id, worth) if may_differ and is_indexed else worth
            if is_indexed and not worth.is_hinted:
                known = self._unhinted.setdefault(block_id, worth.conversation)
                if known and known != worth.conversation:
                    self._unhinted[block_id] = ""
            if not is_free:
                continue
            if not is_indexed:
                self._blank.append(block_id)
            elif own is worth:
                cached.append(block_id)
            else:
                self._cached.add([block_id], own)
        if cached:
            self._cached.add(cached, worth)

    def _note_worth(self, block_id: int, worth: Worth) -> Worth:
        """Record that a sequence to which the block has `worth` has released it; returns its worth from now on."""
        old = self._hinted.get(block_id)
        if old is None:
            conversation = self._unhinted.get(block_id)
            old = worth if conversation is None else Worth(worth.tenant, conversation)
        worth = combined(old, worth, self._clock())
        if worth.is_hinted:
            self._hinted[block_id] = worth
        else:
            self._hinted.pop(block_id, None)
        return worth

    def check_integrity(self, holders: Iterable[Sequence[int]]) -> None:
        """Raise ValueError unless the holders' block tables account for every reference. For tests and idle checks."""
        expected = [0] * self.num_blocks
        for table in holders:
            for block_id in table:
                expected[block_id] += 1
        if expected != self._references:
            wrong = [i for i in range(self.num_blocks) if expected[i] != self._references[i]]
            raise ValueError(f"blocks with wrong reference counts: {wrong[:10]}")
        free = sorted([*self._blank, *self._cached])
        if free != [i for i in range(self.num_blocks) if expected[i] == 0]:
            raise ValueError("free lists and reference counts differ")
        if any(self._hash_of[block_id] != block_hash for block_hash, block_id in self._block_of.items()):
            raise ValueError("the hash index points at blocks of other content")
        if any(self._hash_of[block_id] is not None for block_id in self._blank):
            raise ValueError("a blank block has content")
        for block_hash, blocks in self._snapshots.items():
            if block_hash not in self._block_of or len({self._references[block_id] for block_id in blocks}) != 1:
                raise ValueError("a snapshot is without its block, or held in part")
            if any(self._hash_of[block_id] != block_hash for block_id in blocks):
                raise ValueError("a snapshot has blocks of other content")
