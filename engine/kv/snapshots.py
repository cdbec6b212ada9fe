"""Snapshots of recurrent states: where they are taken, and which one a sequence continues from. No tensors.

KV of a prefix is shared block by block. A recurrent state is there only where a step has ended, and the next step
changes it. So a step of a prompt ends where a later prompt may go on, and then the state is copied into blocks that
belong to the prefix cache. A later prompt shares the blocks of tokens up to there, and begins with a copy of the state.

    end of the prompt   the last end of a block before the tokens that a chat template puts in front of an answer: the
                        next turn has others there
    a branch            the end of cached blocks without a snapshot: where two prompts have parted, a third one may
    in an answer        which the next turn repeats, if the prompt was computed here, too; the last one only

A snapshot takes as much memory as many tokens do, so it is only taken where it saves a part of as many. Evicted ones
may be kept on disk (disk.py), and come back into the prefix cache together with the blocks of tokens before them.
(Radix attention over Mamba's states in SGLang, 2025, takes snapshots at branches; vLLM's "align" mode at the ends of
prompts.)
"""

from collections.abc import Callable, Iterable, Sequence

from engine.batch import ScheduledSequence
from engine.kv.block_pool import BlockPool
from engine.sequence import BlockPayloads, SequenceState
from mesh.domain.block_hashes import BlockHash, state_block_hashes

Fill = Callable[[Sequence[int], Sequence[bytes]], None]
"""Copies payloads into blocks: `EvictedBlockStore.restore`."""
_ANSWERS_START = 8
"""Tokens at the end of a prompt that the next turn may lack: a template's "assistant", and the mark of reasoning."""
_LEAST_SAVED = 16
"""A snapshot of so many blocks must save one block of tokens."""


class Snapshots:
    """The snapshots of one scheduler. Without `state_blocks` there are none, and blocks of tokens are all that is
    shared.
    """

    def __init__(self, pool: BlockPool, block_size: int, state_blocks: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._state_blocks = state_blocks
        self._gap = max(1, state_blocks // _LEAST_SAVED) * block_size

    def find(self, hashes: Sequence[BlockHash]) -> int:
        """The number of leading blocks at whose end there is a snapshot, the largest; 0 without any."""
        return next((n for n in range(len(hashes), 0, -1) if self._pool.snapshot(hashes[n - 1])), 0)

    def missing(self, hashes: list[BlockHash]) -> list[BlockHash]:
        """Hashes of the blocks after the last snapshot in memory: a snapshot on disk that saves more ends at one of
        them.
        """
        first = self.find(hashes[: len(self._pool.match(hashes))])
        return hashes[first:] if (len(hashes) - first) * self._block_size >= self._gap else []

    def restore(self, sequence: SequenceState, hashes: Sequence[BlockHash], fill: Fill) -> None:
        """Put the snapshot and blocks that came from disk for this sequence into the prefix cache, once blocks are
        free; `hashes` are those of the sequence's blocks, `fill` copies payloads. They are dropped if blocks before
        them have been evicted since they were read.
        """
        kept, pool = sequence.from_disk, self._pool
        end = next((n for n in range(len(hashes), 0, -1) if state_block_hashes(hashes[n - 1], 1)[0] in kept), 0)
        matched = pool.match(hashes[:end])
        lacking = hashes[len(matched) : end]
        if not end or pool.snapshot(hashes[end - 1]) or not all(each in kept for each in lacking):
            sequence.from_disk = BlockPayloads()
            return
        if self._state_blocks + len(lacking) > pool.num_allocatable_beside(matched):
            return
        pool.hold(matched)
        blocks = pool.allocate(self._state_blocks + len(lacking)) or []
        state, tokens = blocks[: self._state_blocks], blocks[self._state_blocks :]
        names = [*state_block_hashes(hashes[end - 1], self._state_blocks), *lacking]
        fill(blocks, [kept[name] for name in names])
        for block_id, block_hash in zip(tokens, lacking, strict=True):
            pool.publish(block_id, block_hash)
        pool.publish_snapshot(state, hashes[end - 1])
        self._release(sequence, state)
        self._release(sequence, [*matched, *tokens])
        sequence.from_disk = BlockPayloads()

    def begin(self, sequence: SequenceState, num_matched: int) -> None:
        """Plan the snapshots of a prompt that begins at its `num_computed_tokens`, while `num_matched` of its blocks of
        tokens are cached.
        """
        if not self._state_blocks:
            return
        size, last = self._block_size, sequence.num_computed_tokens
        prompt_end = max(0, sequence.num_tokens - _ANSWERS_START) // size * size
        sequence.last_snapshot, sequence.snapshot_ends = last, []
        for end in (min(num_matched * size, prompt_end), prompt_end):
            if end - last >= self._gap:
                sequence.snapshot_ends.append(end)
                last = end

    def tokens_until(self, sequence: SequenceState, num_tokens: int) -> int:
        """How many of the next `num_tokens` tokens one step may compute, so that it ends where a snapshot is due."""
        start = sequence.num_computed_tokens
        return next((min(num_tokens, end - start) for end in sequence.snapshot_ends if end > start), num_tokens)

    def take(self, items: Iterable[ScheduledSequence]) -> tuple[tuple[int, int], ...]:
        """Pairs of blocks (source, target) that the batch with these items copies after its pass. A snapshot for which
        no blocks are free is not taken.
        """
        pairs: list[tuple[int, int]] = []
        for item in items:
            if self._is_due(item):
                item.sequence.saving = self._pool.allocate(self._state_blocks) or []
                pairs += zip(item.sequence.block_table, item.sequence.saving, strict=False)
        return tuple(pairs)

    def _is_due(self, item: ScheduledSequence) -> bool:
        sequence = item.sequence
        if not self._state_blocks or item.end % self._block_size:
            return False
        if item.end in sequence.snapshot_ends:
            return True
        is_answer = item.end > len(sequence.spec.token_ids) and not sequence.is_transferred
        return is_answer and item.end - sequence.last_snapshot >= self._gap

    def publish(self, sequence: SequenceState, end: int) -> None:
        """Add the snapshot that a step up to position `end` has taken, if any. Its blocks of tokens are published."""
        if not sequence.saving:
            return
        if sequence.last_snapshot > len(sequence.spec.token_ids):
            self._pool.drop_snapshot(self._hash_at(sequence, sequence.last_snapshot))
        elif sequence.last_snapshot == sequence.num_cached_tokens:
            self._supersede(sequence)
        self._pool.publish_snapshot(sequence.saving, self._hash_at(sequence, end))
        sequence.last_snapshot = end
        self._release(sequence, sequence.saving)
        sequence.saving = []

    def _supersede(self, sequence: SequenceState) -> None:
        """Let the snapshots of the conversation's former turns be evicted first: the next turn begins after them."""
        spec = sequence.spec
        if conversation := spec.cache_hints.session_id:
            for block_hash in sequence.block_hashes[: sequence.num_cached_tokens // self._block_size]:
                self._pool.demote_snapshot(block_hash, spec.cache_namespace, conversation)

    def end(self, sequence: SequenceState) -> None:
        """Release what a sequence holds that ends, and let its last snapshot stay as long as its blocks of tokens."""
        self._release(sequence, sequence.saving)
        sequence.saving = []
        if 0 < sequence.last_snapshot <= len(sequence.block_hashes) * self._block_size:
            blocks = self._pool.snapshot(self._hash_at(sequence, sequence.last_snapshot))
            self._pool.hold(blocks)
            self._release(sequence, blocks)

    def _release(self, sequence: SequenceState, block_ids: Sequence[int]) -> None:
        self._pool.free(block_ids, sequence.spec.cache_namespace, sequence.spec.cache_hints)

    def _hash_at(self, sequence: SequenceState, end: int) -> BlockHash:
        return sequence.block_hashes[end // self._block_size - 1]
