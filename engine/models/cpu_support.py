"""Models and KV caches that the compiled loops of the CPU support. The eager decoder computes all others."""

from collections.abc import Mapping
from dataclasses import replace

from engine.kernels.cpu.arguments import (
    CLAMPED_SWIGLU,
    GELU,
    GELU_TANH,
    RELU,
    RELU2,
    SIGMOID,
    SILU,
    SOFTMAX,
    SPARSE_MIXER,
    XIELU,
)
from engine.kernels.cpu.machine import KEYS, LANES, MAX_SHORTS, PANEL, knows_vnni, why_no_loops
from engine.models.model_config import ModelConfig
from engine.models.per_layer_config import PerLayerConfig
from engine.models.recurrent.config import RecurrentConfig
from mesh.domain.kv import KVLayout

_CACHE_DTYPES = ("float32", "float16", "int8")
_BLOCKS = ("sequential", "parallel", "parallel-shared", "sandwich", "behind", "single")
_RECURRENT_BLOCKS = ("sequential", "single", "sandwich")
_EXPERTS_BLOCKS = (*_RECURRENT_BLOCKS, "parallel-shared")
"""Blocks that may have a recurrence, and those that may have experts."""
_REQUIRED_FACTS = {"embed_size": None, "final_norm": True}
"""Facts that a model must have for the loop. Facts that the loop supports either way are not listed."""
KERNEL_ACTIVATIONS: Mapping[str, int] = {
    "silu": SILU,
    "gelu": GELU,
    "gelu_new": GELU_TANH,
    "gelu_fast": GELU_TANH,
    "gelu_pytorch_tanh": GELU_TANH,
    "relu": RELU,
    "clamped_swiglu": CLAMPED_SWIGLU,
    "relu2": RELU2,
    "xielu": XIELU,
}
"""Activations by their names in config.json, as in engine.models.activations.ACTIVATIONS."""
KERNEL_SCORINGS: Mapping[str, int] = {"softmax": SOFTMAX, "sigmoid": SIGMOID, "sparse-mixer": SPARSE_MIXER}
"""By the names of ExpertsConfig.scoring."""


def why_not_compiled(config: ModelConfig, layout: KVLayout, num_ranks: int = 1) -> str | None:
    """The reason why the loop cannot run this model in `num_ranks` ranks, or None if it can."""
    if (missing := why_no_loops()) is not None:
        return missing
    if (recurrent := config.recurrent) is not None:
        if (missing := why_not_recurrent(recurrent)) is not None:
            return missing
        if config.block not in _RECURRENT_BLOCKS:
            return f"recurrent layers in a block {config.block}"
    if config.attention_gate and num_ranks > 1:
        return "gates of attention over several ranks"
    for name, value in _REQUIRED_FACTS.items():
        if getattr(config, name) != value:
            return f"{name} {getattr(config, name)}"
    if config.block not in _BLOCKS:
        return f"block {config.block}"
    if config.activation not in KERNEL_ACTIVATIONS:
        return f"activation {config.activation}"
    if config.activation == "xielu" and (config.gated or config.experts is not None):
        return "xielu of gates or experts"
    if config.activation_factors != (1.0, 1.0) and (config.experts is not None or not config.gated):
        return "factors of activations without gates or in experts"
    widths = {"hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size}
    if (experts := config.experts) is not None:
        if num_ranks > 1:
            return "experts over several ranks"
        if config.block not in _EXPERTS_BLOCKS:
            return f"experts in a block {config.block}"
        widths |= {"width of experts": experts.intermediate_size, "width of the shared expert": experts.shared_size}
    if (latent := config.latent) is not None:
        if num_ranks > 1:
            return "latent attention over several ranks"
        if config.block != "sequential":
            return f"latent attention in a block {config.block}"
        widths |= {"latent of queries": latent.query_rank, "latent of KV": latent.kv_rank}
        widths |= {"width of queries": latent.plain_dim, "width of results": latent.value_dim}
    for name, width in widths.items():
        if width % PANEL:
            return f"{name} {width}, not a multiple of {PANEL}"
    if config.per_layer is not None and (missing := _why_not_sized(config.per_layer, layout)) is not None:
        return missing
    return why_not_paged(layout)


def _why_not_sized(per_layer: PerLayerConfig, layout: KVLayout) -> str | None:
    """The reason why the loop cannot compute layers of these sizes, or None if it can."""
    if per_layer.num_streams > 1:
        return "several residuals"
    widths = [per_layer.input_width, *(sizes.intermediate_size for sizes in per_layer.layers)]
    if wrong := next((width for width in widths if width % PANEL), None):
        return f"layers with inputs or MLPs of {wrong}, not a multiple of {PANEL}"
    reasons = (why_not_paged(replace(layout, head_dim=sizes.head_dim)) for sizes in per_layer.layers)
    return next((reason for reason in reasons if reason is not None), None)


def why_not_recurrent(recurrent: RecurrentConfig) -> str | None:
    """The reason why the kernel cannot compute recurrent layers, or None if it can."""
    widths = {"channels": recurrent.channels}
    if recurrent.kind != "channels":
        widths |= {"key_dim": recurrent.key_dim, "value_dim": recurrent.value_dim}
    wrong = next((f"{name} {width}" for name, width in widths.items() if width % LANES), None)
    return None if wrong is None else f"recurrent layers with {wrong}, not a multiple of {LANES}"


def why_not_paged(layout: KVLayout) -> str | None:
    """The reason why the attention kernels cannot read a cache of this layout, or None if they can."""
    if layout.dtype not in _CACHE_DTYPES:
        return f"KV in {layout.dtype}, not {', '.join(_CACHE_DTYPES)}"
    if layout.head_dim % KEYS:
        return f"heads of {layout.head_dim}, not a multiple of {KEYS}"
    if layout.dtype == "int8" and not (layout.keys_are_values or layout.head_dim <= MAX_SHORTS or knows_vnni()):
        return f"heads of {layout.head_dim} with KV in int8, over {MAX_SHORTS} on a CPU without VNNI"
    if layout.block_size % KEYS:
        return f"blocks of {layout.block_size} tokens, not a multiple of {KEYS}"
    return why_no_loops()
