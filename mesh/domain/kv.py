"""The shape of KV, which two workers must agree on before they exchange any."""

from dataclasses import dataclass, fields

from mesh.domain.errors import LayoutMismatch
from mesh.domain.shards import KVSpan, Span

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of one weight, by dtype."""
KV_DTYPE_BYTES = {**DTYPE_BYTES, "int8": 1}
"""Bytes of one KV element, by dtype. int8 KV has one fp32 scale per row (one head of one token)."""
SCALE_BYTES = 4
INT8_UNIT_TOKENS = 16
"""int8 KV stores this many tokens of a head contiguously, which suits the CPU's multiply instructions."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The shape of a whole model's KV. Two workers that exchange KV must have equal layouts.

    A rank holds a `KVSpan`: some layers of some heads. There, one block of one layer is two arrays, keys then values,
    of shape `[block_size, heads held, head_dim]` in C order. In int8 the shape is `[block_size / 16, heads held, rows
    and scales of 16 tokens]`, in the order of `engine/kernels/cpu/kv_segments.py`.
    """

    model_fingerprint: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str

    @property
    def whole(self) -> KVSpan:
        """All layers of all heads: the span of a worker with one rank."""
        return KVSpan(Span(0, self.num_layers), Span(0, self.num_kv_heads))

    @property
    def cell_bytes(self) -> int:
        """Bytes of one block of one head in one layer, keys and values."""
        return 2 * self.block_size * self.row_bytes

    @property
    def layer_block_bytes(self) -> int:
        """Bytes of one block of all heads in one layer, keys and values."""
        return self.num_kv_heads * self.cell_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of one head of one token, keys or values."""
        row_bytes = self.head_dim * KV_DTYPE_BYTES[self.dtype]
        return row_bytes + SCALE_BYTES if self.dtype == "int8" else row_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers."""
        return self.num_layers * self.layer_block_bytes

    @property
    def unit_tokens(self) -> int:
        """Tokens of one head that a block stores contiguously."""
        return INT8_UNIT_TOKENS if self.dtype == "int8" else 1

    def num_blocks_for(self, num_tokens: int) -> int:
        """The number of blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def require_same(self, other: "KVLayout") -> None:
        """Raise LayoutMismatch, with both values of every differing field, unless `other` is equal."""
        differences = [
            f"{f.name}: {getattr(self, f.name)!r} here, {getattr(other, f.name)!r} there"
            for f in fields(self)
            if getattr(self, f.name) != getattr(other, f.name)
        ]
        if differences:
            raise LayoutMismatch("KV layouts differ: " + "; ".join(differences))
