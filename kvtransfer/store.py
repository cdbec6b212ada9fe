"""The interface of a KV cache that transfers read from and write to."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from mesh.domain.kv import KVLayout, KVSpan


class KVStore(Protocol):
    """Blocks of KV, read and written as bytes, a rectangle of layers and heads at a time.

    A payload is a C-order array `[layers, 2, len(block_ids), units, heads, bytes of a unit]`, keys before values, where
    a unit is `layout.unit_tokens` tokens of one head. Its length is `len(block_ids) * span.num_cells *
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

    def read_blocks(self, block_ids: Sequence[int], span: KVSpan, out: memoryview) -> None:
        """Fill `out` (format "B", writable, as long as the payload) with the KV of `span` in these blocks."""
        ...

    def write_blocks(self, block_ids: Sequence[int], span: KVSpan, data: memoryview | bytes) -> None:
        """Overwrite the KV of `span` in these blocks with `data`."""
        ...

    def landing(self, block_ids: Sequence[int], span: KVSpan) -> AbstractContextManager[Sequence[memoryview] | None]:
        """Memory for the KV of `span` in these blocks: writable views (format "B"), in payload order. When the context
        ends without an error, the KV is in the store; after an error it may be there in part.

        This saves the copy of `write_blocks`. None if it would save nothing, because the KV is scattered in too many
        small pieces (a few of many heads).
        """
        ...

    def pin(self, memory: memoryview) -> Callable[[], None]:
        """Prepare memory into which KV will be read often, for the life of a sender. Returns what ends it, which is
        called before the memory is freed, when no thread reads."""
        ...
