"""Blocks that sequences share: the prefix cache, and copy on write. Parts of BlockTables (block_tables.py); no tensors.

PrefixCache finds indexed blocks with a sequence's leading tokens, and publishes the sequence's own full blocks.
(Hash-chained prefix caching as in vLLM.)

CopyOnWrite is for blocks that two sequences will write to. Several choices of one prompt, its forks, share the prompt's
full blocks. The last, partly filled block is copied before the fork's first step; until then the fork also holds the
original. A recurrent state is written by both, too: it is copied before the next step of any sequence. A sequence that
continues from a snapshot (snapshots.py) copies its state as a fork does.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.kv.block_pool import BlockPool
from engine.sequence import SequenceState
from mesh.domain.block_hashes import BlockHash, block_hashes, group_hash, next_hash, root_hash
from mesh.domain.kv_groups import NO_BLOCK, KVGroups


@dataclass(frozen=True, slots=True)
class PrefixCache:
    """The prefix cache of one scheduler. If it is not `enabled`, it finds and publishes nothing.

    `whole_prompts`: see SchedulerConfig. `state_blocks` come before those of tokens in a block table.
    """

    pool: BlockPool
    groups: KVGroups
    enabled: bool
    whole_prompts: bool
    state_blocks: int

    @property
    def block_size(self) -> int:
        return self.groups.block_size

    def hashes(self, sequence: SequenceState) -> list[BlockHash]:
        """Hashes of all blocks that were full when the sequence came. Computed once, for the look-up and `publish`."""
        if not self.enabled:
            return []
        if sequence.known_hashes is None:
            sequence.known_hashes = block_hashes(sequence.token_ids, self.block_size, *self._scope(sequence))
        return sequence.known_hashes

    def reusable(self, sequence: SequenceState) -> list[BlockHash]:
        """Hashes of the leading blocks that the sequence may reuse if they are indexed. They exclude the last token."""
        if sequence.spec.prompt_logprobs:
            return []
        # The last token is always computed: the first sample is drawn from its logits.
        hashes = self.hashes(sequence)[: (sequence.num_tokens - 1) // self.block_size]
        if self.whole_prompts:
            num_cached_tokens = len(self.pool.match(hashes)) * self.block_size
            return hashes if num_cached_tokens >= sequence.num_prompt_tokens - 1 else []
        return hashes

    def publish(self, sequence: SequenceState) -> None:
        """Add blocks of the sequence that have become full to the index."""
        if not self.enabled:
            return
        hashes = sequence.block_hashes
        while (len(hashes) + 1) * self.block_size <= sequence.num_computed_tokens:
            first = self.state_blocks + len(hashes) * self.groups.count
            hashes.append(self._hash_after(sequence, hashes))
            for group in range(self.groups.count):
                block_id = sequence.block_table[first + group]
                if block_id != NO_BLOCK or not self.groups.have_windows:
                    self.pool.publish(block_id, group_hash(hashes[-1], group))

    def _hash_after(self, sequence: SequenceState, hashes: list[BlockHash]) -> BlockHash:
        """The hash of the block after those that have `hashes`."""
        position, size = len(hashes), self.block_size
        if sequence.known_hashes is not None and position < len(sequence.known_hashes):
            return sequence.known_hashes[position]
        parent = hashes[-1] if hashes else root_hash(*self._scope(sequence))
        return next_hash(parent, sequence.token_ids[position * size : (position + 1) * size])

    def _scope(self, sequence: SequenceState) -> tuple[str, list[int]]:
        """The KV scope and, for encoders, the prompt, which hashes cover in addition to tokens: see `root_hash`."""
        whole_prompt = sequence.token_ids[: sequence.num_prompt_tokens] if self.whole_prompts else []
        return sequence.spec.kv_scope, whole_prompt


class CopyOnWrite:
    """The sequences of one scheduler whose copies are not made yet: forks, and those that continue from a snapshot."""

    def __init__(self, pool: BlockPool, groups: KVGroups, state_blocks: int) -> None:
        self._pool = pool
        self._groups = groups
        self._state_blocks = state_blocks
        self._due: list[SequenceState] = []
        self._copying: dict[int, list[SequenceState]] = {}  # by the number of the batch that copies

    def share(self, fork: SequenceState, origin: SequenceState) -> bool:
        """Give a fork the blocks of its origin, whose prompt is computed. False, and no change, if no block is free.

        The fork computes the prompt's last token again: its first sample is drawn from that token's logits.
        """
        own = self._pool.allocate(self._state_blocks + self._groups.count)
        if own is None:
            return False
        fork.num_cached_tokens = fork.num_computed_tokens = fork.num_tokens - 1
        num_shared, num_copied_tokens = divmod(fork.num_computed_tokens, self._groups.block_size)
        first, end = self._state_blocks, self._state_blocks + num_shared * self._groups.count
        shared = origin.block_table[first:end]
        self._pool.hold(shared)
        fork.block_table += own[:first] + shared + own[first:]
        fork.block_hashes = origin.block_hashes[:num_shared]
        fork.last_snapshot, fork.is_transferred = origin.last_snapshot, origin.is_transferred
        copied = [*range(first), *(range(end, end + self._groups.count) if num_copied_tokens else ())]
        sources = [origin.block_table[entry] for entry in copied]
        self._pool.hold(sources)
        self.plan_copies(sources, [fork.block_table[entry] for entry in copied], fork)
        return True

    def plan_copies(self, sources: Sequence[int], targets: Sequence[int], sequence: SequenceState) -> None:
        """Have the next step of the sequence copy `sources`, which it holds until then, into its blocks `targets`."""
        sequence.copies = list(zip(sources, targets, strict=True))
        if sequence.copies:
            self._due.append(sequence)

    def begin_step(self, number: int, batch: Iterable[SequenceState]) -> tuple[tuple[int, int], ...]:
        """Pairs of blocks (source, target) for the batch with this number to copy: those of its own forks. Others may
        end while it is in flight, and would give up blocks that it has yet to write. But states are copied at once,
        because this batch may change the origin's; one batch at a time is in flight then, and copies as it begins.
        """
        waiting = [fork for fork in self._due if fork.copies]
        running = set(waiting if self._state_blocks else batch) if waiting else set()
        due = [fork for fork in waiting if fork in running]
        self._due = [fork for fork in waiting if fork not in running]
        if due:
            self._copying[number] = due
        return tuple(pair for fork in due for pair in fork.copies)

    def end_step(self, number: int) -> None:
        """Release the sources once the batch with this number has copied them."""
        for fork in self._copying.pop(number, ()):
            self.drop(fork)

    def drop(self, sequence: SequenceState) -> None:
        """Release the sources of copies that this sequence holds."""
        if sequence.copies:
            spec, sources = sequence.spec, [source for source, _ in sequence.copies]
            self._pool.free(sources, spec.cache_namespace, spec.cache_hints)
            sequence.copies = []
