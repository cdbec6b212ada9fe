"""KVCache: the tensors that hold keys and values, and copies of blocks in and out. No policy: see BlockPool.

`read_blocks`, `write_blocks`, `copy_out` and `copy_in` may run in another thread than the model, for blocks that this
thread holds. They copy all heads of a block or some of them, take no lock, release the GIL during the copy, and return
when it is complete. On CUDA they run beside the model, on streams of their own: see `engine/kv/block_copies.py`.
"""

from collections.abc import Callable, Iterator, Sequence
from types import EllipsisType
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.cpu.buffers import aligned
from engine.kernels.cpu.checked_copy import Pieces, can_copy, gather, prepare, scatter
from engine.kernels.cpu.machine import KEYS, QUAD
from engine.kv.block_copies import BlockCopies, streams_for
from engine.kv.budget import KVMemoryShare
from engine.kv.dtypes import as_bytes, kv_type
from engine.memory import commit_pages
from mesh.domain.kv import SCALE_BYTES, KVLayout, KVSpan, Span

Bytes = NDArray[np.uint8]
Buffer = bytes | bytearray | memoryview
Copy = Callable[[Sequence[int], KVSpan, Buffer], None]


class BlockParts(NamedTuple):
    """How layers of the model share a layer of the cache: each has one of `num_parts` equal parts of every block, as a
    block of heads of this size.
    """

    num_parts: int
    num_heads: int
    head_dim: int


class KVCache:
    """Keys and values of the layers and heads in `span`, by default the whole model. Implements kvtransfer's KVStore.

    The tensor is `[layers, planes, num_blocks, block_size, heads, head_dim]`: keys and values, or one plane that is
    both, see KVLayout. In int8 each row has 4 more bytes, its scale, and a different element order
    (`engine/kernels/cpu/attention/kv_segments.py`).

    The cache starts as zeros: masked attention multiplies stale values by 0, so they must not be NaN or infinite. For
    the same reason blocks are cleared after a step that wrote NaN or infinity into them. `memory`: zeros that several
    processes see; by default the cache allocates its own. `num_spare` blocks follow the others; only the model reads
    and writes them. `parts`: of each layer in the blocks of each group, by default whole blocks.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        device: torch.device,
        span: KVSpan | None = None,
        memory_share: KVMemoryShare | None = None,
        memory: Bytes | None = None,
        num_spare: int = 0,
        parts: Sequence[Sequence[BlockParts]] = (),
    ) -> None:
        self.layout = layout
        self.span = span or layout.whole
        self.num_blocks = num_blocks
        self.memory_share = memory_share  # held as long as the cache lives
        layers, heads = self.span.layers.count, self.span.heads.count
        dtype = kv_type(layout.dtype)
        num_all = num_blocks + num_spare
        shape = (layers, layout.num_planes, num_all, layout.block_size, heads, layout.row_bytes // dtype.itemsize)
        if memory is None:
            flat = _zeros(self.payload_bytes(num_all, self.span), device)
        else:
            flat = torch.from_numpy(memory[: self.payload_bytes(num_all, self.span)])
        self._tensor = flat.view(dtype).view(shape)
        self._layers = list(self._tensor.unbind(0))
        self._parts = parts or [[BlockParts(1, heads, layout.head_dim)] * layers] * layout.groups.count
        self.clears_new = layout.state_blocks > 0 or (layout.dtype == "int8" and any(of != parts[0] for of in parts))
        """True if blocks are cleared before they are written, because their old content may read as NaN: a state, or,
        in int8, KV of layers with heads of another size, which have numbers where these layers have scales."""
        if not self._tensor.is_cuda:
            prepare()
        # [layers, planes, num_blocks + num_spare, units, heads, bytes of a unit]
        units = self._tensor.view(torch.uint8)
        self._units = units.view(layers, layout.num_planes, num_all, layout.block_units, heads, -1)
        streams = streams_for(device)
        self._copies = None if streams is None else BlockCopies(streams)  # None: the host reads and writes the cache

    @property
    def tensor(self) -> Tensor:
        return self._tensor

    @property
    def elements(self) -> NDArray[Any]:
        """The cache on CPU as a flat array, see `elements`."""
        return elements(self._tensor)

    def layer(self, layer: int) -> Tensor:
        """Keys and values of model layer `layer`: [planes, num_blocks, block_size, heads, head_dim]."""
        return self._layers[layer - self.span.layers.first]

    def payload_bytes(self, num_blocks: int, span: KVSpan) -> int:
        """Bytes of `span` in `num_blocks` blocks."""
        return num_blocks * span.num_layer_heads * self.layout.cell_bytes

    def commit_blocks(self, first: int, end: int) -> None:
        """Let the system commit the pages of blocks [first, end) on CPU. Any thread may call it at any time."""
        if self._tensor.is_cpu:
            for plane in self._units.flatten(0, 1):
                commit_pages(plane[first:end])

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block within the cache, in all layers. Called by the model's thread only."""
        self._units[:, :, target] = self._units[:, :, source]

    def clear_blocks(self, block_ids: Sequence[int], first_token: int = 0) -> None:
        """Fill blocks with zeros, in all layers. With `first_token` there is one of each group, in order, and only what
        is from this token on is filled. Called by the model's thread only.
        """
        if first_token:
            for block_id, of_group in zip(block_ids, self._parts, strict=True):
                for layer, parts in zip(self._units, of_group, strict=True):
                    self._clear_tail(layer, parts, block_id, first_token)
        else:
            self._units[:, :, list(block_ids)] = 0
        if self._copies is not None:
            self._copies.note_changed()

    def _clear_tail(self, layer: Tensor, parts: BlockParts, block_id: int, first_token: int) -> None:
        """Clear a block of a layer [planes, num_blocks, units, heads, bytes of a unit] from this token on."""
        planes, num_blocks, num_units, *_ = layer.shape
        units = layer.view(planes, num_blocks * parts.num_parts, num_units, parts.num_heads, -1)
        blocks = [block_id * parts.num_parts + part for part in range(parts.num_parts)]
        unit, token = divmod(first_token, self.layout.unit_tokens)
        units[:, blocks, unit + (token > 0) :] = 0
        if token:  # int8: rows are zero if their scales are, which follow the numbers
            scales = self.layout.unit_tokens * parts.head_dim
            units[:, blocks, unit, :, scales + token * SCALE_BYTES : scales + self.layout.unit_tokens * SCALE_BYTES] = 0

    def note_written(self, layers: Span) -> None:
        """Say that a step's KV of these layers is written, or on CUDA launched: what is read from now on has it. Called
        by the model's thread only.
        """
        if self._copies is not None:
            self._copies.note_written(layers)

    def pin(self, memory: memoryview) -> Callable[[], None]:
        """Prepare memory into which blocks will often be read. Returns what ends it, to be called while the memory
        lives.
        """
        return (lambda: None) if self._copies is None else self._copies.pin(memory)

    def read_blocks(self, block_ids: Sequence[int], span: KVSpan, out: Buffer) -> None:
        """Copy `span` of these blocks to `out`, in C order [layers, planes, len(block_ids), units, heads, bytes of a
        unit].

        Raises ValueError if `out` has the wrong size or is read-only, IndexError for a block, layer or head that is not
        in this cache.
        """
        span.require_inside(self.span)
        if self._copies is None:
            self.read_part(block_ids, span, out)
            return
        payload = payload_array(out, self.layout, len(block_ids), span)
        if not payload.flags.writeable:
            raise ValueError("the buffer is read-only")
        if payload.size:
            self._copies.read(self._select(block_ids, span), span.layers, block_ids, payload.reshape(-1))

    def read_part(self, block_ids: Sequence[int], span: KVSpan, out: Buffer) -> None:
        """Like `read_blocks`, but fill only the part of `out` that this cache has. On CPU."""
        if (piece := span.intersection(self.span)) is None:
            return
        units = self._select(block_ids, piece)
        target = payload_array(out, self.layout, len(block_ids), span)[part_of(piece, span)]
        source: Bytes = units.numpy()
        for start, stop, block in _runs(block_ids):
            target[:, :, start:stop] = source[:, :, block : block + stop - start]

    def write_blocks(self, block_ids: Sequence[int], span: KVSpan, data: Buffer) -> None:
        """Copy `data`, laid out as in `read_blocks`, to `span` of these blocks. Raises the same errors."""
        span.require_inside(self.span)
        if self._copies is None:
            self.write_part(block_ids, span, data)
            return
        self._land(block_ids, span, data)

    def write_part(self, block_ids: Sequence[int], span: KVSpan, data: Buffer) -> None:
        """Like `write_blocks`, but copy only the part of `data` that belongs to this cache. On CPU."""
        if (piece := span.intersection(self.span)) is None:
            return
        units = self._select(block_ids, piece)
        source = payload_array(data, self.layout, len(block_ids), span)[part_of(piece, span)]
        target: Bytes = units.numpy()
        for start, stop, block in _runs(block_ids):
            target[:, :, block : block + stop - start] = source[:, :, start:stop]

    def copy_out(self, block_ids: Sequence[int], span: KVSpan, out: Buffer, seed: int) -> int:
        """Like `read_blocks`; returns the XXH3-64 of `out`."""
        span.require_inside(self.span)
        pieces = self._pieces(block_ids, span)
        if pieces is None:
            return read_and_hash(self.read_blocks, block_ids, span, out, seed)
        return gather(pieces, np.array(block_ids, np.int64), np.frombuffer(out, np.uint8), seed)

    def copy_in(self, block_ids: Sequence[int], span: KVSpan, data: Buffer, seed: int) -> int:
        """Like `write_blocks`; returns the XXH3-64 of what was written, even if somebody changes `data` meanwhile."""
        span.require_inside(self.span)
        if self._copies is not None:
            return self._land(block_ids, span, data, seed)
        pieces = self._pieces(block_ids, span)
        if pieces is None:
            return hash_and_write(self.write_blocks, block_ids, span, data, seed)
        return scatter(pieces, np.array(block_ids, np.int64), np.frombuffer(data, np.uint8), seed)

    def _land(self, block_ids: Sequence[int], span: KVSpan, data: Buffer, seed: int = 0) -> int:
        """Copy `data` to blocks on a GPU by way of pinned memory; returns the XXH3-64 of what was written."""
        payload = payload_array(data, self.layout, len(block_ids), span).reshape(-1)
        units = self._select(block_ids, span)
        if not payload.size:
            return xxhash.xxh3_64_intdigest(b"", seed=seed)
        assert self._copies is not None
        with self._copies.landing(units, block_ids) as memory:
            memory[:] = payload
            return xxhash.xxh3_64_intdigest(memory.data, seed=seed)

    def _pieces(self, block_ids: Sequence[int], span: KVSpan) -> Pieces | None:
        """The pieces of `span` in these blocks, None if they cannot be copied in one pass."""
        self._require_blocks(block_ids)
        if self._copies is not None:
            return None
        layer_stride, plane_stride, block_stride, unit_stride, head_stride, _ = self._units.stride()
        layers, heads = span.layers.slice_in(self.span.layers), span.heads.slice_in(self.span.heads)
        num_units, num_bytes = self.layout.block_units, span.heads.count * head_stride
        if span.heads == self.span.heads:  # a block is one piece
            num_units, num_bytes = 1, num_units * num_bytes
        pieces = Pieces(
            self._units.data_ptr() + layers.start * layer_stride + heads.start * head_stride,
            span.layers.count,
            layer_stride,
            self.layout.num_planes,
            plane_stride,
            block_stride,
            num_units,
            unit_stride,
            num_bytes,
        )
        return pieces if can_copy(pieces, len(block_ids)) else None

    def _require_blocks(self, block_ids: Sequence[int]) -> None:
        if block_ids and not 0 <= min(block_ids) <= max(block_ids) < self.num_blocks:
            raise IndexError(f"block ids {min(block_ids)}..{max(block_ids)} of {self.num_blocks} blocks")

    def _select(self, block_ids: Sequence[int], span: KVSpan) -> Tensor:
        """[layers, planes, num_blocks, units, heads, bytes of a unit] of `span`."""
        self._require_blocks(block_ids)
        layers = self._units[span.layers.slice_in(self.span.layers)]
        return layers if span.heads == self.span.heads else layers[..., span.heads.slice_in(self.span.heads), :]


