"""ModelConfig: the configuration of a decoder-only model, independent of its family's key names in config.json.

A family's file takes from here also RopeConfig (rotary positions), and helpers to read config.json, in which families
use different keys for the same fact. The names of its tensors are in tensor_names.py.
"""

from dataclasses import dataclass, field, replace

from checkpoint.config_json import (
    MOST_POSITIONS,
    POSITION_KEYS,
    VOCAB_KEYS,
    RawConfig,
    first_of,
    flag,
    integer,
    integers,
    number,
    numbers,
    optional_number,
    rope_section,
    rope_stretch,
    stretched_positions,
    text,
    texts,
)
from engine.models.blocks import BLOCKS, OUT_NORMS
from engine.models.experts_config import ExpertsConfig
from engine.models.latent_config import LatentConfig
from engine.models.per_layer_config import PerLayerConfig
from engine.models.recurrent.config import RecurrentConfig
from engine.models.tensor_names import LLAMA_NAMES, TensorNames
from mesh.domain.errors import ConfigurationError
from mesh.domain.kv import DTYPE_BYTES, Span

SUPPORTED_KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional")
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
    attn_factor: float = field(default=1.0, repr=False)
    """YaRN: multiplies the attention factor where config.json does not state that, as in vLLM."""
    alpha: float = field(default=1.0, repr=False)
    """Multiplies the base as dynamic NTK does: by alpha^(dim / (dim - 2)), for any length."""
    query_growth: float = field(default=0.0, repr=False)
    """Queries at position p are multiplied by 1 + query_growth * ln(1 + p // original_positions)."""
    growth_offset: int = field(default=0, repr=False)  # added to p there
    proportion: float = field(default=1.0, repr=False)
    """Of `proportional`: the part of the frequencies of a whole head, from the highest on, that is not 0."""

    @property
    def depends_on_prompt_length(self) -> bool:
        """True if the KV of a token depends on the length of its prompt, so that prefixes cannot be shared."""
        return self.kind in ("dynamic", "longrope")

    def max_positions(self, max_position_embeddings: int) -> int:
        """Longest sequence that the scaling supports."""
        return stretched_positions(self.kind, max_position_embeddings, self.original_positions, self.factor)


def parse_rope(raw: RawConfig, max_position_embeddings: int, dim: int) -> RopeConfig:
    """Read the rotary positions of a config.json. Raises ConfigurationError for kinds that are not supported.

    `dim`: number of rotated dimensions per head. Only some families take it from config.json, see `rotated_dim`.
    """
    scaling = rope_section(raw)
    kind = _rope_kind(scaling)
    if kind not in SUPPORTED_KINDS:
        raise ConfigurationError(f"rope type {kind!r} is not supported; supported: {', '.join(SUPPORTED_KINDS)}")
    missing_keys = [key for key in _NEEDED.get(kind, ()) if scaling.get(key) is None]
    if missing_keys:
        raise ConfigurationError(f"rope type {kind!r} needs {', '.join(missing_keys)} in config.json")
    original, factor = rope_stretch(raw, scaling, kind, max_position_embeddings)
    return RopeConfig(
        kind=kind,
        theta=number(scaling, "rope_theta", default=number(raw, "rope_theta", default=10_000.0)),
        dim=dim,
        original_positions=max_position_embeddings if kind == "dynamic" else original,
        factor=factor,
        low_freq_factor=number(scaling, "low_freq_factor", default=1.0),
        high_freq_factor=number(scaling, "high_freq_factor", default=4.0),
        attention_factor=optional_number(scaling, "attention_factor"),
        beta_fast=number(scaling, "beta_fast", default=32.0),
        beta_slow=number(scaling, "beta_slow", default=1.0),
        mscale=number(scaling, "mscale", default=0.0, may_be_zero=True),
        mscale_all_dim=number(scaling, "mscale_all_dim", default=0.0, may_be_zero=True),
        truncate=flag(scaling, "truncate", default=True),
        short_factor=numbers(scaling, "short_factor"),
        long_factor=numbers(scaling, "long_factor"),
        attn_factor=number(scaling, "attn_factor", default=1.0),
        proportion=number(scaling, "partial_rotary_factor", default=1.0) if kind == "proportional" else 1.0,
    )


def _rope_kind(scaling: RawConfig) -> str:
    """Raises ConfigurationError for a scaling without a kind."""
    kind = text(scaling, "rope_type", "type", default="")
    if not kind and scaling.get("factor") not in (None, 1):
        raise ConfigurationError(
            f"config.json: its rotary positions have a factor ({scaling['factor']!r:.100}), but no rope_type: say "
            "which, such as linear"
        )
    return "longrope" if kind == "su" else kind or "default"  # LongRoPE's former name


