"""Attention of the eager decoder on CPU, layer by layer: the kernels of `engine/kernels/cpu/attention/batch.py`.

It also has the adapters from the engine's types to those of the kernels, which `CompiledDecoder` uses, too.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.attention.backend import AttentionShape, ForwardMetadata, one_token
from engine.kernel_threads import KernelThreads
from engine.kernels.cpu.arguments import (
    NO_ROTATIONS,
    NO_SINKS,
    NO_SLOPES,
    NO_WINDOW,
    Attending,
    Batch,
    Floats,
    HeadShape,
    KernelRotations,
    LayerPlace,
    Part,
    Queries,
    Window,
)
from engine.kernels.cpu.attention.batch import attend, cache_code, has_splits, join
from engine.kernels.cpu.attention.cache_rows import write_tokens
from engine.kernels.cpu.buffers import Buffers
from engine.kernels.cpu.compilation.compiler import entry
from engine.kernels.cpu.machine import KEYS, LOG2_E, TILE_ROWS
from engine.kernels.cpu.step_facts import facts_of
from engine.kv.cache import elements

_attend, _has_splits, _join = entry(attend), entry(has_splits), entry(join)
_ONLY = LayerPlace(layer=0, number=0, group=0, is_own=True)


def kernel_batch(
    metadata: ForwardMetadata,
    block_size: int,
    rotations: KernelRotations = NO_ROTATIONS,
    parts: Sequence[tuple[int, int, int]] = (),
) -> Batch:
    """The kernels' view of a step's metadata. parts: the parts of blocks that hold the KV of layers, as (group, part,
    number of parts), see engine/attention/views.py; () for whole blocks.
    """
    tables = metadata.block_tables.numpy().astype(np.int64)
    slots = metadata.slot_mapping.numpy().reshape(-1, metadata.num_groups)
    if parts:
        groups, numbers, counts = np.array(parts, np.int64).T
        tables = tables.reshape(len(tables), metadata.num_groups, -1)[:, groups] * counts[:, None] + numbers[:, None]
        slots = (slots[:, groups] // block_size * counts + numbers) * block_size + slots[:, groups] % block_size
    of_block = np.arange(0, block_size, KEYS)
    segments = tables.reshape(len(tables), -1, 1) * block_size + of_block
    return Batch(
        slots=np.ascontiguousarray(slots),
        segments=np.ascontiguousarray(segments.reshape(len(tables), -1)),
        context_lens=metadata.context_lens.numpy(),
        prompt_lens=metadata.prompt_lens.numpy(),
        query_starts=metadata.query_starts.numpy(),
        rotations=rotations,
    )


def head_shape(shape: AttentionShape, layer_cache: Tensor) -> HeadShape:
    """The kernels' view of a shape. layer_cache: [planes, num_blocks, block_size, num_kv_heads, elements of a row]."""
    num_planes, num_blocks, block_size, _, row = layer_cache.shape
    return HeadShape(
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        row_bytes=row * layer_cache.element_size(),
        block_size=block_size,
        num_slots=num_blocks * block_size,
        num_planes=num_planes,
        scale=np.float32(shape.scale * LOG2_E),
        softcap=np.float32((shape.softcap or 0.0) * LOG2_E),
    )


def kernel_slopes(shape: AttentionShape) -> Floats:
    """ALiBi's slopes as the kernels take them."""
    return NO_SLOPES if shape.alibi is None else np.array(shape.alibi, np.float32) * np.float32(LOG2_E)


def kernel_sinks(sinks: Tensor | None) -> Floats:
    """The sinks [.., num_heads] of some layers as the kernels take them."""
    return NO_SINKS if sinks is None else np.atleast_2d(sinks.numpy() * np.float32(LOG2_E))


class CpuAttention:
    """fp32 queries over a cache in fp32, fp16 or int8. Threads share out the KV to read; kernels release the GIL."""

    name = "cpu"

    def __init__(self, shape: AttentionShape, num_threads: int) -> None:
        self._shape = shape
        self._slopes = kernel_slopes(shape)
        self.threads = KernelThreads(num_threads)
        self._buffers = [Buffers() for _ in range(num_threads)]

    def compile(self, layer_cache: Tensor) -> None:
        """Compile the kernels for this kind of cache, so that the first request need not wait. Writes to the cache."""
        queries = torch.zeros(1, self._shape.num_heads, self._shape.head_dim)
        keys = torch.zeros(1, self._shape.num_kv_heads, self._shape.head_dim)
        sinks = queries[0, :, 0] if self._shape.has_sinks else None
        self.attend(queries, keys, keys, layer_cache, None, one_token(), sinks)

    def write(self, keys: Tensor, values: Tensor, layer_cache: Tensor, slot_mapping: Tensor) -> None:
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
        sinks: Tensor | None = None,
    ) -> Tensor:
        shape, cache = head_shape(self._shape, layer_cache), elements(layer_cache)
        self.write(keys, values, layer_cache, metadata.slot_mapping)
        out = torch.empty(queries.shape)
        rows, step = queries.shape[0], shape.num_heads * shape.head_dim
        padded = self._buffers[0].get("queries", (rows + TILE_ROWS) * step)
        padded[: rows * step] = queries.reshape(-1).numpy()
        flat = Queries(padded, step, out.view(-1).numpy(), step)
        batch = kernel_batch(metadata, shape.block_size)
        visible = Window(NO_WINDOW if window is None else window)
        facts, own_sinks = facts_of(batch), kernel_sinks(sinks)
        splits = self._buffers[0].splits(shape, facts.num_split)
        scratches = [buffers.attention(shape, rows, has_prompt=facts.has_prompt) for buffers in self._buffers]
        code, cache_bytes = cache_code(cache.dtype), cache.view(np.uint8)
        work = [Attending(flat, shape, batch, scratch, splits, code, self._slopes, own_sinks) for scratch in scratches]
        run, count = self.threads.run, self.threads.count
        run(lambda thread: _attend(work[thread], cache_bytes, _ONLY, visible, Part(thread, count)))
        if _has_splits(batch, visible):
            run(lambda thread: _join(work[thread], _ONLY, visible, Part(thread, count)))
        return out
