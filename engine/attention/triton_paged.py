"""TritonAttention: our own Triton kernels, which read blocks of any size in place. CUDA; fp32, fp16 and bf16, and KV
also in fp8.
"""

import os
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from engine.attention.backend import AttentionShape, ForwardMetadata, chunks_of
from engine.kv.dtypes import as_bytes

MAX_HEAD_DIM = 256
MIN_CAPABILITY = (8, 0)
SPLIT_TOKENS = 256
"""Keys of one part of a decode. A constant, so that a token's result does not depend on the rest of the batch."""
FEW_QUERIES = 16
"""Chunks of up to this many queries, such as drafts with their token, are split over their keys like decodes."""
_MAX_PARTIALS = 2**24  # fp32 numbers (64 MiB) that the programs of one launch leave for `combine_splits`
_SPLITS_AT_ONCE = 16
_MAX_PROGRAMS = 4096
"""Of one launch that has splits: several for each place on a GPU. The grid of a graph is for the longest context that
there may be, and most of its programs would find no split."""
_TILE_BYTES = 16384  # of keys in a tile: keys and values of two stages fit into the shared memory of any such GPU
_MAX_KEYS = 64
_MIN_ROWS = 16  # of a matrix product
_MAX_ROWS = 64


def why_not_triton(device: torch.device) -> str | None:
    """The reason why Triton cannot run on the device, or None. Does not import Triton."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    if device.type != "cuda":
        is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's own switch
        return None if is_interpreted else f"it is for CUDA, not {device.type} (TRITON_INTERPRET=1 would interpret it)"
    return why_too_old(device)


def why_too_old(device: torch.device) -> str | None:
    """The reason why a GPU is too old for Triton and for flash-attn, or None."""
    capability = torch.cuda.get_device_capability(device)
    if capability >= MIN_CAPABILITY:
        return None
    return f"the GPU has compute capability {'.'.join(map(str, capability))}, less than 8.0"


def launching_on(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current GPU, whichever holds the tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@dataclass(frozen=True, slots=True)
class _Layer:
    """The tensors of one layer's attention: see AttentionBackend.attend. The kernels fill `out`."""

    queries: Tensor
    out: Tensor
    cache: Tensor
    window: int | None
    metadata: ForwardMetadata
    sinks: Tensor | None


@dataclass(frozen=True, slots=True)
class _Sequences:
    """The `count` sequences of a step from `first` on. Those with `min_queries` to `max_queries` queries are computed;
    the longest of them has `max_context` tokens.
    """

    first: int
    count: int
    min_queries: int
    max_queries: int
    max_context: int