def rotated_dim(raw: RawConfig, head_dim: int, default: float = 1.0) -> int:
    """The number of rotated dimensions per head, for families whose config.json has this fact.

    `default` is the fraction of the head without the key. transformers ignores the key for all other families.
    """
    default = number(raw, "partial_rotary_factor", "rotary_pct", default=default)
    return int(head_dim * number(rope_section(raw), "partial_rotary_factor", default=default))


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
    """A key of engine.models.blocks.BLOCKS."""
    norm: str = "rms"
    """`rms`, or `layer` (centred, with a bias if `norm_bias`)."""
    norm_eps: float = 1e-6
    norm_bias: bool = False
    norm_weight: bool = field(default=True, repr=False)
    """False: the checkpoint has no weights of norms, which are 1."""
    qk_norm: bool = False
    """Queries and keys are normed, with a root-mean-square norm or a layer norm as `norm` says, without biases."""
    qk_norm_of: str = field(default="head", repr=False)
    """`head`: each head, all with the same weights. `own`: each head, with its own weights. `all`: the queries of a
    token together, and its keys together."""
    qk_norm_weight: bool = field(default=True, repr=False)  # False: it is 1, and unrotated layers do without the norm
    qk_norm_rotated: bool = field(default=False, repr=False)  # they are normed after they are rotated, not before
    sub_norms: bool = field(default=False, repr=False)  # what the last matrices of attention and MLP multiply is normed

    positions: str = "rotary"
    """`rotary`, `learned` (added to the embedding), or `alibi` (a bias of the scores)."""
    window_rope: RopeConfig | None = None
    """Rotary positions of the layers with a window, if they differ from `rope`."""
    unrotated: tuple[int, ...] = field(default=(), repr=False)  # layers without rotary positions
    unrotated_rope: RopeConfig | None = field(default=None, repr=False)  # theirs, for what it says of queries
    windows_are_chunks: bool = field(default=False, repr=False)  # see engine/attention/views.py
    attention_scale: float | None = None
    """Factor of the scores; head_dim ** -0.5 if None."""
    attention_gate: bool = field(default=False, repr=False)
    """The result of each head is multiplied by a sigmoid, see TensorNames.attention_gate."""
    recurrent: RecurrentConfig | None = field(default=None, repr=False)
    attention_softcap: float | None = None
    """Scores s become cap * tanh(s / cap)."""
    attention_sinks: bool = field(default=False, repr=False)  # see engine.attention.backend.AttentionShape
    alibi_scale: float = 1.0
    """Factor of ALiBi's slopes."""
    latent: LatentConfig | None = field(default=None, repr=False)
    per_layer: PerLayerConfig | None = field(default=None, repr=False)
    """With it the sizes here are KVLayout's: see `of_layer`."""

    clip_qkv: float | None = field(default=None, repr=False)
    """Limit of the magnitude of queries, keys and values, before norms and rotation."""

    activation: str = "silu"
    activation_factors: tuple[float, float] = field(default=(1.0, 1.0), repr=False)
    """Factors of the inputs and of the results of the activation of MLPs."""
    gated: bool = True
    gate_sparsity: float = field(default=0.0, repr=False)
    """The share of an MLP's gates that are 0, see engine/models/activations.py."""
    experts: ExpertsConfig | None = None

    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    lm_head_bias: bool = False

    embed_size: int | None = field(default=None, repr=False)
    """Width of the embedding and of the output matrix, if it is not `hidden_size`: two matrices project between."""
    embed_norm: bool = False
    final_norm: bool = field(default=True, repr=False)
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
    def out_factor(self) -> float:
        """Factor of the last products of attention and MLP, which norms of their outputs would undo: these have it."""
        return 1.0 if OUT_NORMS[0] in BLOCKS[self.block] else self.residual_scale

    @property
    def embed_width(self) -> int:
        return self.embed_size or self.hidden_size

    @property
    def num_streams(self) -> int:
        """Residuals side by side, see engine/models/streams.py."""
        return 1 if self.per_layer is None else self.per_layer.num_streams

    @property
    def residual_width(self) -> int:
        return self.num_streams * self.hidden_size

    @property
    def whole_prompts(self) -> bool:
        """True if a prompt must be computed in one step because its tokens attend to later tokens."""
        return False

    @property
    def shareable_prefixes(self) -> bool:
        """True if the KV of leading tokens does not depend on later tokens, as prefix caching requires."""
        ropes = (self.rope, self.window_rope) if self.positions == "rotary" else ()
        return not any(rope and rope.depends_on_prompt_length for rope in ropes)

    def is_recurrent(self, layer: int) -> bool:
        """True if the layer has a recurrent state."""
        return self.recurrent is not None and self.recurrent.layers[layer]

    def stores_kv(self, layer: int) -> bool:
        """False if the layer reads the KV of an earlier one."""
        return self.kv_source(layer) == layer

    def kv_source(self, layer: int) -> int:
        """The layer whose KV this one reads."""
        return layer if self.per_layer is None else self.per_layer.layers[layer].kv_source

    @property
    def num_kv_layers(self) -> int:
        """Number of layers of KV: those with attention; in a model without any, one that is never written."""
        return self.num_kv_layers_before(self.num_layers)

    def of_layer(self, layer: int) -> "ModelConfig":
        """This model with the facts of one layer."""
        if not self.qk_norm_weight and layer in self.unrotated:
            return replace(self, qk_norm=False)
        return self if self.per_layer is None else replace(self, **self.per_layer.facts_of(layer, self.tensors))

    def num_kv_layers_before(self, layer: int) -> int:
        if self.per_layer is not None:
            return self.per_layer.num_kv_layers_before(layer)
        return layer if self.recurrent is None else self.recurrent.num_kv_before(layer)

    def kv_layers(self, computed: Span) -> Span:
        """The layers of KV that are final once these layers are computed."""
        if self.recurrent is not None:
            return Span(*self.recurrent.kv_layers(computed.first, computed.end))
        first = self.num_kv_layers_before(computed.first)
        return Span(first, self.num_kv_layers_before(computed.end) - first)

    @property
    def kv_planes(self) -> int:
        """Arrays of KV in a layer: keys and values, or one whose rows are both."""
        return 2 if self.latent is None else 1

    @property
    def result_dim(self) -> int:
        """Width of a head in the input of attention's output projection."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def rotated_width(self) -> int:
        """Width of the part of a head that `engine.models.rope.rotate` sees."""
        return self.head_dim if self.latent is None else self.rope.dim

    @property
    def queries_per_kv_head(self) -> int:
        """Number of query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads


