"""Workers of an older and a newer version agree on the fingerprint of a model that they compute alike."""

from dataclasses import dataclass, field, fields, make_dataclass

import pytest

from engine.loading.resolve import facts_of
from engine.models.encoder_decoder.config import EncoderDecoderConfig
from engine.models.experts_config import ExpertsConfig
from engine.models.model_config import ModelConfig, RopeConfig
from engine.models.tensor_names import TensorNames

FIRST_FACTS = {
    ModelConfig: "architecture vocab_size hidden_size intermediate_size num_layers num_heads num_kv_heads head_dim "
    "max_position_embeddings rope windows dtype tied tensors block norm norm_eps norm_bias qk_norm positions "
    "window_rope attention_scale attention_softcap alibi_scale activation gated experts qkv_bias o_bias mlp_bias "
    "lm_head_bias embed_norm embed_scale residual_scale logit_scale logit_softcap counts_scaled_positions",
    RopeConfig: "kind theta dim original_positions factor low_freq_factor high_freq_factor attention_factor beta_fast "
    "beta_slow mscale mscale_all_dim truncate short_factor long_factor",
    TensorNames: "embed embed_norm positions final_norm lm_head layer input_norm qkv q_norm k_norm o attn_out_norm "
    "post_norm up down mlp_out_norm router expert expert_up expert_down shared_expert shared_gate grouped_qkv "
    "transposed interleaved_rotary norm_offset unit_lm_head first_position",
    ExpertsConfig: "num_experts top_k intermediate_size normalised layers shared_size shared_gate",
    EncoderDecoderConfig: "architecture vocab_size hidden_size intermediate_size num_encoder_layers num_layers "
    "num_heads head_dim num_buckets max_distance norm_eps activation gated logit_scale dtype",
}


@pytest.mark.parametrize("config", FIRST_FACTS, ids=lambda config: config.__name__)
def test_facts_of_later_versions_have_no_repr(config: type) -> None:
    """A new fact needs `field(default=..., repr=False)`; without it, no worker mixes with those of older versions."""
    assert " ".join(fact.name for fact in fields(config) if fact.repr) == FIRST_FACTS[config]


@dataclass(frozen=True)
class Part:
    kind: str
    later: int = field(default=1, repr=False)


OLD = make_dataclass("Config", [("size", int), ("part", Part)], frozen=True)
NEW = make_dataclass(
    "Config", [("size", int), ("part", Part), ("later", bool, field(default=False, repr=False))], frozen=True
)


def test_later_facts_count_only_where_they_are_not_the_default() -> None:
    plain = facts_of(OLD(1, Part("a")))
    assert plain == repr(OLD(1, Part("a"))) == facts_of(NEW(1, Part("a")))
    others = [NEW(1, Part("a"), True), NEW(1, Part("a", 2)), NEW(1, Part("b")), NEW(2, Part("a"))]
    assert len({plain, *map(facts_of, others)}) == 5
