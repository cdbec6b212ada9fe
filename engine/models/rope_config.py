"""Rotary positions in config.json, in the old spelling (`rope_scaling`) and the new (`rope_parameters`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mesh.domain.errors import ConfigurationError
from mesh.model_files import stretched_positions

SUPPORTED_KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
_NEEDED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position facts. `dim` is how many dimensions of a head are rotated, the first ones; `original_positions`
    the context length the model was first trained with.
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
        """True if the KV of a token depends on how long its prompt is, so that prefixes cannot be shared."""
        return self.kind in ("dynamic", "longrope")

    def max_positions(self, max_position_embeddings: int) -> int:
        """Longest sequence the scaling is meant for."""
        return stretched_positions(self.kind, max_position_embeddings, self.original_positions, self.factor)


def parse_rope(raw: Mapping[str, Any], max_position_embeddings: int, head_dim: int) -> RopeConfig:
    """Read the rotary facts of a config.json; ConfigurationError for kinds that are not supported."""
    scaling = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    kind = "longrope" if kind == "su" else kind  # its first name
    if kind not in SUPPORTED_KINDS:
        raise ConfigurationError(f"rope type {kind!r} is not supported; supported: {', '.join(SUPPORTED_KINDS)}")
    missing = [key for key in _NEEDED.get(kind, ()) if scaling.get(key) is None]
    if missing:
        raise ConfigurationError(f"rope type {kind!r} needs {', '.join(missing)} in config.json")
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
        dim=_rotated_dim(raw, scaling, head_dim),
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


def _rotated_dim(raw: Mapping[str, Any], scaling: Mapping[str, Any], head_dim: int) -> int:
    share = scaling.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or raw.get("rotary_pct") or 1.0
    return int(head_dim * share)


def rotary_order(head_dim: int, dim: int, *, interleaved: bool) -> list[int]:
    """Dimensions of a stored head, of which the first `dim` are rotated, in the order in which
    `engine.models.rope.rotate` pairs them."""
    if interleaved:
        first, second = list(range(0, dim, 2)), list(range(1, dim, 2))
    else:
        first, second = list(range(dim // 2)), list(range(dim // 2, dim))
    middle = dim + (head_dim - dim) // 2
    return [*first, *range(dim, middle), *second, *range(middle, head_dim)]