class TritonAttention:
    """Attends to splits of the context in decodes and in chunks of few queries, else to all of it at once."""

    name = "triton"

    def __init__(self, shape: AttentionShape, device: torch.device) -> None:
        self._shape = shape
        self._device = device
        self._kernels: Any = import_module("engine.attention.triton_kernels")
        slopes = shape.alibi or (0.0,) * shape.num_heads
        self._slopes = torch.tensor(slopes, dtype=torch.float32, device=device)

    def compile(self, layer_cache: Tensor, windows: Collection[int | None], dtype: torch.dtype) -> None:
        """Compile the kernels for queries of this dtype, so that the first request need not wait. Writes to slot 0."""
        for window in windows:
            for context_len in (1, SPLIT_TOKENS + 1):
                metadata = _decode_and_chunk(context_len, layer_cache.shape[2], self._device)
                num_tokens = metadata.positions.shape[0]
                queries = torch.zeros(
                    num_tokens, self._shape.num_heads, self._shape.head_dim, dtype=dtype, device=self._device
                )
                keys = queries[:, : self._shape.num_kv_heads]
                sinks = self._slopes if self._shape.has_sinks else None
                self.attend(queries, keys, keys, layer_cache, window, metadata, sinks)

    def write(self, keys: Tensor, values: Tensor, layer_cache: Tensor, slot_mapping: Tensor) -> None:
        if not keys.shape[0]:
            return
        keys, values = _dense_heads(keys), _dense_heads(values)
        row = self._shape.num_kv_heads * self._shape.head_dim
        with launching_on(self._device):
            self._kernels.write_rows[(keys.shape[0],)](
                keys,
                values,
                as_bytes(layer_cache),
                slot_mapping,
                *keys.stride()[:2],
                *values.stride()[:2],
                _values_step(layer_cache),
                ROW=row,
                HEAD_DIM=self._shape.head_dim,
                PADDED_ROW=_power_of_two(row),
                enable_fp_fusion=True,
            )

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
        self.write(keys, values, layer_cache, metadata.slot_mapping)
        out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        layer = _Layer(_dense_heads(queries), out, as_bytes(layer_cache), window, metadata, sinks)
        num_decodes, chunks = metadata.num_decodes, metadata.chunks
        if num_decodes:
            self._attend_splits(layer, _Sequences(0, num_decodes, 1, 1, metadata.max_decode_context))
        few = [chunk for chunk in chunks if chunk.num_queries <= FEW_QUERIES]
        if few:
            max_queries, longest = max(chunk.num_queries for chunk in few), max(chunk.context_len for chunk in few)
            self._attend_splits(layer, _Sequences(num_decodes, len(chunks), 1, max_queries, longest))
        if len(few) < len(chunks):
            max_queries, longest = metadata.max_chunk_queries, metadata.max_chunk_context
            sequences = _Sequences(num_decodes, len(chunks), FEW_QUERIES + 1, max_queries, longest)
            self._attend_tiles(layer, sequences, _MAX_ROWS)
        return out

    def _attend_splits(self, layer: _Layer, sequences: _Sequences) -> None:
        """Attend to each split by itself. Sequences take turns if their partial results would be too large."""
        num_splits = _num_splits(sequences, layer.window)
        if num_splits == 1:
            self._attend_tiles(layer, sequences, _MIN_ROWS)
            return
        shape = self._shape
        sequence_numbers = sequences.max_queries * shape.num_heads * num_splits * shape.head_dim
        at_once = min(sequences.count, max(1, _MAX_PARTIALS // sequence_numbers))
        partials = torch.empty(at_once * sequence_numbers, dtype=torch.float32, device=self._device)
        stats = torch.empty(2 * at_once * sequence_numbers // shape.head_dim, dtype=torch.float32, device=self._device)
        for first in range(sequences.first, sequences.first + sequences.count, at_once):
            count = min(at_once, sequences.first + sequences.count - first)
            some = replace(sequences, first=first, count=count)
            self._attend_tiles(layer, some, _MIN_ROWS, (partials, stats), num_splits)
            self._combine(layer, some, num_splits, (partials, stats))

    def _attend_tiles(
        self,
        layer: _Layer,
        sequences: _Sequences,
        max_rows: int,
        partials: tuple[Tensor, Tensor] | None = None,
        num_splits: int = 1,
    ) -> None:
        """Launch `attend_tiles`, with up to `max_rows` rows a tile if a group fits; `partials`: for split keys."""
        shape, cache, metadata = self._shape, layer.cache, layer.metadata
        group, padded_dim = shape.queries_per_kv_head, max(_MIN_ROWS, _power_of_two(shape.head_dim))
        row_bytes = padded_dim * layer.queries.element_size()
        rows = max(_MIN_ROWS, min(max_rows, 2 * _TILE_BYTES // row_bytes), _power_of_two(group))
        num_tiles = -(-sequences.max_queries // (rows // group))
        num_tiles *= shape.num_kv_heads
        grid = (sequences.count, num_tiles, min(num_splits, -(-_MAX_PROGRAMS // (sequences.count * num_tiles))))
        with launching_on(self._device):
            self._kernels.attend_tiles[grid](
                layer.queries,
                layer.out,
                *(partials or (layer.out, layer.out)),
                cache,
                metadata.block_tables,
                metadata.context_lens,
                metadata.query_starts,
                self._slopes,
                self._slopes if layer.sinks is None else layer.sinks,
                *(float(shape.scale), float(shape.softcap or 1.0)),
                *(sequences.first, sequences.max_queries, num_splits),
                metadata.block_tables.stride(0),
                *layer.queries.stride()[:2],
                _values_step(cache),
                MIN_QUERIES=sequences.min_queries,
                GROUP=group,
                NUM_KV_HEADS=shape.num_kv_heads,
                HEAD_DIM=shape.head_dim,
                PADDED_DIM=padded_dim,
                BLOCK_SIZE=cache.shape[2],
                ROWS=rows,
                KEYS=max(_MIN_ROWS, min(_MAX_KEYS, _TILE_BYTES // row_bytes)),
                SPLIT=0 if partials is None else SPLIT_TOKENS,
                WINDOW=layer.window or 0,
                HAS_SOFTCAP=shape.softcap is not None,
                HAS_ALIBI=shape.alibi is not None,
                HAS_SINKS=layer.sinks is not None,
                num_stages=2,
                enable_fp_fusion=True,
            )

    def _combine(self, layer: _Layer, sequences: _Sequences, num_splits: int, partials: tuple[Tensor, Tensor]) -> None:
        shape, metadata = self._shape, layer.metadata
        with launching_on(self._device):
            self._kernels.combine_splits[(sequences.count * sequences.max_queries, shape.num_heads)](
                *partials,
                layer.out,
                metadata.context_lens,
                metadata.query_starts,
                self._slopes if layer.sinks is None else layer.sinks,
                sequences.first,
                sequences.max_queries,
                num_splits,
                NUM_HEADS=shape.num_heads,
                HEAD_DIM=shape.head_dim,
                PADDED_DIM=_power_of_two(shape.head_dim),
                SPLIT=SPLIT_TOKENS,
                WINDOW=layer.window or 0,
                SPLITS_AT_ONCE=_SPLITS_AT_ONCE,
                HAS_SINKS=layer.sinks is not None,
                enable_fp_fusion=True,
            )


def _num_splits(sequences: _Sequences, window: int | None) -> int:
    """The largest number of splits that the keys of one of the sequences lie in."""
    num_splits = -(-sequences.max_context // SPLIT_TOKENS)
    if window is None:
        return num_splits
    num_keys = window + sequences.max_queries - 1  # that some query sees; they may begin anywhere in a split
    return min(num_splits, (num_keys - 1 + SPLIT_TOKENS - 1) // SPLIT_TOKENS + 1)


def _values_step(layer_cache: Tensor) -> int:
    """Elements from the keys to the values."""
    return layer_cache.stride(0) * (layer_cache.shape[0] - 1)


def _dense_heads(heads: Tensor) -> Tensor:
    return heads if heads.stride(-1) == 1 else heads.contiguous()


def _power_of_two(number: int) -> int:
    """The least power of two >= number."""
    return 1 << (number - 1).bit_length()


def _decode_and_chunk(context_len: int, block_size: int, device: torch.device) -> ForwardMetadata:
    """A step of a decode with this context and a chunk that is not split, in block 0."""
    num_queries = FEW_QUERIES + 1
    lens, starts = [context_len, num_queries], [0, 1, 1 + num_queries]
    nowhere = torch.zeros(starts[-1], dtype=torch.int64, device=device)
    num_blocks = -(-max(lens) // block_size)
    context_lens = torch.tensor(lens, dtype=torch.int32, device=device)
    return ForwardMetadata(
        positions=nowhere,
        rope_lengths=nowhere,
        slot_mapping=nowhere,
        block_tables=torch.zeros((len(lens), num_blocks), dtype=torch.int32, device=device),
        context_lens=context_lens,
        prompt_lens=context_lens,
        query_starts=torch.tensor(starts, dtype=torch.int32, device=device),
        num_decodes=1,
        chunks=chunks_of(starts, lens, 1),
        max_decode_context=context_len,
    )
