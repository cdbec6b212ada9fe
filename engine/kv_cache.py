"""KVCache: the tensors that hold keys and values, and moving blocks of them in and out. No policy: see BlockPool.

`read_blocks` and `write_blocks` may run in another thread than the model, for blocks that thread owns: they copy whole
blocks, hold no lock and release the GIL while bytes move. On CUDA they run on the current stream, after the model's
kernels, and return when the bytes are there.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.cpu.byte_slots import read_byte_slots
from engine.cpu.memory import aligned
from mesh.domain.kv import KVLayout

Bytes = NDArray[np.uint8]
Buffer = bytes | bytearray | memoryview


def num_blocks_for_memory(layout: KVLayout, memory_bytes: int, companion_block_bytes: int = 0) -> int:
    """Blocks that fit in `memory_bytes`, each with its companion in another cache."""
    return memory_bytes // (layout.block_bytes + companion_block_bytes)


class KVCache:
    """Keys and values of all layers: `[num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim]`; in int8 with 4
    bytes more for each row's scale, in an order of their own (`engine/cpu/byte_vectors.py`).

    It starts as zeros, because masked attention multiplies stale values by 0, which must not be NaN or infinite.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        heads = layout.num_kv_heads // layout.tp_size
        dtype: torch.dtype = getattr(torch, layout.dtype)
        shape = (layout.num_layers, 2, num_blocks, layout.block_size, heads, layout.row_bytes // dtype.itemsize)
        self._tensor = _zeros(num_blocks * layout.block_bytes, device).view(dtype).view(shape)
        self._layers = list(self._tensor.unbind(0))
        # [num_layers, 2, num_blocks, bytes of one layer's keys or values in a block]
        self._rows = self._tensor.flatten(3).view(torch.uint8)

    @property
    def tensor(self) -> Tensor:
        """The whole cache."""
        return self._tensor

    @property
    def elements(self) -> NDArray[Any]:
        """The whole cache on CPU, see `elements`."""
        return elements(self._tensor)

    def layer(self, layer: int) -> Tensor:
        """One layer: [2, num_blocks, block_size, num_kv_heads, head_dim]."""
        return self._layers[layer]

    def payload_bytes(self, num_blocks: int, num_layers: int) -> int:
        """Bytes of `num_blocks` blocks in `num_layers` layers."""
        return num_blocks * num_layers * self.layout.layer_block_bytes

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block within the cache, in all layers. Called by the model's thread only."""
        self._rows[:, :, target] = self._rows[:, :, source]

    def read_blocks(self, block_ids: Sequence[int], first_layer: int, num_layers: int, out: Buffer) -> None:
        """Copy blocks to `out`, C order [num_layers, 2, len(block_ids), block_size, num_kv_heads, head_dim].

        ValueError if `out` has another size or cannot be written, IndexError for a block or layer that does not exist.
        """
        rows = self._select(block_ids, first_layer, num_layers)
        target = self._payload(block_ids, num_layers, out)
        if rows.is_cuda:
            ids = torch.tensor(block_ids, device=rows.device)
            torch.from_numpy(target).copy_(rows.index_select(2, ids))
            return
        source: Bytes = rows.numpy()
        for start, end, block in _runs(block_ids):
            target[:, :, start:end] = source[:, :, block : block + end - start]

    def write_blocks(self, block_ids: Sequence[int], first_layer: int, num_layers: int, data: Buffer) -> None:
        """Copy blocks from `data`, laid out as in `read_blocks`, into the cache; the same errors."""
        rows = self._select(block_ids, first_layer, num_layers)
        source = self._payload(block_ids, num_layers, data)
        if rows.is_cuda:
            ids = torch.tensor(block_ids, device=rows.device)
            rows.index_copy_(2, ids, torch.from_numpy(source.copy()).to(rows.device))
            torch.cuda.current_stream(rows.device).synchronize()
            return
        target: Bytes = rows.numpy()
        for start, end, block in _runs(block_ids):
            target[:, :, block : block + end - start] = source[:, :, start:end]

    def in_place(self, block_ids: Sequence[int], first_layer: int, num_layers: int) -> list[memoryview] | None:
        """Blocks where they lie, in the order of `read_blocks`: one part for each block's keys or values in a layer,
        writable. None on CUDA. IndexError for a block or layer that does not exist.
        """
        rows = self._select(block_ids, first_layer, num_layers)
        if rows.is_cuda:
            return None
        flat, num_bytes = rows.numpy().reshape(-1).data, rows.shape[-1]
        starts = [block * num_bytes for block in block_ids]
        tables = range(0, len(flat), self.num_blocks * num_bytes)  # keys, then values, of each layer
        return [flat[table + start : table + start + num_bytes] for table in tables for start in starts]

    def _select(self, block_ids: Sequence[int], first_layer: int, num_layers: int) -> Tensor:
        if block_ids and not 0 <= min(block_ids) <= max(block_ids) < self.num_blocks:
            raise IndexError(f"block ids {min(block_ids)}..{max(block_ids)} of {self.num_blocks} blocks")
        if first_layer < 0 or num_layers < 1 or first_layer + num_layers > self.layout.num_layers:
            raise IndexError(f"{num_layers} layers from {first_layer} on, of {self.layout.num_layers}")
        return self._rows[first_layer : first_layer + num_layers]

    def _payload(self, block_ids: Sequence[int], num_layers: int, buffer: Buffer) -> Bytes:
        flat: Bytes = np.frombuffer(buffer, np.uint8)
        needed = self.payload_bytes(len(block_ids), num_layers)
        if flat.size != needed:
            raise ValueError(f"buffer has {flat.size} bytes, {needed} are needed")
        return flat.reshape(num_layers, 2, len(block_ids), -1) if needed else flat.reshape(num_layers, 2, 0, 1)


def elements(cache: Tensor) -> NDArray[Any]:
    """A cache, or a part of it, on CPU as a flat array: fp32, int8, or the bits of 16-bit floats as uint16."""
    flat = cache.view(-1)
    array: NDArray[Any] = flat.view(torch.uint16).numpy() if flat.element_size() == 2 else flat.numpy()
    return array


def read_slots(layer_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of a layer at these slots (block_id * block_size + offset), as floating point:
    [*slots.shape, num_kv_heads, head_dim] each.
    """
    if layer_cache.dtype == torch.int8:
        return read_byte_slots(layer_cache, slots)
    rows = layer_cache.view(2, -1, *layer_cache.shape[3:])  # [2, num_slots, num_kv_heads, elements of a row]
    found = rows.index_select(1, slots.flatten()).view(2, *slots.shape, *rows.shape[2:])
    return found[0], found[1]


def _zeros(num_bytes: int, device: torch.device) -> Tensor:
    """Zeros [num_bytes] uint8."""
    if device.type != "cpu":
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    return torch.from_numpy(aligned(num_bytes, np.uint8))


def _runs(block_ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Cut into runs of consecutive ids: (first index, end index, first id)."""
    start = 0
    for end in range(1, len(block_ids) + 1):
        if end == len(block_ids) or block_ids[end] != block_ids[end - 1] + 1:
            yield start, end, block_ids[start]
            start = end