def read_and_hash(read: Copy, block_ids: Sequence[int], span: KVSpan, out: Buffer, seed: int) -> int:
    """`KVCache.copy_out` in two passes, by `read_blocks`."""
    read(block_ids, span, out)
    return xxhash.xxh3_64_intdigest(out, seed=seed)


def hash_and_write(write: Copy, block_ids: Sequence[int], span: KVSpan, data: Buffer, seed: int) -> int:
    """`KVCache.copy_in` by way of a copy, which nobody else can change, and `write_blocks`."""
    copy = np.frombuffer(data, np.uint8).copy().data
    write(block_ids, span, copy)
    return xxhash.xxh3_64_intdigest(copy, seed=seed)


def elements(cache: Tensor) -> NDArray[Any]:
    """A cache on CPU, or a part of it, as a flat array: fp32, int8, or the bits of 16-bit floats as uint16."""
    flat = cache.view(-1)
    array: NDArray[Any] = flat.view(torch.uint16).numpy() if flat.element_size() == 2 else flat.numpy()
    return array


def read_slots(layer_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of a layer at these slots (block_id * block_size + offset), in floating point.

    Each has shape [*slots.shape, num_kv_heads, head_dim].
    """
    if layer_cache.dtype == torch.int8:
        return _read_byte_slots(layer_cache, slots)
    rows = as_bytes(layer_cache).view(2, -1, *layer_cache.shape[3:])  # [2, num_slots, num_kv_heads, elements of a row]
    kv = rows.index_select(1, slots.flatten()).view(layer_cache.dtype).view(2, *slots.shape, *rows.shape[2:])
    return kv[0], kv[1]


def _read_byte_slots(layer_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of a layer at these slots; two fp32 tensors [*slots.shape, num_kv_heads, head_dim].

    layer_cache: int8 [2, num_blocks, block_size, num_kv_heads, head_dim + 4], whose layout is in
    `engine/kernels/cpu/attention/kv_segments.py`.
    """
    dim, heads = layer_cache.shape[-1] - SCALE_BYTES, layer_cache.shape[3]
    segments = layer_cache.view(2, -1, heads, KEYS * layer_cache.shape[4])
    keys = segments[0, :, :, : KEYS * dim].view(-1, heads, dim // QUAD, KEYS, QUAD)
    values = segments[1, :, :, : KEYS * dim].view(-1, heads, KEYS // QUAD, dim, QUAD)
    segment, token = slots // KEYS, slots % KEYS
    scales = segments.view(torch.float32)[..., -KEYS:][:, segment, :, token]  # [*slots.shape, 2, num_kv_heads]
    key_rows = keys[segment, :, :, token].flatten(-2)
    value_rows = values[segment, :, token // QUAD, :, token % QUAD]
    return key_rows * scales[..., 0, :, None], value_rows * scales[..., 1, :, None]


def _zeros(num_bytes: int, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    return torch.from_numpy(aligned(num_bytes, np.uint8))


def payload_array(payload: Buffer, layout: KVLayout, num_blocks: int, span: KVSpan) -> Bytes:
    """A payload as the array that `KVCache.read_blocks` describes. Raises ValueError if it has the wrong size."""
    flat: Bytes = np.frombuffer(payload, np.uint8)
    needed = num_blocks * span.num_layer_heads * layout.cell_bytes
    if flat.size != needed:
        raise ValueError(f"buffer has {flat.size} bytes, {needed} are needed")
    unit_bytes = layout.cell_bytes // (layout.num_planes * layout.block_units)
    return flat.reshape(
        span.layers.count, layout.num_planes, num_blocks, layout.block_units, span.heads.count, unit_bytes
    )


def part_of(piece: KVSpan, span: KVSpan) -> tuple[slice | EllipsisType, ...]:
    """The index of `piece` in a payload of `span`."""
    return piece.layers.slice_in(span.layers), ..., piece.heads.slice_in(span.heads), slice(None)


def _runs(block_ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Split into runs of consecutive ids: (start index, stop index, first id)."""
    start = 0
    for stop in range(1, len(block_ids) + 1):
        if stop == len(block_ids) or block_ids[stop] != block_ids[stop - 1] + 1:
            yield start, stop, block_ids[start]
            start = stop
