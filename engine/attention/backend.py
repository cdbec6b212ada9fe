"""The contract of attention backends, and what they share."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.attention.metadata import ForwardMetadata


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads of a model. Query head h reads key/value head h // group_size."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        """Factor of the scores."""
        return float(self.head_dim**-0.5)


class AttentionBackend(Protocol):
    """Plug point: writes a step's KV and attends to it."""

    name: str

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        layer_cache: Tensor,
        window: int | None,
        metadata: ForwardMetadata,
    ) -> Tensor:
        """Write keys and values to their slots, then attend causally -> [num_tokens, num_heads, head_dim].

        queries: [num_tokens, num_heads, head_dim]; keys, values: [num_tokens, num_kv_heads, head_dim], perhaps not
        contiguous. layer_cache: [2, num_blocks, block_size, num_kv_heads, head_dim], written in place. With a window,
        a query sees the last `window` positions, its own among them. The result is the caller's.
        """
        ...


def write_slots(keys: Tensor, values: Tensor, layer_cache: Tensor, slot_mapping: Tensor) -> None:
    """Put keys and values [num_tokens, num_kv_heads, head_dim] into their slots."""
    slots = layer_cache.view(2, -1, *layer_cache.shape[3:])  # [2, num_slots, num_kv_heads, head_dim]
    slots[0].index_copy_(0, slot_mapping, keys.to(slots.dtype))
    slots[1].index_copy_(0, slot_mapping, values.to(slots.dtype))
