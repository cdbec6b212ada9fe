"""Families whose layers are Mamba 2 in place of attention, or beside it.

Granite 4 and Bamba have attention in a few layers. Falcon-H1 has both in every layer, and factors for everything.
Layers of Nemotron-H are Mamba 2, attention, an MLP or experts alone; Codestral Mamba has nothing but Mamba 2.
"""

from dataclasses import replace
from math import inf

from checkpoint.config_json import RawConfig, flag, integer, integers, number, numbers, text, texts
from engine.models.families.granite import granite
from engine.models.families.layer_kinds import recurrent_layers
from engine.models.families.llama import llama
from engine.models.families.mamba import mamba
from engine.models.families.mixtures import granite_moe, sigmoid_experts
from engine.models.model_config import ModelConfig, rotated_dim
from engine.models.recurrent.config import RecurrentConfig, ScanConfig
from engine.models.tensor_names import TensorNames
from mesh.domain.errors import ConfigurationError

_OLDER_NAMES = {"mamba": "linear_attention", "attention": "full_attention"}
_INFINITY = {"__float__": "Infinity"}
_OF_PATTERN = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}


def granite_moe_hybrid(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """Granite 4: Mamba 2 or attention with an MLP, which is a shared expert beside experts, if it has those."""
    if integer(raw, "num_local_experts", default=8, least=0):
        unsaid = {"num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 1024}
        config = granite_moe(plain, {**unsaid, **raw})
    else:
        config = granite(plain, raw)
        shared = integer(raw, "shared_intermediate_size", default=1024)
        tensors = TensorNames(up=("shared_mlp.input_linear",), down="shared_mlp.output_linear")
        config = replace(config, tensors=tensors, intermediate_size=shared)
    is_rotated = text(raw, "position_embedding_type", default="nope") == "rope"
    stated = texts(raw, "layer_types") or texts(raw, "layers_block_type") or ("mamba",) * plain.num_layers
    layers = recurrent_layers(tuple(_OLDER_NAMES.get(kind, kind) for kind in stated), "linear_attention")
    return replace(
        config,
        tensors=replace(config.tensors, recurrent="mamba"),
        mlp_bias=False,
        unrotated=() if is_rotated else tuple(range(plain.num_layers)),
        recurrent=_mamba(plain, raw, layers) if any(layers) else None,
    )


_BAMBA = TensorNames(
    final_norm="model.final_layernorm",
    recurrent="mamba",
    post_norm="pre_ff_layernorm",
    up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
)


def bamba(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """Bamba 9B, with half of each head rotated."""
    attention = integers(raw, "attn_layer_indices")
    return replace(
        llama(plain, raw),
        tensors=_BAMBA,
        norm_eps=number(raw, "rms_norm_eps", default=1e-5),
        rope=replace(plain.rope, dim=rotated_dim(raw, plain.head_dim, default=0.5)),
        recurrent=_mamba(plain, raw, tuple(layer not in attention for layer in range(plain.num_layers))),
    )


def falcon_h1(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """Falcon-H1, 0.5B to 34B. Factors of keys and of attention's inputs are factors of the scores and of its result."""
    if biased := [key for key in ("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias") if raw.get(key)]:
        raise ConfigurationError(f"config.json: {biased[0]} of Falcon-H1 is not supported")

    def factor(name: str) -> float:
        return number(raw, f"{name}_multiplier", default=1.0)

    attention_in, attention_out = factor("attention_in"), factor("attention_out")
    gate, down = _factors(raw, "mlp_multipliers", 2)
    residual_scale = attention_in * attention_out
    norm = "before" if flag(raw, "mamba_norm_before_gate", default=True) else "gated"
    scan = ScanConfig(
        norm=norm if flag(raw, "mamba_rms_norm", default=False) else "",
        factors=tuple(factor("ssm_in") * each for each in _factors(raw, "ssm_multipliers", 5)),
        out_factor=factor("ssm_out") / residual_scale,
    )
    width = integer(raw, "mamba_d_ssm", default=1024 if "mamba_d_ssm" not in raw else _inner_size(plain, raw))
    everywhere = (True,) * plain.num_layers
    return replace(
        plain,
        tensors=_BAMBA,
        norm_eps=number(raw, "rms_norm_eps", default=1e-5),
        embed_scale=factor("embedding"),
        attention_scale=plain.head_dim**-0.5 * factor("key") * attention_in**2,
        residual_scale=residual_scale,
        activation_factors=(gate, down / residual_scale),
        logit_scale=factor("lm_head"),
        recurrent=replace(_mamba(plain, raw, everywhere, width=width, scan=scan), attention=everywhere),
    )


def _factors(raw: RawConfig, key: str, count: int) -> tuple[float, ...]:
    factors = numbers(raw, key) or (1.0,) * count
    if len(factors) != count:
        raise ConfigurationError(f"config.json: {key} must have {count} numbers, got {len(factors)}")
    return factors


_NEMOTRON_H = TensorNames(
    embed="backbone.embeddings",
    final_norm="backbone.norm_f",
    layer="backbone.layers.{}",
    input_norm="norm",
    qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    o="mixer.o_proj",
    recurrent="mixer",
    up=("mixer.up_proj",),
    down="mixer.down_proj",
    router="mixer.gate",
    expert="mixer.experts.{}",
    expert_up=("up_proj",),
    shared_expert="mixer.shared_experts",
    choice_bias="mixer.gate.e_score_correction_bias",
)


def nemotron_h(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """Nemotron-H, Nemotron Nano 2 and Nemotron 3 Nano, without rotary positions."""
    if raw.get("moe_latent_size") is not None:
        raise ConfigurationError("config.json: moe_latent_size is not supported: experts behind a latent projection")
    kinds = _kinds_of_layers(raw)
    experts, has_experts = None, tuple(kind == "moe" for kind in kinds)
    if any(has_experts):
        shared = integer(raw, "moe_shared_expert_intermediate_size", default=7688)
        experts = replace(sigmoid_experts(plain, raw), layers=has_experts, shared_size=shared)
    sizes = {"mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, **raw}
    width = integer(sizes, "mamba_num_heads", default=128) * integer(sizes, "mamba_head_dim")
    layers, bias = tuple(kind == "linear_attention" for kind in kinds), flag(raw, "use_bias", default=False)
    of_mamba = replace(plain, activation=text(raw, "mamba_hidden_act", default="silu"))
    recurrent = replace(_mamba(of_mamba, sizes, layers, width=width), bias=bias)
    return replace(
        plain,
        tensors=_NEMOTRON_H,
        block="single",
        head_dim=(head_dim := integer(raw, "head_dim", "attention_head_dim", default=128)),
        rope=replace(plain.rope, dim=head_dim),
        unrotated=tuple(range(plain.num_layers)),
        norm_eps=number(raw, "layer_norm_epsilon", default=1e-5),
        activation=text(raw, "mlp_hidden_act", default="relu2"),
        gated=False,
        mlp_bias=flag(raw, "mlp_bias", default=False),
        experts=experts,
        recurrent=replace(recurrent, attention=tuple(kind == "full_attention" for kind in kinds)),
    )


def mamba2(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """Codestral Mamba 7B: Mamba 2 alone."""
    sizes = {"n_groups": 8, "ssm_state_size": raw.get("state_size", 128), "mamba_expand": raw.get("expand", 2), **raw}
    sizes |= {"mamba_n_heads": raw.get("num_heads", 128), "mamba_d_head": raw.get("head_dim", 64)}
    sizes["mamba_proj_bias"] = flag(raw, "use_bias", default=False)
    everywhere = (True,) * plain.num_layers
    tied = flag(raw, "tie_word_embeddings", default=False)
    return replace(mamba(plain, raw), tied=tied, recurrent=_mamba(plain, sizes, everywhere))


def _kinds_of_layers(raw: RawConfig) -> tuple[str, ...]:
    """The kind of each layer. Older config.json files have a letter for each."""
    stated = texts(raw, "layers_block_type") or texts(raw, "layer_types")
    kinds = tuple(_OLDER_NAMES.get(kind, kind) for kind in stated)
    if not stated:
        pattern = text(raw, "hybrid_override_pattern", default="")
        kinds = tuple(_OF_PATTERN.get(letter, letter) for letter in pattern)
    if other := sorted(set(kinds) - set(_OF_PATTERN.values())):
        raise ConfigurationError(f"config.json: layers may be {', '.join(_OF_PATTERN.values())}, not {other[0]!r:.100}")
    return kinds


def _inner_size(plain: ModelConfig, raw: RawConfig) -> int:
    return integer(raw, "mamba_expand", default=2) * plain.hidden_size


def _mamba(
    plain: ModelConfig,
    raw: RawConfig,
    layers: tuple[bool, ...],
    *,
    width: int | None = None,
    scan: ScanConfig | None = None,
) -> RecurrentConfig:
    """Mamba 2 with heads of `width` together, in the words of all families."""
    if plain.activation != "silu":
        raise ConfigurationError(f"config.json: {plain.activation!r} as activation of Mamba 2 is not supported")
    heads = integer(raw, "mamba_n_heads", "mamba_num_heads", default=128)
    groups = integer(raw, "mamba_n_groups", "n_groups", default=1)
    width = _inner_size(plain, raw) if width is None else width
    value_dim = width // heads
    if raw.get("mamba_d_head") != "auto":
        value_dim = integer(raw, "mamba_d_head", "mamba_head_dim", default=value_dim)
    if heads * value_dim != width or heads % groups:
        raise ConfigurationError(
            f"config.json: {heads} heads of {value_dim} in {groups} groups do not fit a Mamba 2 layer of {width}"
        )
    state = integer(raw, "mamba_d_state", "ssm_state_size", default=256)
    return RecurrentConfig(
        kind="scan",
        layers=layers,
        kernel=integer(raw, "mamba_d_conv", "conv_kernel", default=4, least=2),
        channels=width + 2 * groups * state,
        bias=flag(raw, "mamba_proj_bias", default=False),
        conv_bias=flag(raw, "mamba_conv_bias", default=flag(raw, "use_conv_bias", default=True)),
        num_heads=heads,
        num_key_heads=groups,
        key_dim=state,
        value_dim=value_dim,
        scan=replace(scan or ScanConfig(), step_limits=_step_limits(raw)),
    )


def _step_limits(raw: RawConfig) -> tuple[float, float]:
    """The least and the largest step. transformers writes infinity as an object."""
    given = raw.get("time_step_limit")
    stated = [0.0, inf] if given is None else given if isinstance(given, list) else []
    limits = [inf if each == _INFINITY else each for each in stated]
    are_numbers = len(limits) == 2 and all(type(each) in (int, float) for each in limits)
    if not are_numbers or not 0 <= limits[0] <= limits[1]:
        raise ConfigurationError(f"config.json: time_step_limit must be two numbers from 0 on, got {given!r:.100}")
    return float(limits[0]), float(limits[1])
