"""Llama and its close kin: RMS norms, rotary positions, a gated MLP, and small differences from that.

Mistral and Qwen differ in windows, biases and norms of heads. StableLM has layer norms, and a quarter of each head
rotated. StarCoder 2 has layer norms, a plain MLP, and biases everywhere. Baichuan has one tensor for queries, keys and
values; 13B uses ALiBi instead of rotary positions. InternLM has attention biases (1), one grouped qkv projection (2),
or optional biases (3). BitNet has two more norms in a layer, and ternary weights
(engine/quantized_formats/bitnet.py).
"""

from dataclasses import replace

from checkpoint.config_json import RawConfig, flag, integer, layer_windows
from engine.models.model_config import ModelConfig, rotated_dim, sliding_window
from engine.models.tensor_names import TensorNames


def llama(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """Llama 1 to 3, and models that use its architecture: Yi, Vicuna, SmolLM, DeepSeek LLM."""
    bias = flag(raw, "attention_bias", default=False)
    return replace(plain, qkv_bias=bias, o_bias=bias, mlp_bias=flag(raw, "mlp_bias", default=False))


def bitnet(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """BitNet b1.58, with norms of what `o` and `down` multiply."""
    bias = flag(raw, "attention_bias", default=False)
    return replace(plain, qkv_bias=bias, o_bias=bias, sub_norms=True)


def mistral(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """Mistral, with the same window in all layers, or none; Ministral says which layers have it."""
    return replace(plain, windows=layer_windows(raw, plain.num_layers, sliding_window(raw, 4096)))


def qwen_windows(plain: ModelConfig, raw: RawConfig) -> tuple[int | None, ...]:
    """Windows of Qwen models: none unless `use_sliding_window` is set.

    `layer_types` lists the layers with a window; without it these are the layers from `max_window_layers` on.
    """
    if not flag(raw, "use_sliding_window", default=False):
        return plain.windows
    window = sliding_window(raw, 4096)
    if raw.get("layer_types") is not None:
        return layer_windows(raw, plain.num_layers, window)
    first = integer(raw, "max_window_layers", default=28, least=0)
    return tuple(window if layer >= first else None for layer in range(plain.num_layers))


def qwen2(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """Qwen 1.5, 2 and 2.5, with biases of queries, keys and values."""
    return replace(plain, qkv_bias=True, windows=qwen_windows(plain, raw))


def qwen3(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """Qwen 3, with norms of queries and keys."""
    bias = flag(raw, "attention_bias", default=False)
    return replace(plain, qkv_bias=bias, o_bias=bias, qk_norm=True, windows=qwen_windows(plain, raw))


_STABLELM_HEAD_NORMS = TensorNames(
    q_norm="self_attn.q_layernorm.norms.{}",
    k_norm="self_attn.k_layernorm.norms.{}",
)


def stablelm(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """StableLM 3B, Zephyr 3B and StableLM 2. In 12B each head of queries and keys has a norm of its own."""
    has_head_norms = flag(raw, "qk_layernorm", default=False)
    return replace(
        plain,
        tensors=_STABLELM_HEAD_NORMS if has_head_norms else plain.tensors,
        qk_norm=has_head_norms,
        qk_norm_of="own" if has_head_norms else "head",
        norm="layer",
        norm_bias=True,
        block="parallel-shared" if flag(raw, "use_parallel_residual", default=False) else "sequential",
        rope=replace(plain.rope, dim=rotated_dim(raw, plain.head_dim, default=0.25)),
        qkv_bias=flag(raw, "use_qkv_bias", default=False),
    )


_STARCODER2 = TensorNames(up=("mlp.c_fc",), down="mlp.c_proj")


def starcoder2(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    bias = flag(raw, "use_bias", default=True)
    return replace(
        plain,
        tensors=_STARCODER2,
        norm="layer",
        norm_bias=True,
        windows=(sliding_window(raw),) * plain.num_layers,
        gated=False,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        tied=flag(raw, "tie_word_embeddings", default=True),
    )


_BAICHUAN = TensorNames(qkv=("self_attn.W_pack",))
_BAICHUAN2_VOCAB = 125_696


def baichuan(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """Baichuan 1 and 2. The config.json of 13B (ALiBi) has `model_max_length` instead of `max_position_embeddings`.

    Baichuan 2 divides the rows of its output matrix by their lengths; only its vocabulary size identifies it.
    """
    has_alibi = raw.get("max_position_embeddings") is None
    return replace(
        plain,
        tensors=replace(_BAICHUAN, unit_lm_head=plain.vocab_size == _BAICHUAN2_VOCAB),
        positions="alibi" if has_alibi else "rotary",
        max_position_embeddings=integer(raw, "max_position_embeddings", "model_max_length"),
    )


_INTERNLM2 = TensorNames(
    embed="model.tok_embeddings",
    lm_head="output",
    input_norm="attention_norm",
    qkv=("attention.wqkv",),
    o="attention.wo",
    post_norm="ffn_norm",
    up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
    grouped_qkv=True,
)


def internlm(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """InternLM 7B and 20B, with one switch for all attention biases."""
    bias = flag(raw, "bias", default=True)
    return replace(plain, qkv_bias=bias, o_bias=bias)


def internlm2(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """InternLM 2 and 2.5, with grouped query, key and value rows in one tensor."""
    bias = flag(raw, "bias", default=False)
    return replace(plain, tensors=_INTERNLM2, qkv_bias=bias, o_bias=bias)


def internlm3(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """InternLM 3, with a separate switch for the biases of queries, keys and values."""
    bias = flag(raw, "bias", default=False)
    return replace(plain, qkv_bias=flag(raw, "qkv_bias", default=False), o_bias=bias, mlp_bias=bias)
