"""Attention on CPU for fp32: a compiled kernel over the blocks for decodes, torch's own attention for chunks."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from engine.attention.backend import AttentionShape, write_slots
from engine.attention.decode_kernel import LOG2_E, DecodeArrays, Part, decode_kernel
from engine.attention.metadata import ForwardMetadata
from engine.attention.torch_sdpa import attend_chunk

# Below so many tokens of context a thread costs more than it saves.
_MIN_TOKENS_PER_THREAD = 1024
_NO_WINDOW = int(np.iinfo(np.int32).max)


class CpuAttention:
    """fp32 only. Several threads share the decodes of a long batch; the kernel does not hold the GIL."""

    name = "cpu"

    def __init__(self, shape: AttentionShape, num_threads: int) -> None:
        self._shape = shape
        self._kernel = decode_kernel(shape.group_size, shape.head_dim)
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads, "attention") if num_threads > 1 else None
        self._scratch = [np.empty(0, np.float32) for _ in range(num_threads)]
        self._compile()

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        layer_cache: Tensor,
        window: int | None,
        metadata: ForwardMetadata,
    ) -> Tensor:
        """See AttentionBackend.attend."""
        write_slots(keys, values, layer_cache, metadata.slot_mapping)
        out = torch.empty(queries.shape)
        if metadata.num_decodes:
            self._attend_decodes(queries, out, layer_cache, window, metadata)
        for chunk in metadata.chunks:
            rows = slice(chunk.query_start, chunk.query_end)
            out[rows] = attend_chunk((queries[rows], keys[rows], values[rows]), layer_cache, window, chunk, metadata)
        return out

    def _attend_decodes(
        self, queries: Tensor, out: Tensor, layer_cache: Tensor, window: int | None, metadata: ForwardMetadata
    ) -> None:
        shape, cache = self._shape, layer_cache.numpy()
        arrays = DecodeArrays(
            queries=queries[: metadata.num_decodes].contiguous().view(-1).numpy(),
            out=out.view(-1).numpy(),
            keys=cache[0].reshape(-1),
            values=cache[1].reshape(-1),
            tables=metadata.block_tables.numpy(),
            context_lens=metadata.context_lens.numpy(),
            block_size=cache.shape[2],
            token_step=shape.num_kv_heads * shape.head_dim,
            window=_NO_WINDOW if window is None else window,
            scale=np.float32(shape.scale) * LOG2_E,
        )
        parts = self._split(metadata)
        needed = shape.num_heads * metadata.max_decode_context
        for i in range(len(parts)):
            if self._scratch[i].size < needed:
                self._scratch[i] = np.empty(2 * needed, np.float32)
        if self._threads is None or len(parts) == 1:
            self._kernel(arrays, parts[0], self._scratch[0])
            return
        running = [self._threads.submit(self._kernel, arrays, part, self._scratch[i]) for i, part in enumerate(parts)]
        for future in running:
            future.result()

    def _compile(self) -> None:
        """Compile now, for no sequences, rather than while the first request waits."""
        floats, ints = np.empty(0, np.float32), np.empty(0, np.int32)
        scale = np.float32(self._shape.scale) * LOG2_E
        nothing = DecodeArrays(floats, floats, floats, floats, ints.reshape(0, 1), ints, 1, 1, 1, scale)
        self._kernel(nothing, Part(0, 0, 0, 0), floats)

    def _split(self, metadata: ForwardMetadata) -> list[Part]:
        """One part for each thread that is worth it: some sequences, or some heads where sequences are too few."""
        num_seqs, num_heads = metadata.num_decodes, self._shape.num_kv_heads
        num_tokens = int(metadata.context_lens[:num_seqs].sum()) if self._num_threads > 1 else 0
        num_parts = max(1, min(self._num_threads, num_tokens // _MIN_TOKENS_PER_THREAD))
        if num_seqs >= num_parts:
            return [Part(first, end, 0, num_heads) for first, end in _cut(num_seqs, num_parts)]
        return [Part(0, num_seqs, first, end) for first, end in _cut(num_heads, min(num_parts, num_heads))]


def _cut(length: int, num_parts: int) -> Iterator[tuple[int, int]]:
    """Nearly equal ranges that make up [0, length)."""
    return pairwise(i * length // num_parts for i in range(num_parts + 1))
