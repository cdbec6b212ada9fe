"""RopeConfig: rotary positions from config.json, with the old key (`rope_scaling`) or the new (`rope_parameters`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from checkpoint.model_files import stretched_positions
from mesh.domain.errors import ConfigurationError

SUPPORTED_KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
_NEEDED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Configuration of rotary positions. The first `dim` dimensions of a head are rotated; `original_positions` is the
    context length of the model's first training.
    """

    kind: str
    theta: float
    dim: int
    original_positions: int
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    @property
    def depends_on_prompt_length(self) -> bool:
        """True if the KV of a token depends on the length of its prompt, so that prefixes cannot be shared."""
        return self.kind in ("dynamic", "longrope")

    def max_positions(self, max_position_embeddings: int) -> int:
        """Longest sequence that the scaling supports."""
        return stretched_positions(self.kind, max_position_embeddings, self.original_positions, self.factor)


def parse_rope(raw: Mapping[str, Any], max_position_embeddings: int, dim: int) -> RopeConfig:
    """Read the rotary positions of a config.json. Raises ConfigurationError for kinds that are not supported.

    `dim`: number of rotated dimensions per head. Only some families take it from config.json, see `rotated_dim`.
    """
    scaling = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    kind = "longrope" if kind == "su" else kind  # LongRoPE's former name
    if kind not in SUPPORTED_KINDS:
        raise ConfigurationError(f"rope type {kind!r} is not supported; supported: {', '.join(SUPPORTED_KINDS)}")
    missing_keys = [key for key in _NEEDED.get(kind, ()) if scaling.get(key) is None]
    if missing_keys:
        raise ConfigurationError(f"rope type {kind!r} needs {', '.join(missing_keys)} in config.json")
    original = (
        raw.get("original_max_position_embeddings")
        or scaling.get("original_max_position_embeddings")
        or max_position_embeddings
    )
    stretch = max_position_embeddings / original if kind in ("yarn", "longrope") else 1.0
    factor = scaling.get("factor") or stretch
    return RopeConfig(
        kind=kind,
        theta=float(scaling.get("rope_theta") or raw.get("rope_theta") or 10_000.0),
        dim=dim,
        original_positions=max_position_embeddings if kind == "dynamic" else original,
        factor=float(factor),
        low_freq_factor=float(scaling.get("low_freq_factor") or 1.0),
        high_freq_factor=float(scaling.get("high_freq_factor") or 4.0),
        attention_factor=scaling.get("attention_factor"),
        beta_fast=float(scaling.get("beta_fast") or 32),
        beta_slow=float(scaling.get("beta_slow") or 1),
        mscale=float(scaling.get("mscale") or 0.0),
        mscale_all_dim=float(scaling.get("mscale_all_dim") or 0.0),
        truncate=bool(scaling.get("truncate", True)),
        short_factor=tuple(scaling.get("short_factor") or ()),
        long_factor=tuple(scaling.get("long_factor") or ()),
    )


def rotated_dim(raw: Mapping[str, Any], head_dim: int, default: float = 1.0) -> int:
    """The number of rotated dimensions per head, for families whose config.json has this fact.

    `default` is the fraction of the head without the key. transformers ignores the key for all other families.
    """
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    share = scaling.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or raw.get("rotary_pct") or default
    return int(head_dim * share)


def rotary_order(head_dim: int, dim: int, *, interleaved: bool) -> list[int]:
    """The order of a stored head's dimensions that `engine.models.rope.rotate` expects.

    The first `dim` stored dimensions are rotated; `interleaved` pairs 2i with 2i + 1, else i with i + dim / 2.
    """
    if interleaved:
        first, second = list(range(0, dim, 2)), list(range(1, dim, 2))
    else:
        first, second = list(range(dim // 2)), list(range(dim // 2, dim))
    middle = dim + (head_dim - dim) // 2
    return [*first, *range(dim, middle), *second, *range(middle, head_dim)]
