"""What config.json says in published checkpoints, also in spellings that transformers no longer writes."""

import json
from math import log
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers.activations import ACT2CLS, ACT2FN

from engine.loading.resolve import facts_of
from engine.loading.weights import WeightsTarget, load_weights
from engine.models.activations import ACTIVATIONS, CLAMPED_SWIGLU
from engine.models.encoder_decoder.config import EncoderDecoderConfig
from engine.models.model_config import ModelConfig
from engine.models.parameters import parameter_specs
from engine.models.read_config import load_config
from engine.models.rope import ropes_of
from mesh.domain.errors import ConfigurationError

SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
BARE: dict[str, Any] = {"vocab_size": 100, "n_layer": 4, "n_head": 4}
_DYNAMIC: dict[str, Any] = {"type": "dynamic", "factor": 2.0}
_LOCAL: dict[str, Any] = {"num_local_experts": 8, "num_experts_per_tok": 2}
_MARKED: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_EXPERTS: dict[str, Any] = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.fixture
def read(tmp_path: Path) -> Any:
    """`read(architecture, **config)` is the ModelConfig of such a config.json."""

    def load(architecture: str, **raw: Any) -> ModelConfig:
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], **raw}))
        return load_config(tmp_path)

    return load


def test_sizes_by_any_name(read: Any) -> None:
    bloom = read("BloomForCausalLM", **BARE, n_embed=64, seq_length=128, n_inner=None)
    assert (bloom.hidden_size, bloom.intermediate_size, bloom.max_position_embeddings) == (64, 256, 128)
    chatglm = read(
        "ChatGLMModel",
        padded_vocab_size=100,
        hidden_size=64,
        ffn_hidden_size=96,
        num_layers=4,
        num_attention_heads=4,
        kv_channels=16,
        multi_query_attention=True,
        multi_query_group_num=2,
        seq_length=256,
        layernorm_epsilon=1e-5,
        rope_ratio=500,
    )
    assert (chatglm.vocab_size, chatglm.num_layers, chatglm.num_kv_heads, chatglm.rope.dim) == (100, 4, 2, 8)
    assert (chatglm.rope.theta, chatglm.norm_eps) == (5_000_000.0, 1e-5)


def test_forms_of_falcon(read: Any) -> None:
    assert read("FalconForCausalLM", **SIZES, multi_query=True, parallel_attn=True).num_kv_heads == 1
    new = read("FalconForCausalLM", **SIZES, num_kv_heads=2, new_decoder_architecture=True)
    assert (new.num_kv_heads, new.block, new.tied) == (2, "parallel", True)
    rw = read("FalconForCausalLM", **SIZES, alibi=True, multi_query=False, parallel_attn=False, bias=True)
    assert (rw.num_kv_heads, rw.block, rw.positions, rw.max_model_len) == (4, "sequential", "alibi", 2048)


def test_old_spellings_of_rotary_facts(read: Any) -> None:
    neox = read("GPTNeoXForCausalLM", **SIZES, rotary_pct=0.5, rotary_emb_base=20_000)
    assert (neox.rope.dim, neox.rope.theta) == (8, 20_000)
    assert read("GPTNeoXForCausalLM", **SIZES).rope.dim == 4
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    phi3 = read(
        "Phi3ForCausalLM",
        **SIZES,
        max_position_embeddings=512,
        original_max_position_embeddings=64,
        rope_scaling={"type": "su", **factors},
    )
    assert (phi3.rope.kind, phi3.rope.factor, phi3.rope.original_positions) == ("longrope", 8.0, 64)
    gemma3 = read(
        "Gemma3ForCausalLM",
        **SIZES,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        sliding_window_pattern=2,
        sliding_window=7,
    )
    assert (gemma3.rope.kind, gemma3.rope.theta) == ("linear", 1e6)
    assert (gemma3.window_rope.kind, gemma3.window_rope.theta) == ("default", 1e4)
    assert gemma3.windows == (7, None, 7, None)


