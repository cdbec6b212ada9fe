"""The shape of KV: what two workers must agree on before a byte moves."""

from dataclasses import dataclass, fields

from mesh.domain.errors import LayoutMismatch

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Types of weights."""
KV_DTYPE_BYTES = {**DTYPE_BYTES, "int8": 1}
"""Types of KV. In int8 each row (one head of one token) has a scale, in fp32."""
SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class KVLayout:
    """KV shape and the model it belongs to.

    One block of one layer is two arrays (keys, then values) of shape
    `[block_size, kv_heads of this rank, head_dim]`, C order; in int8, rows and scales are arranged as the CPU
    multiplies them (`engine/cpu/byte_vectors.py`). Blocks are moved whole.
    """

    model_fingerprint: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    tp_rank: int = 0
    tp_size: int = 1

    @property
    def layer_block_bytes(self) -> int:
        """Bytes of one block in one layer, keys and values."""
        return 2 * self.block_size * (self.num_kv_heads // self.tp_size) * self.row_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of one head of one token, keys or values."""
        row_bytes = self.head_dim * KV_DTYPE_BYTES[self.dtype]
        return row_bytes + SCALE_BYTES if self.dtype == "int8" else row_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers."""
        return self.num_layers * self.layer_block_bytes

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens need."""
        return -(-num_tokens // self.block_size)

    def require_same(self, other: "KVLayout") -> None:
        """Raise LayoutMismatch that names every differing field with both values."""
        differences = [
            f"{f.name}: {getattr(self, f.name)!r} here, {getattr(other, f.name)!r} there"
            for f in fields(self)
            if getattr(self, f.name) != getattr(other, f.name)
        ]
        if differences:
            raise LayoutMismatch("KV layouts differ: " + "; ".join(differences))
