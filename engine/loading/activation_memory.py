"""Memory of a GPU for the activations of steps, which is subtracted before the KV cache is sized."""

import torch

from engine.models.encoder_decoder.config import AnyConfig, EncoderDecoderConfig
from engine.models.expert_products import FEW_ROWS
from engine.models.recurrent.channel_scan import CHUNK
from engine.runner_settings import RunnerSettings

# Priors, not measured yet: workspaces of libraries, and partial results of attention.
_WORKSPACE_BYTES = 128 << 20
# Per logit: as it is computed, as it is returned, scaled, penalised, kept or not, sorted with its place, summed up.
_LOGIT_BYTES = 56


def activation_bytes(
    config: AnyConfig, itemsize: int, *, num_tokens: int, num_sampled: int, experts_on_device: bool = False
) -> int:
    """Bytes that the tensors of a step take at most, with numbers of `itemsize` bytes: of a step of `num_tokens` tokens
    that samples `num_sampled` rows. The layers are over when the step is sampled, so the larger of the two counts. With
    `experts_on_device`, kernels compute the experts of small steps.
    """
    layers = num_tokens * row_numbers(config) * itemsize + _channel_scan_bytes(config, num_tokens)
    if experts_on_device:
        few = min(num_tokens, FEW_ROWS)
        layers = max(layers, few * row_numbers(config, experts_on_device=True) * itemsize)
    width = config.hidden_size if isinstance(config, EncoderDecoderConfig) else config.residual_width
    sampling = num_sampled * config.vocab_size * _LOGIT_BYTES + 2 * num_tokens * width * itemsize
    return max(layers, sampling)


def _channel_scan_bytes(config: AnyConfig, num_tokens: int) -> int:
    """Bytes of Mamba 1's tensors in fp32: ten rows of all tokens (projected, convolved, steps, results), and the decays
    and additions of a chunk.
    """
    if isinstance(config, EncoderDecoderConfig) or config.recurrent is None or config.recurrent.kind != "channels":
        return 0
    numbers = 10 * num_tokens + 2 * min(num_tokens, CHUNK) * config.recurrent.key_dim
    return 4 * numbers * config.recurrent.channels


def row_numbers(config: AnyConfig, *, experts_on_device: bool = False) -> int:
    """The most numbers per token that a layer holds at the same time."""
    width = config.hidden_size
    if isinstance(config, EncoderDecoderConfig):
        return 8 * width + 8 * config.num_heads * config.head_dim + 3 * config.intermediate_size
    heads, experts = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim, config.experts
    mlp, routed = 3 * config.intermediate_size, 0
    if experts is not None:
        mlp = max(mlp, 3 * experts.intermediate_size, 3 * experts.shared_size)
        # A token's row in each expert, one after the other; its scores in fp32; its choices in 64 bits.
        routed = 4 * width + 6 * experts.num_experts + 16 * experts.top_k
        if experts.wide_router:  # its rows and scores in fp32, and the scores that the choice sees
            routed += 2 * width + 6 * experts.num_experts
    if experts is not None and experts_on_device:
        # The rows of all its experts at once, and the lists of choices.
        inner = experts.top_k * experts.intermediate_size
        mlp = max(mlp, 4 * inner, inner + experts.top_k * width)
        routed += 2 * experts.num_experts
    # Before a layer, as predicted, as corrected, and a sum between.
    streams = 4 * config.residual_width if config.num_streams > 1 else 0
    return 6 * width + 3 * heads + mlp + routed + streams


def step_bytes(settings: RunnerSettings, config: AnyConfig) -> int:
    """Memory of the largest step on a GPU; 0 on CPU, where free memory is shared with everything else anyway."""
    if torch.device(settings.device).type != "cuda":
        return 0
    itemsize = int(getattr(torch, settings.dtype).itemsize)
    on_device = settings.attention != "torch"  # see why_not_on_device
    activations = activation_bytes(
        config,
        itemsize,
        num_tokens=settings.max_batch_tokens,
        num_sampled=settings.max_sampled_rows,
        experts_on_device=on_device,
    )
    return activations + _WORKSPACE_BYTES
