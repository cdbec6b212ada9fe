"""The contract of attention backends, and what they share."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.attention.metadata import ForwardMetadata
from engine.models.facts import ModelConfig


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads of a model, and what becomes of their scores. Query head h reads key/value head h // group_size.

    Scores are multiplied by `scale` (head_dim ** -0.5 if not given), then a score s becomes softcap * tanh(s / softcap)
    if there is a softcap, then each head's `alibi` slope times the distance to the key is taken off (ALiBi, Press et
    al. 2022).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    given_scale: float | None = None
    softcap: float | None = None
    alibi: tuple[float, ...] | None = None

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        """Factor of the scores."""
        return float(self.head_dim**-0.5) if self.given_scale is None else self.given_scale

    @property
    def is_plain(self) -> bool:
        """True if nothing but the scale is done to scores."""
        return self.softcap is None and self.alibi is None


def attention_shape(config: ModelConfig) -> AttentionShape:
    """What a model asks of attention."""
    return AttentionShape(
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.attention_scale,
        config.attention_softcap,
        _alibi_slopes(config.num_heads, config.alibi_scale) if config.positions == "alibi" else None,
    )


def _alibi_slopes(num_heads: int, factor: float) -> tuple[float, ...]:
    """A geometric sequence for the largest power of two among the heads; the rest lie between its members."""
    whole = 2 ** (num_heads.bit_length() - 1)
    first = 2.0 ** (-8.0 / whole)
    between = 2.0 ** (-4.0 / whole)
    slopes = [first ** (i + 1) for i in range(whole)] + [between ** (2 * i + 1) for i in range(num_heads - whole)]
    return tuple(slope * factor for slope in slopes)


class AttentionBackend(Protocol):
    """Plug point: writes a step's KV and attends to it."""

    name: str

    def write(self, keys: Tensor, values: Tensor, layer_cache: Tensor, slot_mapping: Tensor) -> None:
        """Put keys and values [num_tokens, num_kv_heads, head_dim], perhaps not contiguous, into their slots
        [num_tokens] of layer_cache; see `attend`.
        """
        ...

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