def test_a_scaling_beside_rope_parameters_goes_first(read: Any) -> None:
    """Users add it to a config.json of transformers 5, as Qwen's model cards say. Base and rotated share stay."""
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    stored = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}
    rope = read("PhiForCausalLM", **SIZES, rope_parameters=stored, rope_scaling=scaling).rope
    assert (rope.kind, rope.factor, rope.original_positions, rope.theta, rope.dim) == ("yarn", 4.0, 512, 1e6, 8)
    assert (
        read("PhiForCausalLM", **SIZES, rope_parameters=stored, rope_scaling=scaling | {"rope_theta": 5e6}).rope.theta
        == 5e6
    )
    beside = read("PhiForCausalLM", **SIZES, rope_parameters=stored, rope_scaling=scaling, rope_theta=2e6).rope
    assert (beside.theta, beside.dim) == (2e6, 8)
    nested = {"full_attention": {"rope_type": "default", "rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    linear = {"rope_type": "linear", "factor": 8.0}
    gemma3 = read("Gemma3ForCausalLM", **SIZES, rope_parameters=nested, rope_scaling=linear)
    assert (gemma3.rope.kind, gemma3.rope.factor, gemma3.rope.theta) == ("linear", 8.0, 1e6)
    assert (gemma3.window_rope.kind, gemma3.window_rope.theta) == ("default", 1e4)
    assert gemma3.shareable_prefixes
    nested["sliding_attention"] |= {"rope_type": "dynamic", "factor": 2.0}
    assert not read("Gemma3ForCausalLM", **SIZES, rope_parameters=nested).shareable_prefixes


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, 0.1 * log(4) + 1),
        ({"attn_factor": 0.5}, 0.5 * (0.1 * log(4) + 1)),
        ({"attn_factor": 0.5, "mscale": 2.0, "mscale_all_dim": 1.0}, 0.5 * (0.2 * log(4) + 1) / (0.1 * log(4) + 1)),
        ({"attn_factor": 0.5, "attention_factor": 1.25}, 1.25),
    ],
)
def test_attn_factor_multiplies_what_is_inferred(read: Any, more: dict[str, float], expected: float) -> None:
    """As in vLLM; DeepSeek-R1-0528-Qwen3-8B has it."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, **more}
    config = read("Qwen3ForCausalLM", **SIZES, rope_scaling=scaling)
    (rope,) = ropes_of(config, torch.device("cpu"), torch.float32)
    cos, _ = rope.cos_sin(torch.tensor([0]), torch.tensor([1]))
    torch.testing.assert_close(cos, torch.full_like(cos, expected))
    assert ("attn_factor=0.5" in facts_of(config)) == ("attn_factor" in more)


@pytest.mark.parametrize(
    ("architecture", "facts"),
    [
        ("LlamaForCausalLM", {"hidden_act": "swish"}),
        ("PhiForCausalLM", {"hidden_act": "swish"}),
        ("GPTNeoXForCausalLM", {"hidden_act": "swish"}),
        ("ArceeForCausalLM", {"hidden_act": "swish"}),
        ("ApertusForCausalLM", {"hidden_act": "swish"}),
        ("GPT2LMHeadModel", {"activation_function": "swish"}),
        ("OPTForCausalLM", {"activation_function": "swish", "ffn_dim": 128}),
        ("FalconForCausalLM", {"activation": "swish"}),
        ("Gemma2ForCausalLM", {"hidden_activation": "swish"}),
        (
            "NemotronHForCausalLM",
            {"hybrid_override_pattern": "M*-M", "mamba_hidden_act": "swish", "mlp_hidden_act": "swish"},
        ),
    ],
)
def test_swish_is_silu(read: Any, architecture: str, facts: dict[str, Any]) -> None:
    assert read(architecture, **SIZES, **facts).activation == "silu"


@pytest.mark.parametrize("name", sorted({*ACT2CLS} - {"prelu", "xielu"}))  # those have parameters
def test_activations_have_the_names_of_transformers(read: Any, name: str) -> None:
    """Every name of a function that is computed here, under any name, is taken, and computes that function."""
    x = torch.linspace(-20, 20, 193)
    wanted = ACT2FN[name](x)
    ours = {key: activation(x) for key, activation in ACTIVATIONS.items() if key != CLAMPED_SWIGLU}
    known = {key for key, result in ours.items() if torch.allclose(result, wanted, 0, 1e-5)}
    if not known:
        with pytest.raises(ConfigurationError, match=f"activation '{name}' is not supported"):
            read("LlamaForCausalLM", **SIZES, hidden_act=name)
    else:
        assert read("LlamaForCausalLM", **SIZES, hidden_act=name).activation in known


def test_swish_is_silu_in_t5(tmp_path: Path) -> None:
    sizes = {"vocab_size": 100, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}
    facts = {"architectures": ["T5ForConditionalGeneration"], "feed_forward_proj": "gated-swish"}
    (tmp_path / "config.json").write_text(json.dumps(sizes | facts))
    config = load_config(tmp_path)
    assert isinstance(config, EncoderDecoderConfig)
    assert (config.activation, config.gated) == ("silu", True)


def test_ministral_says_which_layers_have_a_window(read: Any) -> None:
    types = ["full_attention", "sliding_attention"] * 2
    assert read("MistralForCausalLM", **SIZES, sliding_window=7, layer_types=types).windows == (None, 7, None, 7)


def test_layers_of_newer_families(read: Any) -> None:
    patterned = read("Exaone4ForCausalLM", **SIZES, sliding_window=7, sliding_window_pattern="LG")
    assert (patterned.windows, patterned.unrotated) == ((7, None, 7, None), (1, 3))
    small = read("Exaone4ForCausalLM", **SIZES, sliding_window=None, layer_types=["full_attention"] * 4)
    assert (small.windows, small.unrotated) == ((None,) * 4, ())
    assert read("MistralForCausalLM", **SIZES, sliding_window=2**70).windows == (2**62,) * 4
    smollm3 = read("SmolLM3ForCausalLM", **SIZES, no_rope_layers=[1, 0, 0, 1])
    assert (smollm3.unrotated, smollm3.rope.theta, smollm3.tied) == ((1, 2), 2e6, True)
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    olmo3 = read("Olmo3ForCausalLM", **SIZES, sliding_window=7, rope_theta=3e5, rope_scaling=scaling)
    assert (olmo3.rope.kind, olmo3.rope.theta, olmo3.windows) == ("yarn", 3e5, (7, 7, 7, None))
    assert (olmo3.window_rope.kind, olmo3.window_rope.theta) == ("default", 3e5)
    assert read("Olmo3ForCausalLM", **SIZES).window_rope is None
    command_r = read("CohereForCausalLM", **SIZES, max_position_embeddings=64, model_max_length=256)
    assert (command_r.max_model_len, command_r.rope.theta, command_r.norm_eps) == (256, 5e5, 1e-5)
    scaling = {"type": "dynamic", "factor": 1.0, "alpha": 1000.0}
    hunyuan = read("HunYuanDenseV1ForCausalLM", **SIZES, max_position_embeddings=64, rope_scaling=scaling)
    assert (hunyuan.rope.kind, hunyuan.rope.alpha, hunyuan.max_model_len) == ("default", 1000.0, 64)
    assert hunyuan.shareable_prefixes
    kinds = {"layer_types": ["conv", "sliding_attention", "full_attention", "conv"]}
    silent = {kind: {"rope_type": "default"} for kind in ("full_attention", "sliding_attention")}
    lfm3 = read("Lfm3ForCausalLM", **SIZES, **kinds, rope_parameters=silent)
    assert (lfm3.rope.theta, lfm3.window_rope) == (1e6, None)
    lfm3 = read("Lfm3ForCausalLM", **SIZES, **kinds, rope_theta=5e4)
    assert (lfm3.rope.theta, lfm3.window_rope.theta) == (1e6, 1e4)
    caps = [
        read("NanoChatForCausalLM", **SIZES, **said).logit_softcap for said in ({}, {"final_logit_softcapping": None})
    ]
    assert caps == [15.0, None]


def test_layers_of_newer_mixtures_unless_stated(read: Any) -> None:
    exaone = read("ExaoneMoeForCausalLM", **SIZES, **_MARKED)
    assert (exaone.windows, exaone.unrotated) == ((4096, 4096, 4096, None), (3,))
    assert (exaone.experts.layers, exaone.experts.routed_scale) == ((False, True, True, True), 2.5)
    trinity = read("AfmoeForCausalLM", **SIZES, **_MARKED, global_attn_every_n_layers=2, num_dense_layers=3)
    assert (trinity.windows, trinity.unrotated) == ((1024, None, 1024, None), (1, 3))
    assert trinity.experts.layers == (False, False, False, True)
    whole = read("AfmoeForCausalLM", **SIZES, **_MARKED, sliding_window=None)
    assert (whole.windows, whole.unrotated) == ((None,) * 4, (3,))
    hunyuan = read("HYV3ForCausalLM", **SIZES, **_MARKED, num_shared_experts=0)
    assert hunyuan.experts.shared_size == SIZES["intermediate_size"]
    kolibri = read("Kolibri1ForCausalLM", **SIZES | {"num_hidden_layers": 6}, **_MARKED)
    assert (kolibri.windows, kolibri.unrotated) == ((513, 513, 513, 513, None, 513), (4,))
    command = read("Cohere2MoeForCausalLM", **SIZES, first_k_dense_replace=2, sliding_window=7)
    assert (command.windows, command.unrotated) == ((None, None, 7, 7), ())
    assert command.experts.layers == (False, False, True, True)
    command = read("Cohere2MoeForCausalLM", **SIZES, sliding_window=7, sliding_window_pattern=2)
    assert (command.windows, command.unrotated, command.norm) == ((7, None, 7, None), (1, 3), "layer")
    mellum = read("MellumForCausalLM", **SIZES, **_MARKED, layer_types=["full_attention", "sliding_attention"] * 2)
    assert (mellum.windows, mellum.rope.theta, mellum.window_rope.theta) == ((None, 1024, None, 1024), 5e5, 1e4)
    granite = read("GraniteMoeSWAForCausalLM", **SIZES, **_LOCAL, layer_rope_theta=[0, 1e4, 1e4, 1e4])
    assert (granite.windows, granite.unrotated) == ((None, 128, 128, 128), (0,))
    assert (granite.rope.theta, granite.window_rope) == (1e4, None)
    mistral = read("Mistral4ForCausalLM", **SIZES)
    assert (mistral.rope.kind, mistral.rope.query_growth, mistral.max_model_len) == ("yarn", 0.1, 2**20)


def test_gemma_means_tanh_where_it_says_gelu(read: Any) -> None:
    gemma = read("GemmaForCausalLM", **SIZES, hidden_act="gelu", hidden_activation=None)
    assert (gemma.activation, gemma.embed_scale, gemma.tied) == ("gelu_pytorch_tanh", 8.0, True)


@pytest.mark.parametrize("architecture", ["GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM"])
def test_gemma_with_another_activation(read: Any, architecture: str) -> None:
    """As fine-tuned for sparse activations. From the second on, only one of two names counts."""
    assert read(architecture, **SIZES).activation == "gelu_pytorch_tanh"
    assert read(architecture, **SIZES, hidden_act="gelu", hidden_activation="silu").activation == "silu"
    only_former = read(architecture, **SIZES, hidden_act="relu").activation
    assert only_former == ("relu" if architecture == "GemmaForCausalLM" else "gelu_pytorch_tanh")
    with pytest.raises(ConfigurationError, match="activation 'quick_gelu' is not supported"):
        read(architecture, **SIZES, hidden_activation="quick_gelu")


def test_baichuan_2_norms_its_output_matrix(read: Any, tmp_path: Path) -> None:
    two = read("BaichuanForCausalLM", **SIZES | {"vocab_size": 125_696}, max_position_embeddings=64)
    spec = next(spec for spec in parameter_specs(two) if spec.name == "lm_head")
    save_file({"lm_head.weight": torch.randn(125_696, 64)}, tmp_path / "model.safetensors")
    loaded = (
        load_weights(tmp_path, [spec], WeightsTarget(torch.device("cpu"), torch.float32)).take_linear("lm_head").weight
    )
    torch.testing.assert_close(torch.linalg.vector_norm(loaded, dim=1), torch.ones(125_696))
    assert not read("BaichuanForCausalLM", **SIZES, max_position_embeddings=64).tensors.unit_lm_head


@pytest.mark.parametrize(
    ("architecture", "change", "words"),
    [
        ("GPT2LMHeadModel", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True"),
        ("PhiForCausalLM", {"qk_layernorm": True}, "qk_layernorm True"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        ("HunYuanDenseV1ForCausalLM", {"use_cla": True}, "use_cla True"),
        ("Cohere2ForCausalLM", {"use_qk_norm": True}, "use_qk_norm True"),
        ("ApertusForCausalLM", {"qk_norm": False}, "qk_norm False"),
        ("DeepseekV2ForCausalLM", {"norm_topk_prob": True}, "norm_topk_prob True"),
        ("DeepseekV2ForCausalLM", {"mlp_bias": True}, "mlp_bias True"),
        ("DeepseekV2ForCausalLM", {"num_experts_per_tok": 2, "topk_method": "noaux_tc"}, "topk_method 'noaux_tc'"),
        ("Ernie4_5_MoeForCausalLM", {"use_bias": True}, "use_bias True"),
        ("Ernie4_5_MoeForCausalLM", {"moe_norm_min": 0.5}, "moe_norm_min 0.5 is not supported"),
        ("DeepseekForCausalLM", {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid'"),
        ("GPTNeoXForCausalLM", {"rotary_pct": 0.2}, "of which 3 are rotated"),
        ("OlmoeForCausalLM", {"clip_qkv": 8.0}, "clip_qkv is not supported"),
        (
            "OlmoeForCausalLM",
            {"num_experts": 2, "num_experts_per_tok": 3},
            "cannot have 3 experts of 1 of 1 groups of 2",
        ),
        ("Dots1ForCausalLM", _EXPERTS | {"n_group": 3}, "8 experts cannot be divided into 3 groups"),
        ("Dots1ForCausalLM", _EXPERTS | {"n_routed_experts": 10**9}, "1000000000 experts are more than 4096"),
        ("HYV3ForCausalLM", _MARKED | {"mlp_bias": True}, "mlp_bias True"),
        ("AfmoeForCausalLM", _MARKED | {"attention_bias": True}, "attention_bias True"),
        ("AfmoeForCausalLM", _MARKED | {"route_norm": False}, "route_norm False"),
        ("AfmoeForCausalLM", _MARKED | {"score_func": "softmax"}, "score_func 'softmax'"),
        (
            "MellumForCausalLM",
            {"rope_parameters": {"sliding_attention": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}},
            "partial_rotary_factor 0.5 of sliding_attention is not supported",
        ),
        ("ExaoneMoeForCausalLM", _MARKED | {"mlp_layer_types": ["sparse"]}, "mlp_layer_types has 1 entries for 4"),
        ("ExaoneMoeForCausalLM", _MARKED | {"mlp_layer_types": ["x"] * 4}, "dense and sparse, not 'x'"),
        ("GraniteMoeSWAForCausalLM", _LOCAL | {"layer_rope_theta": [1e4]}, "layer_rope_theta has 1 entries for 4"),
        (
            "GraniteMoeSWAForCausalLM",
            _LOCAL | {"layer_rope_theta": [1e4, 1e4, 1e5, 0]},
            "with other bases than one for",
        ),
        ("Cohere2MoeForCausalLM", {"expert_selection_fn": "x"}, "expert_selection_fn 'x' is not supported"),
        ("Cohere2MoeForCausalLM", {"shared_expert_combination_strategy": "x"}, "combination_strategy 'x' is not"),
        ("Mistral4ForCausalLM", {"partial_rotary_factor": 1.0}, "partial_rotary_factor does not fit qk_rope_head_dim"),
        ("LlamaForCausalLM", {"num_hidden_layers": 10**9}, "1000000000 layers are more than 4096"),
        ("HunYuanMoEV1ForCausalLM", {"num_experts": 8, "moe_topk": [2, 3]}, "moe_topk must be the same in all layers"),
        ("HunYuanMoEV1ForCausalLM", {"num_shared_expert": [2]}, "num_shared_expert 2 is not supported"),
        ("MiniMaxM2ForCausalLM", {"attn_type_list": [0, 1]}, "with linear attention is not supported"),
        ("PhimoeForCausalLM", {"num_experts_per_tok": 3}, "must be 2 for Phi's SparseMixer"),
        ("FalconH1ForCausalLM", {"projectors_bias": True}, "projectors_bias of Falcon-H1 is not supported"),
        ("FalconH1ForCausalLM", {"ssm_multipliers": [1.0]}, "ssm_multipliers must have 5 numbers, got 1"),
        ("NemotronHForCausalLM", {"hybrid_override_pattern": "M*-E", "moe_latent_size": 8}, "behind a latent"),
        ("NemotronHForCausalLM", {"hybrid_override_pattern": "M*-x"}, "not 'x'"),
        ("NemotronHForCausalLM", {"hybrid_override_pattern": "M*-"}, "3 entries for 4 layers"),
        ("NemotronHForCausalLM", {"hybrid_override_pattern": "M-M-"}, "without any layer of attention"),
        ("LlamaForCausalLM", {"rope_scaling": _DYNAMIC}, "'dynamic' needs max_position_embeddings"),
        ("Qwen3ForCausalLM", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "'yarn' needs max_position_embeddings"),
        ("NemotronHForCausalLM", {"hybrid_override_pattern": "*-*-"}, "without any recurrent layer"),
        ("Qwen3_5ForCausalLM", {"layer_types": ["full_attention"] * 4}, "without any recurrent layer"),
        ("BambaForCausalLM", {"mamba_n_heads": 3}, "3 heads of 42 in 1 groups do not fit a Mamba 2 layer of 128"),
        ("BambaForCausalLM", {"hidden_act": "gelu"}, "'gelu' as activation of Mamba 2"),
        ("NemotronHForCausalLM", {"hybrid_override_pattern": "M*-M", "mamba_hidden_act": "relu"}, "'relu' as activ"),
        ("Qwen3_5ForCausalLM", {"hidden_act": "gelu"}, "'gelu' as activation of delta nets"),
        ("GPTNeoForCausalLM", {"attention_types": [[["global", "local"], 10**12]]}, "names 2000000000000 layers of 4"),
        ("GPTNeoForCausalLM", {"attention_types": ["global"]}, "must be a list of patterns"),
        ("GPTNeoForCausalLM", {"attention_types": [[["global", "x"], 2]]}, "not 'x'"),
        (
            "MptForCausalLM",
            {"norm_type": "low_precision_rmsnorm"},
            "norm_type 'low_precision_rmsnorm' is not supported",
        ),
        ("MptForCausalLM", {"attn_config": {"attn_type": "grouped_query_attention"}}, "attn_type 'grouped_query_at"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(read: Any, architecture: str, change: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        read(architecture, **SIZES | change)


def test_falcon_mamba_as_published(read: Any) -> None:
    """Its config.json states a factor of the width that is not that of its tensors."""
    stated = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100, "expand": 16}
    assert read("FalconMambaForCausalLM", **stated, intermediate_size=128).recurrent.channels == 128
    assert read("FalconMambaForCausalLM", **stated).recurrent.channels == 1024


def test_granite_4_has_a_shared_expert_unless_stated(read: Any) -> None:
    mamba = {"mamba_n_heads": 8, "layer_types": ["mamba", "attention"] * 2}
    assert read("GraniteMoeHybridForCausalLM", **SIZES, **mamba).experts.shared_size == 1024
    assert read("GraniteMoeHybridForCausalLM", **SIZES, **mamba, shared_intermediate_size=0).experts.shared_size == 0


def test_gpt_neos_layers_alternate_unless_stated(read: Any) -> None:
    assert read("GPTNeoForCausalLM", **SIZES | {"num_hidden_layers": 3}).windows == (None, 256, None)


def test_experts_are_stored_one_by_one_or_stacked(tmp_path: Path, read: Any) -> None:
    config = read("Dots1ForCausalLM", **SIZES | _EXPERTS | {"num_hidden_layers": 1})
    specs = [spec for spec in parameter_specs(config) if ".experts." in spec.name]
    tensors = {source.name: torch.randn(source.shape) for spec in specs for source in spec.sources}
    ups = torch.stack([torch.cat([tensors[source.name] for source in spec.sources]) for spec in specs[::2]])
    downs = torch.stack([tensors[spec.sources[0].name] for spec in specs[1::2]])
    names = [f"model.layers.0.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
    target = WeightsTarget(torch.device("cpu"), torch.float32)
    loaded = []
    for stored in (tensors, dict(zip(names, (ups, downs), strict=True))):
        save_file(stored, tmp_path / "model.safetensors")
        parameters = load_weights(tmp_path, specs, target)
        loaded.append([parameters.take_linear(spec.name).weight for spec in specs])
    assert all(map(torch.equal, *loaded))
    save_file({names[0]: ups[1:], names[1]: downs}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigurationError, match=r"gate_up_proj has shape \[7, 64, 64\], config.json implies \[8,"):
        load_weights(tmp_path, specs, target)


def test_checkpoints_of_the_bare_model(tmp_path: Path, read: Any) -> None:
    """GPT-2 is published without the first part of its tensors' names."""
    config = read("GPT2LMHeadModel", **BARE, n_embd=64, n_positions=32)
    specs = parameter_specs(config)
    tensors = {source.name: torch.randn(source.shape) for spec in specs for source in spec.sources}
    save_file(
        {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors"
    )
    loaded = load_weights(tmp_path, specs, WeightsTarget(torch.device("cpu"), torch.float32))
    assert torch.equal(loaded.take_linear("layers.0.qkv").weight, tensors["transformer.h.0.attn.c_attn.weight"].T)


def test_gpt_oss_as_released(read: Any) -> None:
    """The released config.json states neither a dtype nor an alpha."""
    yarn = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
    facts = {**SIZES, "num_local_experts": 8, "num_experts_per_tok": 4, "max_position_embeddings": 131072}
    released = read("GptOssForCausalLM", **facts, rope_theta=150000, rope_scaling=yarn, swiglu_limit=7.0)
    assert (released.dtype, released.max_model_len, released.rope.truncate) == ("bfloat16", 131072, False)
    assert released.windows == (128, None, 128, None)
    assert read("GptOssForCausalLM", **facts).rope == released.rope
    with pytest.raises(ConfigurationError, match="swiglu_limit 5 is not supported, only 7"):
        read("GptOssForCausalLM", **facts, swiglu_limit=5)
    with pytest.raises(ConfigurationError, match="hidden_act gelu is not supported for gpt-oss"):
        read("GptOssForCausalLM", **facts, hidden_act="gelu")
