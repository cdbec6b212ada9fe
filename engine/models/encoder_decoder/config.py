"""EncoderDecoderConfig: the configuration of a T5-like model, read from its config.json."""

from dataclasses import dataclass

from checkpoint.config_json import RawConfig, flag, integer, number, usual_activation
from engine.models.model_config import ModelConfig, require_few_layers, weights_dtype
from mesh.domain.errors import ConfigurationError
from mesh.domain.kv import Span

ARCHITECTURES = {
    "T5ForConditionalGeneration": "T5, T5 1.1, Flan-T5, UL2, Flan-UL2",
    "MT5ForConditionalGeneration": "mT5",
}
"""Supported `architectures` of config.json, with the models that use them."""

# Positions are relative, so only memory and time limit a sequence. This is the default limit.
_DEFAULT_MODEL_LEN = 2048
_ACTIVATIONS = ("relu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "silu", "relu2")
"""Activations that may be the last word of `feed_forward_proj`."""


@dataclass(frozen=True, slots=True)
class EncoderDecoderConfig:
    """Configuration of a model with RMS norms before attention and MLP, no biases, relative positions, unscaled scores.

    `num_layers` counts the decoder's layers, which have KV. Distances up to `max_distance` share `num_buckets` position
    biases. `logit_scale` multiplies the hidden states before the output matrix.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_encoder_layers: int
    num_layers: int
    num_heads: int
    head_dim: int
    num_buckets: int
    max_distance: int
    norm_eps: float
    activation: str
    gated: bool
    logit_scale: float
    dtype: str

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads

    @property
    def num_kv_layers(self) -> int:
        return self.num_layers

    def kv_layers(self, computed: Span) -> Span:
        """All layers of the decoder have KV."""
        return computed

    @property
    def max_model_len(self) -> int:
        """Default limit on prompt plus generated tokens, without the decoder's start token."""
        return _DEFAULT_MODEL_LEN

    @property
    def max_position_embeddings(self) -> None:
        """None: relative positions have no limit."""
        return None

    @property
    def whole_prompts(self) -> bool:
        """True: the encoder's tokens attend to each other, so a prompt is computed in one step."""
        return True

    @property
    def shareable_prefixes(self) -> bool:
        """True: equal prompts have equal KV. SchedulerConfig.whole_prompts limits sharing to equal prompts."""
        return True


AnyConfig = ModelConfig | EncoderDecoderConfig
"""The configuration of any supported model."""


def parse_encoder_decoder(raw: RawConfig, architecture: str) -> EncoderDecoderConfig:
    """Read a config.json. Raises ConfigurationError if a key is missing or has an unsupported value."""
    activation, gated = _feed_forward(raw, architecture)
    num_encoder_layers = integer(raw, "num_layers")
    num_layers = integer(raw, "num_decoder_layers", default=num_encoder_layers)
    require_few_layers(max(num_encoder_layers, num_layers))
    # With fewer buckets the encoder has none for a single distance; with shorter distances none is on the logarithmic
    # scale. transformers divides by 0 then.
    num_buckets = integer(raw, "relative_attention_num_buckets", default=32, least=4)
    return EncoderDecoderConfig(
        architecture=architecture,
        vocab_size=integer(raw, "vocab_size"),
        hidden_size=integer(raw, "d_model"),
        intermediate_size=integer(raw, "d_ff"),
        num_encoder_layers=num_encoder_layers,
        num_layers=num_layers,
        num_heads=integer(raw, "num_heads"),
        head_dim=integer(raw, "d_kv"),
        num_buckets=num_buckets,
        max_distance=integer(raw, "relative_attention_max_distance", default=128, least=num_buckets // 2 + 1),
        norm_eps=number(raw, "layer_norm_epsilon", default=1e-6),
        activation=activation,
        gated=gated,
        logit_scale=_logit_scale(raw, architecture),
        dtype=weights_dtype(raw),
    )


def _feed_forward(raw: RawConfig, architecture: str) -> tuple[str, bool]:
    """The activation, and whether the MLP is gated. A gated gelu is the tanh approximation."""
    default = "gated-gelu" if architecture.startswith("MT5") else "relu"
    words = str(raw.get("feed_forward_proj", default)).split("-")
    gated = words[0] == "gated"
    activation = usual_activation(words[-1])
    if len(words) != 1 + gated or activation not in _ACTIVATIONS:
        raise ConfigurationError(f"config.json: feed_forward_proj {'-'.join(words)!r} is not supported")
    return "gelu_new" if words == ["gated", "gelu"] else activation, gated


def _logit_scale(raw: RawConfig, architecture: str) -> float:
    """Factor of the hidden states before the output matrix. Only the first T5 has one; T5 1.1 and mT5 do not.

    Old config.json files have no key for it: tied embeddings identify the first T5.
    """
    is_tied = raw.get("tie_word_embeddings") is None or flag(raw, "tie_word_embeddings", default=True)
    scaled = flag(raw, "scale_decoder_outputs", default=is_tied)
    if architecture.startswith("MT5") or not scaled:
        return 1.0
    return float(integer(raw, "d_model") ** -0.5)
