"""Mixtures whose experts are chosen by sigmoids and a bias, beside shared ones, with norms of queries and keys.

K-EXAONE and Hunyuan 3 have norms before attention and MLP, Trinity and Kolibri 1 norms before and after. All but
Hunyuan 3 have windows in most layers, and no rotary positions in the others. Trinity has gates of attention's results.
"""

from dataclasses import replace
from math import sqrt

from checkpoint.config_json import RawConfig, flag, integer, number, refuse
from engine.models.experts_config import ExpertsConfig
from engine.models.families.layer_kinds import default_rope, windows_but_every
from engine.models.families.mixtures import expert_layers
from engine.models.families.olmo import exaone4
from engine.models.model_config import ModelConfig, sliding_window
from engine.models.tensor_names import TensorNames


def _experts(plain: ModelConfig, raw: RawConfig, num_dense: int, num_shared: int) -> ExpertsConfig:
    inner = integer(raw, "moe_intermediate_size")
    return ExpertsConfig(
        num_experts=integer(raw, "num_experts", "num_local_experts"),
        top_k=integer(raw, "num_experts_per_tok"),
        intermediate_size=inner,
        normalised=True,
        layers=expert_layers(plain, raw, num_dense),
        shared_size=integer(raw, "num_shared_experts", default=num_shared, least=0) * inner,
        scoring="sigmoid",
        choice_bias=True,
        wide_router=True,
    )


_EXAONE = TensorNames(shared_expert="mlp.shared_experts", choice_bias="mlp.e_score_correction_bias")


def exaone_moe(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """K-EXAONE: attention of EXAONE 4 behind its norm."""
    experts = _experts(plain, raw, integer(raw, "first_k_dense_replace", default=1, least=0), 1)
    experts = replace(
        experts,
        normalised=flag(raw, "norm_topk_prob", default=True),
        num_groups=integer(raw, "n_group", default=1),
        top_groups=integer(raw, "topk_group", default=1),
        routed_scale=number(raw, "routed_scaling_factor", default=2.5),
    )
    return replace(exaone4(plain, raw), tensors=_EXAONE, block="sequential", experts=experts)


_HUNYUAN = TensorNames(router="mlp.router.gate", shared_expert="mlp.shared_mlp", choice_bias="mlp.expert_bias")


def hunyuan3(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    refuse(raw, mlp_bias=True)
    bias = flag(raw, "attention_bias", default=False)
    experts = _experts(plain, raw, 1, 1)
    return replace(
        plain,
        tensors=_HUNYUAN,
        rope=default_rope(plain, raw, 11_158_840.0),
        qk_norm=True,
        qkv_bias=bias,
        o_bias=bias,
        experts=replace(
            experts,
            shared_size=experts.shared_size or plain.intermediate_size,  # as transformers reads 0
            routed_scale=number(raw, "router_scaling_factor", default=2.826),
        ),
    )


_AFMOE = TensorNames(
    attention_gate="self_attn.gate_proj",
    attn_out_norm="post_attention_layernorm",
    post_norm="pre_mlp_layernorm",
    mlp_out_norm="post_mlp_layernorm",
    router="mlp.router.gate",
    shared_expert="mlp.shared_experts",
    choice_bias="mlp.expert_bias",
)


def afmoe(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """Arcee's Trinity Nano, Mini and Large."""
    refuse(raw, attention_bias=True, route_norm=False, score_func="softmax")  # the last two of Arcee's own code
    every = integer(raw, "global_attn_every_n_layers", default=4)
    experts = _experts(plain, raw, integer(raw, "num_dense_layers", default=1, least=0), 2)
    experts = replace(experts, routed_scale=number(raw, "route_scale", default=1.0), wide_router=False)
    return replace(
        _local_and_global(plain, raw, every, sliding_window(raw, 1024)),
        tensors=_AFMOE,
        attention_gate=True,
        embed_scale=sqrt(plain.hidden_size) if flag(raw, "mup_enabled", default=False) else 1.0,
        experts=experts,
    )


_KOLIBRI = TensorNames(
    attn_out_norm="post_attn_norm",
    mlp_out_norm="post_ffn_norm",
    shared_expert="mlp.shared_experts",
    choice_bias="moe.router.expert_bias",
)


def kolibri1(plain: ModelConfig, raw: RawConfig) -> ModelConfig:
    """Kolibri 1: the bias of the choice is added to outputs of the router, and all layers have experts."""
    experts = _experts(plain, {**raw, "mlp_layer_types": None}, 0, 0)
    shared = integer(raw, "shared_expert_intermediate_size", default=512)
    return replace(
        _local_and_global(plain, raw, 5, sliding_window(raw, 513)),
        tensors=_KOLIBRI,
        intermediate_size=shared,  # of MLPs, which no layer has
        experts=replace(
            experts,
            normalised=flag(raw, "norm_topk_prob", default=False),
            shared_size=shared,
            biases_outputs=True,
        ),
    )


def _local_and_global(plain: ModelConfig, raw: RawConfig, every: int, window: int | None) -> ModelConfig:
    """Norms before and after attention and MLP; every so many layers, or as `layer_types` says, one without rotary
    positions and a window.
    """
    are_local = windows_but_every(every, plain, raw, 1)
    return replace(
        plain,
        block="sandwich",
        qk_norm=True,
        windows=tuple(window if is_local else None for is_local in are_local),
        unrotated=tuple(layer for layer, is_local in enumerate(are_local) if not is_local),
    )
