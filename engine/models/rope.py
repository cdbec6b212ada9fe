"""Rotary position embeddings (Su et al. 2021) and their scalings, with the arithmetic of Hugging Face transformers.

Cosines and sines are computed for the tokens of each step and shared by all layers; the compiled decoder has a table of
the first positions (rotation_table.py).

There is one kind of rotation: dimension i of a head is paired with i + head_dim / 2. For families that pair neighbours,
or rotate only a part of the head, the query and key projections are reordered at loading, which does not change scores
(`engine.models.row_orders.rotary_order`). Dimensions that are not rotated get frequency 0, in layers without rotary
positions all of them.

With dynamic NTK and LongRoPE the frequencies depend on the length of the sequence, but cached keys keep their rotation.
transformers rotates a complete prompt with the frequencies of the prompt's length, and every later token with those of
its own length. This module does the same, independent of chunks, batches and replays: token p of a prompt of n tokens
uses length max(n, p + 1). So prompts of different lengths do not share KV, even if they have a common prefix
(`ModelConfig.shareable_prefixes`). In transformers a long sequence also changes the frequencies of later sequences;
this is not reproduced.
"""

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from checkpoint.config_json import yarn_mscale
from engine.models.model_config import ModelConfig, RopeConfig


class Rotation(NamedTuple):
    """How the tokens of a step are rotated: see RotaryEmbedding.cos_sin. `query_factors` [num_tokens, 1, 1] multiply
    rotated queries; None: nothing does.
    """

    cos: Tensor
    sin: Tensor
    query_factors: Tensor | None


