"""Attention of the eager decoder on CPU: the compiled loops of `engine/cpu/attention.py`, layer by layer."""

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from engine.attention.backend import AttentionShape
from engine.attention.metadata import ForwardMetadata, one_token
from engine.cpu.attention import Attending, Queries, attend
from engine.cpu.batch import NO_WINDOW, Batch, head_shape
from engine.cpu.buffers import Buffers
from engine.cpu.chunk_head import TILE_ROWS
from engine.cpu.rows import write_tokens
from engine.kv_cache import elements


class CpuAttention:
    """fp32 queries over a cache in fp32, fp16 or int8. Threads share the heads; the loops do not hold the GIL."""

    name = "cpu"

    def __init__(self, shape: AttentionShape, num_threads: int) -> None:
        self._shape = shape
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads, "attention") if num_threads > 1 else None
        self._buffers = [Buffers() for _ in range(num_threads)]

    def compile(self, layer_cache: Tensor) -> None:
        """Compile now, for a cache that nobody uses yet, rather than while the first request waits."""
        queries = torch.zeros(1, self._shape.num_heads, self._shape.head_dim)
        keys = torch.zeros(1, self._shape.num_kv_heads, self._shape.head_dim)
        self.attend(queries, keys, keys, layer_cache, None, one_token())

    def write(self, keys: Tensor, values: Tensor, layer_cache: Tensor, slot_mapping: Tensor) -> None:
        """See AttentionBackend.write."""
        shape, cache = head_shape(self._shape, layer_cache), elements(layer_cache)
        write_tokens(keys.contiguous().numpy(), values.contiguous().numpy(), slot_mapping.numpy(), cache, shape)

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
        shape, cache = head_shape(self._shape, layer_cache), elements(layer_cache)
        self.write(keys, values, layer_cache, metadata.slot_mapping)
        out = torch.empty(queries.shape)
        rows, step = queries.shape[0], shape.num_heads * shape.head_dim
        padded = self._buffers[0].get("queries", (rows + TILE_ROWS) * step)
        padded[: rows * step] = queries.reshape(-1).numpy()
        flat = Queries(padded, step, out.view(-1).numpy())
        batch = Batch.of(metadata, shape.block_size)
        seen = NO_WINDOW if window is None else window
        work = [Attending(flat, shape, batch, buffers.attention(shape, metadata)) for buffers in self._buffers]
        if self._threads is None:
            attend(work[0], cache, 0, seen, (0, 1))
            return out
        running = [
            self._threads.submit(attend, own, cache, 0, seen, (thread, self._num_threads))
            for thread, own in enumerate(work)
        ]
        for future in running:
            future.result()
        return out