_HIDDEN_SIZE = ("hidden_size", "n_embd", "n_embed", "d_model")
_INNER_SIZE = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
_MAX_LAYERS = 4096
_WIDEST = 2**62  # kernels have 64 bits for a window
_NUM_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_NUM_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_HEAD_DIM = ("head_dim", "kv_channels")
_NORM_EPS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "norm_epsilon", "norm_eps")
_ACTIVATION = ("hidden_activation", "hidden_act", "activation_function", "activation")
_DEFAULT_POSITIONS = 2048


def sliding_window(raw: RawConfig, default: int | None = None) -> int | None:
    """The window in tokens; null is none."""
    if raw.get("sliding_window", default) is None:
        return None
    return min(integer(raw, "sliding_window", default=default), _WIDEST)


def require_few_layers(num_layers: int) -> None:
    """Raise ConfigurationError for more than any model has: each takes memory before any tensor is looked for."""
    if num_layers > _MAX_LAYERS:
        raise ConfigurationError(f"config.json: {num_layers} layers are more than {_MAX_LAYERS}: the file is broken")


def plain_config(raw: RawConfig, architecture: str) -> ModelConfig:
    """A ModelConfig from the keys that families share; all other fields keep their defaults."""
    num_heads = integer(raw, *_NUM_HEADS)
    hidden_size = integer(raw, *_HIDDEN_SIZE)
    num_layers = integer(raw, *_NUM_LAYERS, default=len(texts(raw, "layers_block_type")) or None)
    require_few_layers(num_layers)
    max_positions = min(integer(raw, *POSITION_KEYS, default=_DEFAULT_POSITIONS, least=2), MOST_POSITIONS)
    head_dim = integer(raw, *_HEAD_DIM, default=hidden_size // num_heads)
    rope = parse_rope(raw, max_positions, head_dim)
    _require_positions(raw, rope)
    return ModelConfig(
        architecture=architecture,
        vocab_size=integer(raw, *VOCAB_KEYS),
        hidden_size=hidden_size,
        intermediate_size=_inner_size(raw, hidden_size),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=integer(raw, "num_key_value_heads", default=num_heads),
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        norm_eps=number(raw, *_NORM_EPS, default=1e-6),
        activation=str(first_of(raw, _ACTIVATION, "silu")),
        rope=rope,
        windows=(None,) * num_layers,
        tied=flag(raw, "tie_word_embeddings", default=False),
        dtype=weights_dtype(raw),
    )


def _require_positions(raw: RawConfig, rope: RopeConfig) -> None:
    """Raise ConfigurationError if rotary positions follow from a context length that config.json leaves out: families
    have different defaults for it.
    """
    scaling, original = rope_section(raw), "original_max_position_embeddings"
    has_original = first_of(raw, (original,), scaling.get(original)) is not None
    follows = {
        "dynamic": True,
        "llama3": not has_original,
        "yarn": not has_original or scaling.get("factor") is None,
        "longrope": not has_original or scaling.get("factor") is None,
    }
    if follows.get(rope.kind) and first_of(raw, POSITION_KEYS) is None:
        raise ConfigurationError(f"rope type {rope.kind!r} needs max_position_embeddings in config.json")


def _inner_size(raw: RawConfig, hidden_size: int) -> int:
    """The width of the widest MLP: config.json of Gemma 3n has one for each layer."""
    if isinstance(raw.get("intermediate_size"), list):
        return max(integers(raw, "intermediate_size"), default=0)
    return integer(raw, *_INNER_SIZE, default=4 * hidden_size)


def weights_dtype(raw: RawConfig) -> str:
    """The dtype of the weights, or float32 if config.json names none that is supported."""
    name = text(raw, "dtype", "torch_dtype", default="float32")
    return name if name in DTYPE_BYTES else "float32"