class RotaryEmbedding:
    """Computes the cosines and sines of positions, for one RopeConfig."""

    def __init__(self, config: RopeConfig, head_dim: int, device: torch.device, dtype: torch.dtype) -> None:
        self._config = config
        self._dtype = dtype
        dim = config.dim
        exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        self._exponents = exponents.to(device)  # [dim / 2]
        self._ntk_power = dim / (dim - 2) if dim > 2 else 1.0
        config = replace(config, theta=config.theta * config.alpha**self._ntk_power)
        self._num_unrotated = (head_dim - dim) // 2
        self._inv_freq = self._with_unrotated(_inverse_frequencies(config, exponents).to(device))  # [head_dim / 2]
        self._long_inv_freq = self._inv_freq
        if config.kind == "longrope":
            long = 1.0 / (torch.tensor(config.long_factor) * config.theta**exponents)
            self._long_inv_freq = self._with_unrotated(long.to(device))
        scale = torch.full((dim // 2,), _attention_factor(config), device=device)
        self._scale = F.pad(scale, (0, self._num_unrotated), value=1.0)  # [head_dim / 2]

    @property
    def uses_lengths(self) -> bool:
        """True if the rotation of a token depends on the length of its sequence, too."""
        return self._config.kind in ("dynamic", "longrope")

    def rotation(self, positions: Tensor, lengths: Tensor) -> Rotation:
        """The rotation of these tokens; see `cos_sin`."""
        return Rotation(*self.cos_sin(positions, lengths), self._query_factors(positions))

    def cos_sin(self, positions: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Factors for `rotate`: two tensors [num_tokens, 1, head_dim]; the sines of the first half are negated.

        `positions`, `lengths`: [num_tokens]; only dynamic NTK and LongRoPE use the lengths (see above).
        """
        inv_freq = self._inv_freq
        if self._config.kind == "dynamic":
            inv_freq = self._dynamic_frequencies(lengths)
        elif self._config.kind == "longrope":
            is_long = lengths[:, None] > self._config.original_positions
            inv_freq = torch.where(is_long, self._long_inv_freq, inv_freq)
        angles = positions.to(torch.float32)[:, None] * inv_freq  # [num_tokens, head_dim / 2]
        cos, sin = angles.cos() * self._scale, angles.sin() * self._scale
        cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        return cos.to(self._dtype)[:, None], sin.to(self._dtype)[:, None]

    def _query_factors(self, positions: Tensor) -> Tensor | None:
        growth = self._config.query_growth
        if not growth:
            return None
        stretches = ((positions + self._config.growth_offset) // self._config.original_positions).to(torch.float32)
        return (1 + growth * stretches.log1p()).to(self._dtype)[:, None, None]

    def _dynamic_frequencies(self, lengths: Tensor) -> Tensor:
        # -> [num_tokens, head_dim / 2]
        config = self._config
        # In fp64, because torch's power of fp32 vectors rounds an element by its place in them.
        stretch = lengths.to(torch.float64).clamp(min=config.original_positions) / config.original_positions
        base = config.theta * (config.factor * stretch - (config.factor - 1)) ** self._ntk_power
        return self._with_unrotated((1.0 / base[:, None] ** self._exponents).to(torch.float32))

    def _with_unrotated(self, inv_freq: Tensor) -> Tensor:
        # [..., dim / 2] -> [..., head_dim / 2]
        return F.pad(inv_freq, (0, self._num_unrotated))


def ropes_of(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> list[RotaryEmbedding]:
    """Without rotary positions none. Else one for all layers, or for those without a window; then one for layers with
    a window, if it differs; then one for unrotated layers, if there are any.
    """
    if config.positions != "rotary":
        return []
    ropes = [config.rope] if config.window_rope is None else [config.rope, config.window_rope]
    if config.unrotated:
        unrotated = RopeConfig("default", config.rope.theta, 0, config.rope.original_positions)
        ropes.append(config.unrotated_rope or unrotated)
    # Where heads of layers differ in width, all of a head is rotated.
    widths = [config.rotated_width if config.per_layer is None else rope.dim for rope in ropes]
    return [RotaryEmbedding(*each, device, dtype) for each in zip(ropes, widths, strict=True)]


def rope_of_layer(config: ModelConfig, layer: int) -> int:
    """The place of a layer's rope in `ropes_of`."""
    has_window_rope = config.window_rope is not None
    if layer in config.unrotated:
        return 1 + has_window_rope
    return int(has_window_rope and config.windows[layer] is not None)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [num_tokens, num_heads, head_dim] by factors from `cos_sin`, halves paired as in GPT-NeoX."""
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    return torch.addcmul(heads * cos, swapped, sin)


def _inverse_frequencies(config: RopeConfig, exponents: Tensor) -> Tensor:
    inv_freq = 1.0 / config.theta**exponents
    if config.kind == "linear":
        return inv_freq / config.factor
    if config.kind == "proportional":
        is_rotated = torch.arange(len(inv_freq)) < int(config.proportion * config.dim // 2)
        return torch.where(is_rotated, inv_freq / config.factor, 0.0)
    if config.kind == "llama3":
        return _llama3(config, inv_freq)
    if config.kind == "yarn":
        return _yarn(config, inv_freq)
    if config.kind == "longrope":
        return 1.0 / (torch.tensor(config.short_factor) * config.theta**exponents)
    return inv_freq


def _llama3(config: RopeConfig, inv_freq: Tensor) -> Tensor:
    """Llama 3.1: low frequencies are divided by the factor, high ones unchanged, those in between interpolated."""
    turns = config.original_positions * inv_freq / (2 * math.pi)
    low, high = config.low_freq_factor, config.high_freq_factor
    weight = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - weight) * inv_freq / config.factor + weight * inv_freq


def _yarn(config: RopeConfig, inv_freq: Tensor) -> Tensor:
    """YaRN (Peng et al. 2023): fast dimensions are unchanged, slow ones interpolated."""
    half = inv_freq.shape[0]

    def dimension_of(num_turns: float) -> float:
        return 2 * half * math.log(config.original_positions / (num_turns * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = dimension_of(config.beta_fast), dimension_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    ramp = (torch.arange(half, dtype=torch.float32) - low) / max(high - low, 0.001)
    interpolated = ramp.clamp(0, 1)
    return inv_freq / config.factor * interpolated + inv_freq * (1 - interpolated)


def _attention_factor(config: RopeConfig) -> float:
    if config.kind not in ("yarn", "longrope"):
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    if config.kind == "longrope":
        return (
            math.sqrt(1 + math.log(config.factor) / math.log(config.original_positions)) if config.factor > 1 else 1.0
        )
    if config.mscale and config.mscale_all_dim:
        inferred = yarn_mscale(config.factor, config.mscale) / yarn_mscale(config.factor, config.mscale_all_dim)
    else:
        inferred = yarn_mscale(config.factor, 1.0)
    return inferred * config.attn_factor
