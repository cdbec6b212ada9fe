"""What a worker's KV cache must offer so that KV can be moved out of it and into it."""

from collections.abc import Sequence
from typing import Protocol

from mesh.domain.kv import KVLayout


class KVStore(Protocol):
    """Blocks of KV, read and written as bytes.

    Payload order is C
    `[num_layers, 2, len(block_ids), block_size, kv_heads of this rank, head_dim]`, keys before values, of length
    `num_layers * len(block_ids) * layout.layer_block_bytes`. All methods are called from several threads at a
    time, never for the same (layer, block) of one transfer, and should release the GIL while they copy. They do
    not keep the buffer.
    """

    @property
    def layout(self) -> KVLayout:
        """Shape of what is stored; does not change."""
        ...

    def read_blocks(self, block_ids: Sequence[int], first_layer: int, num_layers: int, out: memoryview) -> None:
        """Fill `out` (format "B", writable, exactly as long as the payload) with these blocks."""
        ...

    def write_blocks(
        self, block_ids: Sequence[int], first_layer: int, num_layers: int, data: memoryview | bytes
    ) -> None:
        """Overwrite these blocks with `data`."""
        ...

    def in_place(self, block_ids: Sequence[int], first_layer: int, num_layers: int) -> Sequence[memoryview] | None:
        """These blocks where they lie, writable (format "B"), in payload order; None if this process cannot touch
        them there, as on a GPU."""
        ...
