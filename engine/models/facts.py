"""ModelConfig: the configuration of a decoder-only model, independent of its family's key names in config.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.models.rope_config import RopeConfig
from engine.models.tensor_names import LLAMA_NAMES, TensorNames

RawConfig = Mapping[str, Any]

BLOCKS: Mapping[str, tuple[str, ...]] = {
    "sequential": ("input_norm", "post_norm"),
    "parallel": ("input_norm", "post_norm"),
    "parallel-shared": ("input_norm",),
    "sandwich": ("input_norm", "attn_out_norm", "post_norm", "mlp_out_norm"),
}
"""Kinds of layers, and their norms. Sequential: attention, then MLP, each reads the normed residual and is added to it.
Parallel: both read the layer's input, through separate norms or a shared one. Sandwich: sequential, and the outputs of
attention and MLP are normed, too."""


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A mixture of experts in place of the MLP: the router sends each token to `top_k` of `num_experts` experts.

    `normalised`: the weights of the selected experts add up to 1. `shared_size`: inner width of the expert that
    processes every token, 0 if there is none; `shared_gate`: a learned gate weights its output. `layers` marks the
    layers with experts; the others have the MLP.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    normalised: bool
    layers: tuple[bool, ...]
    shared_size: int = 0
    shared_gate: bool = False


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Configuration of a decoder-only model. Defaults are Llama's: RMS norm, rotary positions, gated MLP, no biases.

    `windows` holds the sliding window of each layer in tokens, None for full attention.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rope: RopeConfig
    windows: tuple[int | None, ...]
    dtype: str
    tied: bool = False
    tensors: TensorNames = LLAMA_NAMES

    block: str = "sequential"
    """A key of BLOCKS."""
    norm: str = "rms"
    """`rms`, or `layer` (centred, with a bias if `norm_bias`)."""
    norm_eps: float = 1e-6
    norm_bias: bool = False
    qk_norm: bool = False
    """Each head of queries and keys is normed before it is rotated."""

    positions: str = "rotary"
    """`rotary`, `learned` (added to the embedding), or `alibi` (a bias of the scores)."""
    window_rope: RopeConfig | None = None
    """Rotary positions of the layers with a window, if they differ from `rope`."""
    attention_scale: float | None = None
    """Factor of the scores; head_dim ** -0.5 if None."""
    attention_softcap: float | None = None
    """Scores s become cap * tanh(s / cap)."""
    alibi_scale: float = 1.0
    """Factor of ALiBi's slopes."""

    activation: str = "silu"
    gated: bool = True
    experts: ExpertsConfig | None = None

    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    lm_head_bias: bool = False

    embed_norm: bool = False
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    """Factor of the outputs of attention and MLP."""
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    counts_scaled_positions: bool = False
    """max_position_embeddings already includes the scaling of rotary positions, whatever its kind."""

    @property
    def max_model_len(self) -> int:
        """Longest sequence, prompt plus generated tokens, that the model supports."""
        if self.positions != "rotary" or self.counts_scaled_positions:
            return self.max_position_embeddings
        return self.rope.max_positions(self.max_position_embeddings)

    @property
    def whole_prompts(self) -> bool:
        """True if a prompt must be computed in one step because its tokens attend to later tokens."""
        return False

    @property
    def shareable_prefixes(self) -> bool:
        """True if the KV of leading tokens does not depend on later tokens, as prefix caching requires."""
        return self.positions != "rotary" or not self.rope.depends_on_prompt_length

    @property
    def group_size(self) -> int:
        """Number of query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads
