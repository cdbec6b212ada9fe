"""Kinds of layers, by the order in which attention, MLP and norms follow each other."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.models.model_config import ModelConfig

BLOCKS: Mapping[str, tuple[str, ...]] = {
    "sequential": ("input_norm", "post_norm"),
    "parallel": ("input_norm", "post_norm"),
    "parallel-shared": ("input_norm",),
    "sandwich": ("input_norm", "attn_out_norm", "post_norm", "mlp_out_norm"),
    "post": ("input_norm", "post_norm"),
    "behind": ("attn_out_norm", "mlp_out_norm"),
    "single": ("input_norm",),
}
"""Kinds of layers, and their norms. Sequential: attention, then MLP, each reads the normed residual and is added to it.
Parallel: both read the layer's input, through separate norms or a shared one. Sandwich: sequential, and the outputs of
attention and MLP are normed, too. Post: attention, then MLP, each reads the residual as it is, and is added to it; then
the residual itself is normed (as in Vaswani et al. 2017). Behind: a sandwich without the norms in front of attention
and MLP. Single: the layer is attention, a recurrence, or an MLP alone, which reads the normed residual and is added."""

OUT_NORMS = ("attn_out_norm", "mlp_out_norm")
"""Norms of what attention, or a recurrence, and MLP compute."""


def has_attention(config: "ModelConfig", layer: int) -> bool:
    return config.recurrent is None or config.recurrent.has_attention(layer)


def has_mlp(config: "ModelConfig", layer: int) -> bool:
    return config.block != "single" or not (config.is_recurrent(layer) or has_attention(config, layer))
