"""A KVStore over plain memory, with gates to stop its threads at a chosen moment."""

import threading
from collections.abc import Sequence

import numpy as np

from mesh.domain.kv import KVLayout

TINY = KVLayout("tiny", num_layers=3, num_kv_heads=2, head_dim=4, block_size=4, dtype="float32")


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


class FakeKVStore:
    """Random KV from `seed`, or zeros. `written` counts writes of each (layer, block)."""

    def __init__(self, layout: KVLayout = TINY, num_blocks: int = 16, seed: int | None = None) -> None:
        self.layout = layout
        shape = (layout.num_layers, 2, num_blocks, layout.layer_block_bytes // 2)
        self.data = np.zeros(shape, np.uint8)
        if seed is not None:
            self.data[:] = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
        self.written = np.zeros((layout.num_layers, num_blocks), np.int64)
        self.reading = Gate()
        self.writing = Gate()

    def read_blocks(self, block_ids: Sequence[int], first_layer: int, num_layers: int, out: memoryview) -> None:
        with self.reading:
            layers = self.data[first_layer : first_layer + num_layers]
            target = np.frombuffer(out, np.uint8).reshape(num_layers, 2, len(block_ids), -1)
            target[:] = layers[:, :, list(block_ids)]

    def write_blocks(
        self, block_ids: Sequence[int], first_layer: int, num_layers: int, data: memoryview | bytes
    ) -> None:
        with self.writing:
            source = np.frombuffer(data, np.uint8).reshape(num_layers, 2, len(block_ids), -1)
            self.data[first_layer : first_layer + num_layers][:, :, list(block_ids)] = source
            self.written[first_layer : first_layer + num_layers, list(block_ids)] += 1

    def in_place(self, block_ids: Sequence[int], first_layer: int, num_layers: int) -> list[memoryview] | None:
        """Not to be had."""
        return None

    def blocks(self, block_ids: Sequence[int]) -> bytes:
        """All layers of these blocks."""
        return self.data[:, :, list(block_ids)].tobytes()


class InPlaceKVStore(FakeKVStore):
    """One whose blocks can be written where they lie: asking for them counts as a write."""

    def in_place(self, block_ids: Sequence[int], first_layer: int, num_layers: int) -> list[memoryview]:
        with self.writing:
            layers = range(first_layer, first_layer + num_layers)
            self.written[first_layer : first_layer + num_layers, list(block_ids)] += 1
            return [self.data[layer, kind, block].data for layer in layers for kind in (0, 1) for block in block_ids]
