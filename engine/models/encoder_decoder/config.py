"""EncoderDecoderConfig: the facts of a T5-like checkpoint, read from its config.json."""

from dataclasses import dataclass

from engine.models.facts import RawConfig
from engine.models.reading import integer, weights_dtype
from mesh.domain.errors import ConfigurationError

ARCHITECTURES = {
    "T5ForConditionalGeneration": "T5, T5 1.1, Flan-T5, UL2, Flan-UL2",
    "MT5ForConditionalGeneration": "mT5",
}
"""By what config.json calls `architectures`: which models these are."""

# Positions are relative, so nothing limits a sequence but memory and time; this much is planned for unless asked.
_USUAL_LEN = 2048
_ACTIVATIONS = {"relu": "relu", "gelu": "gelu_new", "gelu_new": "gelu_new", "silu": "silu"}
"""By the last word of `feed_forward_proj`; its gelu is the one by tanh where it is gated, which is the only way it is
used."""


@dataclass(frozen=True, slots=True)
class EncoderDecoderConfig:
    """RMS norms before each part, no biases, positions as a bias of the scores by distance, scores without a factor.

    `num_layers` are the decoder's, which have KV. `num_buckets` of distances up to `max_distance`. `logit_scale` is a
    factor of hidden states before the output matrix.
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
        """Each head has keys and values of its own."""
        return self.num_heads

    @property
    def max_model_len(self) -> int:
        """Longest sequence, prompt and generated tokens, unless the operator asks for another."""
        return _USUAL_LEN

    @property
    def max_position_embeddings(self) -> None:
        """Any position will do."""
        return None

    @property
    def whole_prompts(self) -> bool:
        """The encoder's tokens see each other, so a prompt is computed at once."""
        return True

    @property
    def shareable_prefixes(self) -> bool:
        """Equal prompts have equal KV."""
        return True


def parse_encoder_decoder(raw: RawConfig, architecture: str) -> EncoderDecoderConfig:
    """ConfigurationError for what is missing or not supported."""
    activation, gated = _feed_forward(raw, architecture)
    num_layers = integer(raw, "num_layers")
    return EncoderDecoderConfig(
        architecture=architecture,
        vocab_size=integer(raw, "vocab_size"),
        hidden_size=integer(raw, "d_model"),
        intermediate_size=integer(raw, "d_ff"),
        num_encoder_layers=num_layers,
        num_layers=integer(raw, "num_decoder_layers", default=num_layers),
        num_heads=integer(raw, "num_heads"),
        head_dim=integer(raw, "d_kv"),
        num_buckets=integer(raw, "relative_attention_num_buckets", default=32),
        max_distance=integer(raw, "relative_attention_max_distance", default=128),
        norm_eps=float(raw.get("layer_norm_epsilon", 1e-6)),
        activation=activation,
        gated=gated,
        logit_scale=_logit_scale(raw, architecture),
        dtype=weights_dtype(raw),
    )


def _feed_forward(raw: RawConfig, architecture: str) -> tuple[str, bool]:
    """The activation, and whether it is a gate's."""
    default = "gated-gelu" if architecture.startswith("MT5") else "relu"
    words = str(raw.get("feed_forward_proj", default)).split("-")
    gated = words[0] == "gated"
    if len(words) != 1 + gated or words[-1] not in _ACTIVATIONS:
        raise ConfigurationError(f"config.json: feed_forward_proj {'-'.join(words)!r} is not supported")
    if words == ["gelu"]:
        return "gelu", False
    return _ACTIVATIONS[words[-1]], gated


def _logit_scale(raw: RawConfig, architecture: str) -> float:
    """The first T5 scaled what goes into the output matrix; T5 1.1 does not, nor does mT5. It was known by tied
    embeddings before it had a key of its own."""
    scaled = raw.get("scale_decoder_outputs", raw.get("tie_word_embeddings", True) is not False)
    if architecture.startswith("MT5") or not scaled:
        return 1.0
    return float(integer(raw, "d_model") ** -0.5)
