"""The KV cache of a worker whose heads or layers are divided among ranks."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from torch import Tensor

from engine.kv.budget import KVMemoryShare
from engine.kv.cache import Buffer, KVCache, hash_and_write, read_and_hash
from mesh.domain.kv import KVLayout, KVSpan, Span


class ShardedKVCache:
    """The caches of all ranks as one, for the leader. Has the interface of KVCache, in all but `layer`, `elements`,
    `read_part` and `write_part`.

    The ranks share memory, so the leader copies all KV in and out itself. Between workers the whole model's KV travels,
    so prefill and decode workers may differ in their number of ranks.
    """

    def __init__(self, own: KVCache, others: Sequence[KVCache], memory_share: KVMemoryShare | None) -> None:
        self.layout: KVLayout = own.layout
        self.num_blocks = own.num_blocks
        self.span = self.layout.whole
        self.memory_share = memory_share  # held as long as the cache lives
        self._own = own
        self._shards: tuple[KVCache, ...] = (own, *others)
        self.clears_new = any(shard.clears_new for shard in self._shards)

    @property
    def tensor(self) -> Tensor:
        """The leader's part, as KVCache.tensor."""
        return self._own.tensor

    def payload_bytes(self, num_blocks: int, span: KVSpan) -> int:
        return self._own.payload_bytes(num_blocks, span)

    def commit_blocks(self, first: int, end: int) -> None:
        for shard in self._shards:
            shard.commit_blocks(first, end)

    def copy_block(self, source: int, target: int) -> None:
        for shard in self._shards:
            shard.copy_block(source, target)

    def clear_blocks(self, block_ids: Sequence[int], first_token: int = 0) -> None:
        for shard in self._shards:
            shard.clear_blocks(block_ids, first_token)

    def read_blocks(self, block_ids: Sequence[int], span: KVSpan, out: Buffer) -> None:
        span.require_inside(self.span)
        for shard in self._shards:
            shard.read_part(block_ids, span, out)

    def write_blocks(self, block_ids: Sequence[int], span: KVSpan, data: Buffer) -> None:
        span.require_inside(self.span)
        for shard in self._shards:
            shard.write_part(block_ids, span, data)

    def copy_out(self, block_ids: Sequence[int], span: KVSpan, out: Buffer, seed: int) -> int:
        return read_and_hash(self.read_blocks, block_ids, span, out, seed)

    def copy_in(self, block_ids: Sequence[int], span: KVSpan, data: Buffer, seed: int) -> int:
        return hash_and_write(self.write_blocks, block_ids, span, data, seed)

    def note_written(self, layers: Span) -> None:
        """Ranks on CPU have written what they announce."""

    def pin(self, memory: memoryview) -> Callable[[], None]:
        return self._own.pin(memory)


AnyKVCache: TypeAlias = KVCache | ShardedKVCache
