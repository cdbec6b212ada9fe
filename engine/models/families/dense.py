"""Dense families of 2024 and later that are Llama with a small difference each.

SmolLM 3 has layers without rotary positions. Seed-OSS has biases. ERNIE 4.5 and Helium rotate neighbours together.
HunYuan norms queries and keys after their rotation. Ministral 3 scales queries by their position. Arcee, Nemotron and
Apertus have plain MLPs with other activations. Jais 2 and Orion have layer norms, nanochat norms without weights.
MiniCPM has factors as Granite. EXAONE 3 has names of its own.
"""

from dataclasses import replace
from math import sqrt

from checkpoint.config_json import (
    RawConfig,
    flag,
    integer,
    integers,
    layer_windows,
    number,
    optional_number,
    refuse,
    rope_section,
)
from engine.models.families.layer_kinds import default_rope
from engine.models.families.llama import llama
from engine.models.model_config import ModelConfig, rotated_dim, sliding_window
from engine.models.tensor_names import TensorNames
from mesh.domain.errors import ConfigurationError


def _eps(raw: RawConfig, default: float = 1e-5) -> float:
    return number(raw, "rms_norm_eps", default=default)


def smollm3(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """SmolLM 3. `no_rope_layers` has a 0 for each layer without rotary positions; if it is absent, every fourth is."""
    interval = integer(raw, "no_rope_layer_interval", default=4)
    rotated = integers(raw, "no_rope_layers") or [(layer + 1) % interval for layer in range(plain.num_layers)]
    unrotated = tuple(layer for layer, is_rotated in enumerate(rotated[: plain.num_layers]) if not is_rotated)
    windows = plain.windows
    if flag(raw, "use_sliding_window", default=False):
        window = sliding_window(raw)
        windows = layer_windows(raw, plain.num_layers, window)
        if raw.get("layer_types") is None:
            windows = tuple(window if layer in unrotated else None for layer in range(plain.num_layers))
    return replace(
        llama(plain, raw),
        rope=default_rope(plain, raw, 2_000_000.0),
        unrotated=unrotated,
        windows=windows,
        tied=flag(raw, "tie_word_embeddings", default=True),
    )


def seed_oss(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    return replace(
        plain,
        qkv_bias=flag(raw, "attention_bias", default=True),
        o_bias=flag(raw, "attention_out_bias", default=False),
        mlp_bias=flag(raw, "mlp_bias", default=False),
    )


_INTERLEAVED = TensorNames(interleaved_rotary=True)


def ernie4_5(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """ERNIE 4.5 0.3B, with one switch for all biases."""
    bias = flag(raw, "use_bias", default=False)
    return replace(
        plain,
        tensors=_INTERLEAVED,
        norm_eps=_eps(raw),
        rope=default_rope(plain, raw, 500_000.0),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        tied=flag(raw, "tie_word_embeddings", default=True),
    )


def helium(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    return replace(
        llama(plain, raw),
        tensors=_INTERLEAVED,
        norm_eps=_eps(raw, 1e-8),
        rope=default_rope(plain, raw, 100_000.0),
        o_bias=False,
    )


_HUNYUAN = TensorNames(q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm")


def hunyuan(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """HunYuan dense, 0.5B to 7B. Its `dynamic` rotary scaling with an `alpha` is the same for all lengths."""
    refuse(raw, use_qk_norm=False, use_cla=True, mlp_bias=True)
    bias = flag(raw, "attention_bias", default=False)
    rope, scaling = plain.rope, rope_section(raw)
    if rope.kind == "dynamic" and scaling.get("alpha"):
        rope = replace(rope, kind="default", factor=1.0, alpha=number(scaling, "alpha", default=1.0))
    return replace(
        plain,
        tensors=_HUNYUAN,
        norm_eps=_eps(raw),
        rope=rope,
        qk_norm=True,
        qk_norm_rotated=True,
        qkv_bias=bias,
        o_bias=bias,
    )


def ministral3(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """Ministral 3 and Devstral 2, whose queries grow with their position."""
    rope = default_rope(
        plain,
        raw,
        1_000_000.0,
        rope_type="yarn",
        factor=16.0,
        original_max_position_embeddings=16_384,
        mscale=1.0,
        mscale_all_dim=1.0,
    )
    stored = rope_section(raw)
    growth = number(stored, "llama_4_scaling_beta", default=0.0 if stored else 0.1, may_be_zero=True)
    return replace(
        plain,
        norm_eps=_eps(raw),
        rope=replace(rope, query_growth=growth),
        windows=(sliding_window(raw),) * plain.num_layers,
    )


_PLAIN_MLP = TensorNames(up=("mlp.up_proj",))


def arcee(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """Arcee's AFM, with the square of ReLU."""
    activation = str(raw.get("hidden_act", "relu2"))
    return replace(llama(plain, raw), tensors=_PLAIN_MLP, norm_eps=_eps(raw), activation=activation, gated=False)


def nemotron(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """Nemotron 4 and Minitron, with layer norms of 1 + weight, and half of each head rotated."""
    return replace(
        arcee(plain, raw),
        tensors=replace(_PLAIN_MLP, norm_offset=1.0),
        norm="layer",
        norm_bias=True,
        norm_eps=number(raw, "norm_eps", default=1e-5),
        rope=replace(plain.rope, dim=rotated_dim(raw, plain.head_dim, default=0.5)),
    )


def jais2(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    bias = flag(raw, "attention_bias", default=True)
    return replace(
        arcee(plain, raw),
        norm="layer",
        norm_bias=True,
        norm_eps=number(raw, "layer_norm_eps", default=1e-5),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=flag(raw, "mlp_bias", default=True),
    )


_NANOCHAT = TensorNames(up=("mlp.fc1",), down="mlp.fc2", swapped_rotary=True)


def nanochat(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """nanochat: all norms are without weights, that of the embedding and those of rotated queries and keys included."""
    bias = flag(raw, "attention_bias", default=False)
    return replace(
        plain,
        tensors=_NANOCHAT,
        norm_weight=False,
        embed_norm=True,
        qk_norm=True,
        qk_norm_weight=False,
        qk_norm_rotated=True,
        activation=str(raw.get("hidden_act", "relu2")),
        gated=False,
        qkv_bias=bias,
        o_bias=bias,
        logit_softcap=optional_number({"final_logit_softcapping": 15.0, **raw}, "final_logit_softcapping"),
    )


_EXAONE = TensorNames(
    embed="transformer.wte",
    final_norm="transformer.ln_f",
    layer="transformer.h.{}",
    input_norm="ln_1",
    qkv=("attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"),
    o="attn.attention.out_proj",
    post_norm="ln_2",
    up=("mlp.c_fc_0", "mlp.c_fc_1"),
    down="mlp.c_proj",
)


def exaone(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """EXAONE 3, 3.5 and Deep."""
    return replace(plain, tensors=_EXAONE)


def minicpm(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """MiniCPM 1, 2 and 4, without experts. MiniCPM 4 attends to all tokens at every length."""
    refuse(raw, hidden_act="fatrelu")
    if integer(raw, "num_experts", default=0, least=0):
        raise ConfigurationError("config.json: num_experts of MiniCPM are not supported, only dense models")
    return replace(
        plain,
        embed_scale=number(raw, "scale_emb", default=1.0),
        residual_scale=number(raw, "scale_depth", default=1.0) / sqrt(plain.num_layers),
        logit_scale=number(raw, "dim_model_base", default=1.0) / plain.hidden_size,
        tied=flag(raw, "tie_word_embeddings", default=True),
    )


def orion(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    return replace(plain, norm="layer", norm_bias=True)


_APERTUS = replace(_PLAIN_MLP, input_norm="attention_layernorm", post_norm="feedforward_layernorm")


def apertus(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """Apertus, with xIELU and norms of queries and keys."""
    refuse(raw, qk_norm=False, post_norm=True, mlp_bias=True)
    rope = default_rope(
        plain,
        raw,
        12_000_000.0,
        rope_type="llama3",
        factor=8.0,
        original_max_position_embeddings=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )
    bias = flag(raw, "attention_bias", default=False)
    return replace(
        plain,
        tensors=_APERTUS,
        norm_eps=_eps(raw),
        rope=rope,
        qk_norm=True,
        activation=str(raw.get("hidden_act", "xielu")),
        gated=False,
        qkv_bias=bias,
        o_bias=bias,
    )


def cwm(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """Code World Model 32B: Llama with windows in three of four layers."""
    window = sliding_window(raw, 8192)
    windows = tuple(window if layer % 4 else None for layer in range(plain.num_layers))
    if raw.get("layer_types") is not None:
        windows = layer_windows(raw, plain.num_layers, window)
    scaling = {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = default_rope(plain, raw, 1_000_000.0, **scaling, original_max_position_embeddings=8192)
    return replace(llama(plain, raw), windows=windows, rope=rope)
