"""BlockTables: the blocks that sequences hold, from the slot that they get to their end. No tensors.

The scheduler says which sequence gets blocks; this file says which ones, and when each is freed:

    admit, reserve   blocks for all tokens of a sequence: cached ones (PrefixCache, Windows), those read from disk, and
                     new ones. In groups of layers with a window, those that are seen
    share            the blocks of another choice of the same prompt (CopyOnWrite)
    grow             blocks for the next token, or for drafts
    publish          full blocks and snapshots become findable: prefix cache
    trim             frees blocks of wrong drafts, and those behind windows
    free             frees all

The first entries of a table are the blocks of a recurrent state, if the model has one (`state_blocks`). Entries for
tokens follow, see KVGroups.
"""

from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future
from typing import Protocol

from engine.kv.block_pool import BlockPool
from engine.kv.block_sharing import CopyOnWrite, PrefixCache
from engine.kv.snapshots import Snapshots
from engine.kv.windows import Windows
from engine.sequence import BlockPayloads, SequenceState
from engine.settings import SchedulerConfig
from mesh.domain.block_hashes import BlockHash, group_hash
from mesh.domain.kv_groups import NO_BLOCK


class EvictedBlockStore(Protocol):
    """Where evicted blocks are kept. Plug point: engine.kv.disk.DiskCache, and fakes in tests."""

    def fetch(self, hashes: Sequence[BlockHash]) -> "Future[BlockPayloads]":
        """Start to read blocks that `BlockTables.missing` names, up to the first absent one without which later blocks
        are of no use. Any thread may call it.
        """
        ...

    def restore(self, block_ids: Sequence[int], payloads: Sequence[bytes]) -> None:
        """Copy payloads into blocks of the cache."""
        ...

    def close(self) -> None:
        """Keep what was evicted so far. Called once, at the end."""
        ...


