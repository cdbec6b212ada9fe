"""A KVStore over plain memory, with gates to stop its threads at a chosen moment."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvtransfer.chunks import Extent
from mesh.domain.kv import KVLayout, KVSpan, Span

TINY = KVLayout("tiny", num_layers=3, num_kv_heads=2, head_dim=4, block_size=4, dtype="float32")


def box(first_block: int, num_blocks: int, first_layer: int, num_layers: int, heads: Span = TINY.whole.heads) -> Extent:
    """An Extent of these blocks and layers; of all heads of TINY, unless said."""
    return Extent(Span(first_block, num_blocks), KVSpan(Span(first_layer, num_layers), heads))


def with_axis(extent: Extent, axis: str, moved: int, longer: int) -> Extent:
    """`extent` with its blocks, layers or heads moved, and longer, by so many."""
    old = getattr(extent if axis == "blocks" else extent.span, axis)
    new = Span(old.first + moved, old.count + longer)
    return (
        replace(extent, blocks=new) if axis == "blocks" else replace(extent, span=replace(extent.span, **{axis: new}))
    )


class Gate:
    """Open at first. While closed, threads that come to it wait; `arrived` tells that one has."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self.arrived = threading.Event()
        self.num_inside = 0

    def close(self) -> None:
        self.arrived.clear()
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def __enter__(self) -> None:
        self.num_inside += 1
        self.arrived.set()
        if not self._open.wait(20):
            raise TimeoutError("the gate stayed closed")

    def __exit__(self, *_: object) -> None:
        self.num_inside -= 1


class TwoPassCopies:
    """`copy_out` and `copy_in` of a KVStore that has `read_blocks` and `write_blocks`."""

    def copy_out(self, block_ids: Sequence[int], span: KVSpan, out: memoryview, seed: int) -> int:
        self.read_blocks(block_ids, span, out)
        return xxhash.xxh3_64_intdigest(out, seed=seed)

    def copy_in(self, block_ids: Sequence[int], span: KVSpan, data: memoryview | bytes, seed: int) -> int:
        copy = bytes(data)
        self.write_blocks(block_ids, span, copy)
        return xxhash.xxh3_64_intdigest(copy, seed=seed)

    def read_blocks(self, block_ids: Sequence[int], span: KVSpan, out: memoryview) -> None:
        raise NotImplementedError

    def write_blocks(self, block_ids: Sequence[int], span: KVSpan, data: memoryview | bytes) -> None:
        raise NotImplementedError


class FakeKVStore(TwoPassCopies):
    """Random KV from `seed`, or zeros, of `span`: by default the whole model's. `written` counts writes of each
    (layer, block).
    """

    def __init__(
        self, layout: KVLayout = TINY, num_blocks: int = 16, seed: int | None = None, span: KVSpan | None = None
    ) -> None:
        self.layout = layout
        self.span = span or layout.whole
        row = layout.row_bytes * layout.unit_tokens
        units = layout.block_size // layout.unit_tokens
        shape = (self.span.layers.count, 2, num_blocks, units, self.span.heads.count, row)
        self.data = np.zeros(shape, np.uint8)
        if seed is not None:
            self.data[:] = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
        self.written = np.zeros((self.span.layers.count, num_blocks), np.int64)
        self.num_pinned = 0
        self.reading = Gate()
        self.writing = Gate()

    def read_blocks(self, block_ids: Sequence[int], span: KVSpan, out: memoryview) -> None:
        with self.reading:
            taken = self._part(span)[:, :, list(block_ids)]
            np.frombuffer(out, np.uint8).reshape(taken.shape)[:] = taken

    def write_blocks(self, block_ids: Sequence[int], span: KVSpan, data: memoryview | bytes) -> None:
        with self.writing:
            part = self._part(span)
            shape = (*part.shape[:2], len(block_ids), *part.shape[3:])
            part[:, :, list(block_ids)] = np.frombuffer(data, np.uint8).reshape(shape)
            self.written[span.layers.slice_in(self.span.layers), list(block_ids)] += 1

    def pin(self, memory: memoryview) -> Callable[[], None]:
        self.num_pinned += 1
        return self._unpin

    def blocks(self, block_ids: Sequence[int]) -> bytes:
        """All layers of these blocks."""
        return self.data[:, :, list(block_ids)].tobytes()

    def _unpin(self) -> None:
        self.num_pinned -= 1

    def _part(self, span: KVSpan) -> NDArray[np.uint8]:
        layers = self.data[span.layers.slice_in(self.span.layers)]
        return layers[..., span.heads.slice_in(self.span.heads), :]
