"""The contract of attention backends, and AttentionShape, the facts that they need of a model."""

from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from engine.attention.metadata import ForwardMetadata
from engine.models.facts import ModelConfig
from mesh.domain.kv import Span


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The attention heads of a model and the treatment of scores. Query head h reads key/value head h // group_size.

    Scores are multiplied by `scale`: `given_scale`, or head_dim ** -0.5 if None. With a softcap, score s becomes
    softcap * tanh(s / softcap). With `alibi`, each head's slope times the distance to the key is subtracted (ALiBi,
    Press et al. 2022).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    given_scale: float | None = None
    softcap: float | None = None
    alibi: tuple[float, ...] | None = None

    @property
    def group_size(self) -> int:
        """Number of query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5) if self.given_scale is None else self.given_scale

    def shard(self, kv_heads: Span) -> "AttentionShape":
        """The shape of a rank that holds only `kv_heads` and the query heads that read them."""
        first, stop = kv_heads.first * self.group_size, kv_heads.end * self.group_size
        alibi = None if self.alibi is None else self.alibi[first:stop]
        return replace(self, num_heads=stop - first, num_kv_heads=kv_heads.count, alibi=alibi)

    @property
    def is_plain(self) -> bool:
        """True if scores are scaled only: no softcap, no ALiBi."""
        return self.softcap is None and self.alibi is None


def attention_shape(config: ModelConfig) -> AttentionShape:
    """The attention shape of a decoder-only model, with the heads of all ranks."""
    return AttentionShape(
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.attention_scale,
        config.attention_softcap,
        _alibi_slopes(config.num_heads, config.alibi_scale) if config.positions == "alibi" else None,
    )


def _alibi_slopes(num_heads: int, factor: float) -> tuple[float, ...]:
    """A geometric sequence for the largest power of two <= num_heads; further slopes lie between its members."""
    power = 2 ** (num_heads.bit_length() - 1)
    first = 2.0 ** (-8.0 / power)
    between = 2.0 ** (-4.0 / power)
    slopes = [first ** (i + 1) for i in range(power)] + [between ** (2 * i + 1) for i in range(num_heads - power)]
    return tuple(slope * factor for slope in slopes)


class AttentionBackend(Protocol):
    """Plug point: writes a step's KV to the cache and computes attention over it."""

    name: str

    def write(self, keys: Tensor, values: Tensor, layer_cache: Tensor, slot_mapping: Tensor) -> None:
        """Write keys and values to their slots of layer_cache, in place.

        keys, values: [num_tokens, num_kv_heads, head_dim], not necessarily contiguous. slot_mapping: [num_tokens].
        layer_cache: see `attend`.
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

        queries: [num_tokens, num_heads, head_dim]. keys, values: [num_tokens, num_kv_heads, head_dim], not necessarily
        contiguous. layer_cache: [2, num_blocks, block_size, num_kv_heads, head_dim], written in place. With a window, a
        query sees the last `window` positions, including its own. The caller owns the result.
        """
        ...


def write_slots(keys: Tensor, values: Tensor, layer_cache: Tensor, slot_mapping: Tensor) -> None:
    """AttentionBackend.write for caches in floating point, with torch."""
    slots = layer_cache.view(2, -1, *layer_cache.shape[3:])  # [2, num_slots, num_kv_heads, head_dim]
    slots[0].index_copy_(0, slot_mapping, keys.to(slots.dtype))
    slots[1].index_copy_(0, slot_mapping, values.to(slots.dtype))