class BlockTables:
    """The block tables of one scheduler. `evicted` keeps the blocks that the pool evicts, if anything does. `windows`,
    `copies` and `snapshots` are also told what a step computes.

    `admit` and `reserve` return False, and change nothing, if too few blocks would stay free for the running sequences
    `beside`, which will grow and would preempt the newcomer, and for `next_in_line`, which has waited for longer.
    """

    def __init__(self, config: SchedulerConfig, pool: BlockPool, evicted: EvictedBlockStore | None) -> None:
        self.evicted = evicted
        self._pool = pool
        self._groups = config.groups
        self._state_blocks = config.state_blocks
        self.windows = Windows(pool, self._groups, config.max_batch_tokens)
        self.copies = CopyOnWrite(pool, self._groups, config.state_blocks)
        self._prefixes = PrefixCache(
            pool, self._groups, config.prefix_caching, config.whole_prompts, config.state_blocks
        )
        self.snapshots = Snapshots(pool, config.block_size, config.state_blocks if config.prefix_caching else 0)

    def max_tokens(self, max_model_len: int) -> int:
        """The length of the longest sequence that fits, if it is alone."""
        num_blocks = self._pool.num_blocks - self._state_blocks
        return self._groups.max_tokens_in(num_blocks, self.windows.step_tokens, max_model_len)

    def missing(self, sequence: SequenceState) -> list[BlockHash]:
        """Hashes of the sequence's reusable blocks, from the first one that is not in memory on; with groups, those of
        all groups at each position. b"" stands for a block that is in memory.
        """
        hashes = self._prefixes.reusable(sequence)
        if self._state_blocks:
            return self.snapshots.missing(hashes)
        count, num_matched = self._groups.count, len(self.windows.match(hashes)) // self._groups.count
        names = [group_hash(each, group) for each in hashes[num_matched:] for group in range(count)]
        return [name if self._pool.find(name) is None else b"" for name in names]

    # -- a sequence gets blocks --------------------------------------------------------------------------------------

    def reserve(
        self, sequence: SequenceState, beside: Collection[SequenceState], next_in_line: SequenceState | None
    ) -> bool:
        """Allocate blocks for the whole prompt of a sequence whose KV another worker will send."""
        hashes, last = self._prefixes.hashes(sequence), sequence.num_tokens - 1
        if self._state_blocks:  # the last token is computed once more, and writes to its block
            hashes = hashes[: last // self._groups.block_size]
        matched = self.windows.match(hashes, last, sequence.from_disk)
        return self._allocate(sequence, hashes, matched, self._watermark(beside, next_in_line), last_seen=last)

    def admit(
        self, sequence: SequenceState, beside: Collection[SequenceState], next_in_line: SequenceState | None
    ) -> bool:
        """Allocate blocks for a sequence that is computed here."""
        hashes, watermark = self._prefixes.reusable(sequence), self._watermark(beside, next_in_line)
        if self._state_blocks and self.evicted is not None:
            self.snapshots.restore(sequence, hashes, self.evicted.restore)
        if not self._state_blocks:
            return self._allocate(sequence, hashes, self.windows.match(hashes, on_disk=sequence.from_disk), watermark)
        matched = self.windows.match(hashes)
        reused = self.snapshots.find(hashes[: len(matched)])
        snapshot = self._pool.snapshot(hashes[reused - 1]) if reused else ()
        # A snapshot stays while it is copied. Where there is no room for both, the sequence does without it.
        if not self._allocate(sequence, hashes, matched[:reused], watermark, snapshot) and not (
            reused and self._allocate(sequence, hashes, [], watermark)
        ):
            return False
        self.snapshots.begin(sequence, len(matched))
        return True

    def _watermark(self, beside: Collection[SequenceState], next_in_line: SequenceState | None) -> int:
        """Blocks that a newcomer must leave free."""
        watermark = self._headroom(beside) + self.windows.num_promised(beside)
        if next_in_line is not None:
            num_tokens, step_tokens = next_in_line.num_tokens, self.windows.step_tokens
            watermark += self._state_blocks + self._groups.num_blocks_at_once(num_tokens, step_tokens)
        return watermark

    def _headroom(self, running: Collection[SequenceState]) -> int:
        return len(running) * self._groups.count

    def _allocate(
        self,
        sequence: SequenceState,
        hashes: list[BlockHash],
        matched: Sequence[int | None],
        watermark: int,
        snapshot: Sequence[int] = (),
        last_seen: int | None = None,
    ) -> bool:
        """Give a sequence its block table: the blocks `matched` by `hashes`, in which None stands for a block on disk,
        then new ones for the rest of its tokens. Returns False, and changes nothing, if fewer than `watermark` blocks
        would stay free. The recurrent state begins as a copy of `snapshot`. `last_seen`: see `token` of
        `Windows.match`.
        """
        num_tokens, states = sequence.num_tokens, self._state_blocks
        num_reused = len(matched) // self._groups.count
        num_cached_tokens = num_reused * self._groups.block_size
        needs_block = self.windows.needs_block(num_tokens, num_reused, last_seen)[len(matched) :]
        cached = [block_id for block_id in matched if block_id is not None]
        num_new = states + matched.count(None) + sum(needs_block)
        if last_seen is None:
            watermark += self.windows.num_passing(num_tokens, num_cached_tokens)
        if num_new > self._pool.num_allocatable_beside([*cached, *snapshot]) - watermark:
            return False
        self._pool.hold([*cached, *snapshot, *[NO_BLOCK] * needs_block.count(False)])
        new = self._pool.allocate(num_new) or []
        state, blocks = new[:states], iter(new[states:])
        sequence.block_table += state
        sequence.block_table += [next(blocks) if block_id is None else block_id for block_id in matched]
        sequence.block_table += [next(blocks) if is_needed else NO_BLOCK for is_needed in needs_block]
        self.copies.plan_copies(snapshot, state[: len(snapshot)], sequence)
        self._restore(sequence, hashes, [index for index, block_id in enumerate(matched) if block_id is None])
        sequence.block_hashes = hashes[:num_reused]
        sequence.num_cached_tokens = sequence.num_computed_tokens = num_cached_tokens
        return True

    def _restore(self, sequence: SequenceState, hashes: list[BlockHash], entries: list[int]) -> None:
        """Copy KV from disk into the blocks of these entries of the sequence's table; 0 is the first one after the
        state's.
        """
        payloads, sequence.from_disk = sequence.from_disk, BlockPayloads()
        if self.evicted is not None and entries:
            blocks = [sequence.block_table[self._state_blocks + entry] for entry in entries]
            names = [group_hash(hashes[entry // self._groups.count], entry % self._groups.count) for entry in entries]
            self.evicted.restore(blocks, [payloads[name] for name in names])
            for block_id, name in zip(blocks, names, strict=True):
                self._pool.publish(block_id, name)

    def share(self, fork: SequenceState, origin: SequenceState) -> bool:
        """Give a fork the blocks of its origin, see `CopyOnWrite.share`. False, and no change, if no block is free."""
        if not self.copies.share(fork, origin):
            return False
        self.windows.free_behind(fork)
        return True

    # -- a sequence is computed --------------------------------------------------------------------------------------

    def grow(self, sequence: SequenceState) -> bool:
        """Allocate blocks for the next token if needed. False if too few are free now."""
        while len(sequence.block_table) < self._num_entries(sequence):
            blocks = self._pool.allocate(self._groups.count)
            if blocks is None:
                return False
            sequence.block_table += blocks
        return True

    def grow_for_drafts(self, sequence: SequenceState, num_drafts: int, running: Collection[SequenceState]) -> int:
        """Allocate blocks for up to `num_drafts` draft tokens; returns how many fit. Drafts leave what the `running`
        sequences are going to need.
        """
        size, count, states = self._groups.block_size, self._groups.count, self._state_blocks
        num_positions = self._groups.num_positions(sequence.num_tokens + num_drafts)
        num_missing = num_positions - (len(sequence.block_table) - states) // count
        num_new = max(0, min(num_missing, (self._pool.num_free - self._headroom(running)) // count))
        if num_new > 0:
            sequence.block_table += self._pool.allocate(num_new * count) or []
        return min(num_drafts, (len(sequence.block_table) - states) // count * size - sequence.num_tokens)

    def publish(self, sequence: SequenceState, end: int) -> None:
        """Make blocks findable that have become full, and the snapshot that a step up to position `end` has taken."""
        self._prefixes.publish(sequence)
        self.snapshots.publish(sequence, end)

    def trim(self, sequence: SequenceState) -> None:
        """Free blocks of drafts that were wrong, and those that no later token sees."""
        needed = self._num_entries(sequence)
        if len(sequence.block_table) > needed:
            self._pool.free(sequence.block_table[needed:])
            del sequence.block_table[needed:]
        self.windows.free_behind(sequence)

    def free(self, sequence: SequenceState) -> None:
        """Free all that a sequence holds."""
        self.copies.drop(sequence)
        self.snapshots.end(sequence)
        spec = sequence.spec
        self._pool.free(sequence.block_table, spec.cache_namespace, spec.cache_hints)
        sequence.block_table.clear()

    def unverified(self, sequence: SequenceState) -> list[int]:
        """The blocks into which a transfer writes the KV of a reserved sequence."""
        num_shared = sequence.num_cached_tokens // self._groups.block_size * self._groups.count
        states, table = self._state_blocks, sequence.block_table
        return [*table[:states], *table[states + num_shared :]]

    def check_integrity(self, holders: Iterable[SequenceState]) -> None:
        """Raise ValueError unless these sequences account for every held block."""
        self._pool.check_integrity([self.windows.null_blocks, *(sequence.held_blocks for sequence in holders)])

    def _num_entries(self, sequence: SequenceState) -> int:
        """Length of the table for all tokens that the sequence has."""
        return self._state_blocks + self._groups.num_positions(sequence.num_tokens) * self._groups.count
