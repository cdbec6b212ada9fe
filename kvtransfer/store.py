"""The interface of a KV cache that transfers read from and write to."""

from collections.abc import Callable, Sequence
from typing import Protocol

from mesh.domain.kv import KVLayout, KVSpan


class KVStore(Protocol):
    """Blocks of KV, read and written as bytes, a rectangle of layers and heads at a time.

    A payload is a C-order array `[layers, 2, len(block_ids), units, heads, bytes of a unit]`, keys before values, where
    a unit is `layout.unit_tokens` tokens of one head. Its length is `len(block_ids) * span.num_layer_heads *
    layout.cell_bytes`. Several threads call the methods concurrently, but never for the same (layer, head, block) of
    one transfer. The methods should release the GIL while they copy, and must not keep the buffer.
    """

    @property
    def layout(self) -> KVLayout:
        """The shape of the whole model's KV. It never changes."""
        ...

    @property
    def span(self) -> KVSpan:
        """The part of the model's KV that is stored here. It never changes."""
        ...

    def copy_out(self, block_ids: Sequence[int], span: KVSpan, out: memoryview, seed: int) -> int:
        """Fill `out` (format "B", writable, as long as the payload) with the KV of `span` in these blocks. Return the
        payload's XXH3-64 with this seed, best computed in the same pass."""
        ...

    def copy_in(self, block_ids: Sequence[int], span: KVSpan, data: memoryview | bytes, seed: int) -> int:
        """Overwrite the KV of `span` in these blocks with `data`. Return the XXH3-64 of the bytes that were written:
        read each byte of `data` once, because a faulty sender may change it meanwhile."""
        ...

    def pin(self, memory: memoryview) -> Callable[[], None]:
        """Prepare memory into which KV will be copied often, for the life of a sender, as by pinning it for a GPU.
        Return a function that undoes this. The sender calls it before it frees the memory, when no thread copies."""
        ...
