"""Architectures of llama.cpp as Hugging Face knows them: names of tensors, and how their numbers are stored."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from checkpoint.gguf import members
from checkpoint.gguf.members import Metadata

_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LLAMA = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QWEN3 = _LLAMA | {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_SHARED_EXPERT = {
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_GEMMA2 = _LLAMA | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA3 = _GEMMA2 | {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_BEHIND = _QWEN3 | {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GLM4 = _LLAMA | {
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "ffn_up": "mlp.gate_up_proj",
}
_SHARED_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_CHOICE = {"exp_probs_b": "mlp.gate.e_score_correction_bias"}
_NEXT = {
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.shared_head_norm": "shared_head.norm",
    "nextn.shared_head_head": "shared_head.head",
}
_GLM4_MOE = _QWEN3 | _SHARED_EXPERTS | _CHOICE | _NEXT | {"post_attention_norm": "post_attention_layernorm"}
_BAILING = (
    _LLAMA
    | _SHARED_EXPERTS
    | _NEXT
    | {
        "attn_qkv": "attention.query_key_value",
        "attn_output": "attention.dense",
        "attn_q_norm": "attention.query_layernorm",
        "attn_k_norm": "attention.key_layernorm",
        "exp_probs_b": "mlp.gate.expert_bias",
    }
)
_HUNYUAN = _LLAMA | {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
_SEED_OSS = _LLAMA | {"post_attention_norm": "post_attention_layernorm"}
_LFM2_OUTSIDE = _OUTSIDE | {"token_embd_norm": "model.embedding_norm", "output_norm": "model.embedding_norm"}
_LFM2 = {
    "attn_norm": "operator_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}
_LFM2_MOE = _LFM2 | {"ffn_gate_inp": "feed_forward.gate", "exp_probs_b": "feed_forward.expert_bias"}
_EXAONE_OUTSIDE = {"token_embd": "transformer.wte", "output_norm": "transformer.ln_f", "output": "lm_head"}
_EXAONE = {
    "attn_norm": "ln_1",
    "attn_q": "attn.attention.q_proj",
    "attn_k": "attn.attention.k_proj",
    "attn_v": "attn.attention.v_proj",
    "attn_output": "attn.attention.out_proj",
    "ffn_norm": "ln_2",
    "ffn_gate": "mlp.c_fc_0",
    "ffn_up": "mlp.c_fc_1",
    "ffn_down": "mlp.c_proj",
}
_PHI3 = _LLAMA | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_PHI2 = _LLAMA | {"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}
_STARCODER2 = _LLAMA | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}

_GPT2_OUTSIDE = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
_GPT2 = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_BLOOM_OUTSIDE = {
    "token_embd": "transformer.word_embeddings",
    "token_embd_norm": "transformer.word_embeddings_layernorm",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
_BLOOM = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attention.query_key_value",
    "attn_output": "self_attention.dense",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
_FALCON_NORMS = {"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"}
_NEOX_OUTSIDE = {
    "token_embd": "gpt_neox.embed_in",
    "output_norm": "gpt_neox.final_layer_norm",
    "output": "embed_out",
}
_NEOX = _BLOOM | {"attn_qkv": "attention.query_key_value", "attn_output": "attention.dense"}

_EXPERTS = {
    "ffn_gate": "mlp.experts.{}.gate_proj",
    "ffn_up": "mlp.experts.{}.up_proj",
    "ffn_down": "mlp.experts.{}.down_proj",
}
_LFM2_EXPERTS = {
    "ffn_gate": "feed_forward.experts.{}.w1",
    "ffn_up": "feed_forward.experts.{}.w3",
    "ffn_down": "feed_forward.experts.{}.w2",
}
_MIXTRAL_EXPERTS = {
    "ffn_gate": "block_sparse_moe.experts.{}.w1",
    "ffn_up": "block_sparse_moe.experts.{}.w3",
    "ffn_down": "block_sparse_moe.experts.{}.w2",
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """Names without `.weight` and `.bias`. `modules`: a layer's tensors and its modules, which follow the prefix
    `layer`; `experts`: those of an expert, by the name of the same matrix of an MLP; `outside`: tensors outside layers.

    `eps` is the key of the norms' epsilon in config.json, `facts` makes the keys that only this architecture has.
    `rotates_neighbours`: rows of queries and keys are in llama.cpp's order. `groups_qkv`: Hugging Face has queries, key
    and value of each key/value head beside each other, llama.cpp all queries first. `transposed`: Hugging Face stores
    matrices as [inputs, outputs].
    """

    model_type: str
    class_name: str
    modules: Mapping[str, str] = field(default_factory=lambda: _LLAMA)
    activation: str = "silu"
    facts: Callable[[Metadata, members.Config], dict[str, Any]] = members.none
    eps: str = "rms_norm_eps"
    experts: Mapping[str, str] = field(default_factory=dict)
    outside: Mapping[str, str] = field(default_factory=lambda: _OUTSIDE)
    layer: str = "model.layers.{}"
    rotates_neighbours: bool = False
    norm_offset: float = 0.0
    groups_qkv: bool = False
    transposed: bool = False


def _gemma(model_type: str, class_name: str, modules: Mapping[str, str], facts: Any = members.none) -> Architecture:
    return Architecture(model_type, class_name, modules, "gelu_pytorch_tanh", facts, norm_offset=1.0)


_MIXTRAL = Architecture(
    "mixtral",
    "MixtralForCausalLM",
    _LLAMA | {"ffn_gate_inp": "block_sparse_moe.gate"},
    facts=members.mixtral,
    experts=_MIXTRAL_EXPERTS,
    rotates_neighbours=True,
)
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", "LlamaForCausalLM", facts=members.llama, rotates_neighbours=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen2moe": Architecture(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        _LLAMA | _SHARED_EXPERT | {"ffn_gate_inp": "mlp.gate"},
        facts=members.qwen2_moe,
        experts=_EXPERTS,
    ),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", _QWEN3),
    "qwen3moe": Architecture(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        _QWEN3 | {"ffn_gate_inp": "mlp.gate"},
        facts=members.qwen_moe,
        experts=_EXPERTS,
    ),
    "granite": Architecture("granite", "GraniteForCausalLM", facts=members.granite, rotates_neighbours=True),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", facts=members.smollm3, rotates_neighbours=True),
    "minicpm": Architecture("minicpm", "MiniCPMForCausalLM", facts=members.minicpm, rotates_neighbours=True),
    "arcee": Architecture("arcee", "ArceeForCausalLM", _LLAMA, "relu2", members.llama, rotates_neighbours=True),
    "jais2": Architecture("jais2", "Jais2ForCausalLM", _LLAMA, "relu2", members.llama, "layer_norm_eps"),
    "ernie4_5": Architecture("ernie4_5", "Ernie4_5ForCausalLM", facts=members.ernie4_5),
    "seed_oss": Architecture("seed_oss", "SeedOssForCausalLM", _SEED_OSS, facts=members.seed_oss),
    "glm4": Architecture("glm4", "Glm4ForCausalLM", _GLM4, facts=members.glm4),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", _HUNYUAN, facts=members.llama),
    "olmo2": Architecture("olmo2", "Olmo2ForCausalLM", _BEHIND, facts=members.olmo2),
    "exaone4": Architecture("exaone4", "Exaone4ForCausalLM", _BEHIND, facts=members.exaone4),
    "exaone": Architecture(
        "exaone",
        "ExaoneForCausalLM",
        _EXAONE,
        eps="layer_norm_epsilon",
        outside=_EXAONE_OUTSIDE,
        layer="transformer.h.{}",
    ),
    "lfm2": Architecture("lfm2", "Lfm2ForCausalLM", _LFM2, facts=members.lfm2, eps="norm_eps", outside=_LFM2_OUTSIDE),
    "lfm2moe": Architecture(
        "lfm2_moe",
        "Lfm2MoeForCausalLM",
        _LFM2_MOE,
        facts=members.lfm2_moe,
        eps="norm_eps",
        experts=_LFM2_EXPERTS,
        outside=_LFM2_OUTSIDE,
    ),
    "glm4moe": Architecture("glm4_moe", "Glm4MoeForCausalLM", _GLM4_MOE, facts=members.glm4_moe, experts=_EXPERTS),
    "dots1": Architecture(
        "dots1", "Dots1ForCausalLM", _QWEN3 | _SHARED_EXPERTS | _CHOICE, facts=members.dots1, experts=_EXPERTS
    ),
    "bailingmoe2": Architecture(
        "bailing_moe",
        "BailingMoeV2ForCausalLM",
        _BAILING,
        facts=members.bailing_moe2,
        experts=_EXPERTS,
        outside=_OUTSIDE | {"token_embd": "model.word_embeddings"},
    ),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        _LLAMA | _SHARED_EXPERTS | {"exp_probs_b": "mlp.moe_statics.e_score_correction_bias"},
        facts=members.ernie4_5_moe,
        experts=_EXPERTS,
    ),
    "olmoe": Architecture(
        "olmoe", "OlmoeForCausalLM", _QWEN3 | {"ffn_gate_inp": "mlp.gate"}, facts=members.olmoe, experts=_EXPERTS
    ),
    "gemma": _gemma("gemma", "GemmaForCausalLM", _LLAMA),
    "gemma2": _gemma("gemma2", "Gemma2ForCausalLM", _GEMMA2, members.gemma2),
    "gemma3": _gemma("gemma3_text", "Gemma3ForCausalLM", _GEMMA3, members.gemma3),
    "phi2": Architecture(
        "phi",
        "PhiForCausalLM",
        _PHI2,
        "gelu_new",
        members.phi2,
        "layer_norm_eps",
        outside=_OUTSIDE | {"output_norm": "model.final_layernorm"},
    ),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", _PHI3, facts=members.phi3),
    "stablelm": Architecture("stablelm", "StableLmForCausalLM", facts=members.stablelm, eps="layer_norm_eps"),
    "starcoder2": Architecture(
        "starcoder2", "Starcoder2ForCausalLM", _STARCODER2, "gelu_pytorch_tanh", members.starcoder2, "norm_epsilon"
    ),
    "starcoder": Architecture(
        "gpt_bigcode",
        "GPTBigCodeForCausalLM",
        _GPT2,
        "gelu_pytorch_tanh",
        members.gpt2,
        "layer_norm_epsilon",
        outside=_GPT2_OUTSIDE,
        layer="transformer.h.{}",
    ),
    "gpt2": Architecture(
        "gpt2",
        "GPT2LMHeadModel",
        _GPT2,
        "gelu_new",
        members.gpt2,
        "layer_norm_epsilon",
        outside=_GPT2_OUTSIDE,
        layer="transformer.h.{}",
        transposed=True,
    ),
    "bloom": Architecture(
        "bloom",
        "BloomForCausalLM",
        _BLOOM,
        "gelu",
        eps="layer_norm_epsilon",
        outside=_BLOOM_OUTSIDE,
        layer="transformer.h.{}",
        groups_qkv=True,
    ),
    "falcon": Architecture(
        "falcon",
        "FalconForCausalLM",
        _BLOOM,
        "gelu",
        members.falcon,
        "layer_norm_epsilon",
        outside=_BLOOM_OUTSIDE,
        layer="transformer.h.{}",
        groups_qkv=True,
    ),
    "gptneox": Architecture(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        _NEOX,
        "gelu",
        members.neox,
        "layer_norm_eps",
        outside=_NEOX_OUTSIDE,
        layer="gpt_neox.layers.{}",
        groups_qkv=True,
    ),
}
"""By their names in `general.architecture`. That of Mixtral is "llama", too."""


def architecture_of(metadata: Metadata) -> Architecture | None:
    """The architecture of a file, None if it is not known."""
    if metadata.architecture == "llama" and metadata.get("expert_count"):
        return _MIXTRAL
    found = ARCHITECTURES.get(metadata.architecture)
    if metadata.architecture == "falcon" and found and metadata.has("blk.0.attn_norm_2.weight"):
        return replace(found, modules={**found.modules, **_FALCON_NORMS})
    return found
