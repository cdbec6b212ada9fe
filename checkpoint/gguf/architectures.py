"""Architectures of llama.cpp as Hugging Face knows them: names of tensors, and keys of config.json that others lack."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from checkpoint.gguf.file import GgufFile
from mesh.domain.errors import ConfigurationError

Config = Mapping[str, Any]


class Metadata:
    """The facts of a file about its model, by their names after that of the architecture."""

    def __init__(self, file: GgufFile) -> None:
        self.architecture = str(file.require("general.architecture"))
        self._file = file

    def get(self, key: str) -> Any:
        return self._file.metadata.get(f"{self.architecture}.{key}")

    def require(self, key: str) -> Any:
        """A value that all layers have. Raises ConfigurationError."""
        value = self._file.require(f"{self.architecture}.{key}")
        if isinstance(value, list):
            if len(set(value)) > 1:
                raise ConfigurationError(f"{self._file.path}: layers that differ in {key} are not read")
            value = value[0]
        return value

    def count(self, key: str) -> int:
        count = int(self.require(key))
        if count < 1:
            raise ConfigurationError(
                f"{self._file.path} says {self.architecture}.{key} {count}, which must be at least 1"
            )
        return count

    @property
    def kv_heads(self) -> int:
        heads = self.count("attention.head_count")
        return self.count("attention.head_count_kv") if self.get("attention.head_count_kv") else heads

    def has(self, tensor: str) -> bool:
        return tensor in self._file.tensors


def decimal(number: float) -> float:
    """The number of few digits that was rounded to fp32."""
    return float(f"{number:.7g}")


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
_MIXTRAL_EXPERTS = {
    "ffn_gate": "block_sparse_moe.experts.{}.w1",
    "ffn_up": "block_sparse_moe.experts.{}.w3",
    "ffn_down": "block_sparse_moe.experts.{}.w2",
}


def _none(metadata: Metadata, config: Config) -> dict[str, Any]:
    return {}


def _llama(metadata: Metadata, config: Config) -> dict[str, Any]:
    return {"attention_bias": metadata.has("blk.0.attn_q.bias"), "mlp_bias": metadata.has("blk.0.ffn_up.bias")}


def _granite(metadata: Metadata, config: Config) -> dict[str, Any]:
    scale = metadata.get("attention.scale")
    return _llama(metadata, config) | {
        "embedding_multiplier": decimal(metadata.get("embedding_scale") or 1.0),
        "attention_multiplier": decimal(scale) if scale else config["head_dim"] ** -0.5,
        "residual_multiplier": decimal(metadata.get("residual_scale") or 1.0),
        "logits_scaling": decimal(metadata.get("logit_scale") or 1.0),
    }


def _mixtral(metadata: Metadata, config: Config) -> dict[str, Any]:
    return {
        "num_local_experts": metadata.count("expert_count"),
        "num_experts_per_tok": metadata.count("expert_used_count"),
        "sliding_window": None,  # which llama.cpp does not know in models of this kind
    }


def _qwen_moe(metadata: Metadata, config: Config) -> dict[str, Any]:
    return {
        "num_experts": metadata.count("expert_count"),
        "num_experts_per_tok": metadata.count("expert_used_count"),
        "moe_intermediate_size": metadata.count("expert_feed_forward_length"),
        "norm_topk_prob": metadata.architecture == "qwen3moe",  # as llama.cpp does
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _qwen2_moe(metadata: Metadata, config: Config) -> dict[str, Any]:
    shared = metadata.count("expert_shared_feed_forward_length")
    return _qwen_moe(metadata, config) | {"shared_expert_intermediate_size": shared}


def _phi3(metadata: Metadata, config: Config) -> dict[str, Any]:
    window, original = metadata.get("attention.sliding_window"), metadata.get("rope.scaling.original_context_length")
    return {
        "sliding_window": int(window) if window else None,
        "original_max_position_embeddings": int(original or metadata.count("context_length")),
        "pad_token_id": None,  # transformers' default is an id of Phi's own vocabulary
    }


def _gemma2(metadata: Metadata, config: Config) -> dict[str, Any]:
    # The first files of Gemma 2 do not say its caps. Gemma 3 has none.
    caps = (50.0, 30.0) if metadata.architecture == "gemma2" else (None, None)
    # llama.cpp knows the models of 27B by their layers. All others scale by the size of a head.
    is_27b = config["num_hidden_layers"] == {"gemma2": 46, "gemma3": 62}[metadata.architecture]
    return {
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"]
        if is_27b
        else config["head_dim"],
        "sliding_window": int(metadata.get("attention.sliding_window") or 4096),
        "attn_logit_softcapping": metadata.get("attn_logit_softcapping") or caps[0],
        "final_logit_softcapping": metadata.get("final_logit_softcapping") or caps[1],
    }


def _gemma3(metadata: Metadata, config: Config) -> dict[str, Any]:
    base = decimal(metadata.get("rope.freq_base_swa") or 10_000.0)
    return _gemma2(metadata, config) | {"rope_local_base_freq": base, "sliding_window_pattern": 6}


def _gpt2(metadata: Metadata, config: Config) -> dict[str, Any]:
    return {"n_inner": config["intermediate_size"], "multi_query": metadata.architecture == "starcoder"}


def _falcon(metadata: Metadata, config: Config) -> dict[str, Any]:
    return {
        "new_decoder_architecture": metadata.kv_heads > 1,
        "num_ln_in_parallel_attn": 2 if metadata.has("blk.0.attn_norm_2.weight") else 1,
        "num_kv_heads": metadata.kv_heads,
        "ffn_hidden_size": config["intermediate_size"],
    }


def _rotated_share(config: Config) -> dict[str, Any]:
    """The rotated share, for families where transformers' default is not the whole head."""
    return {"partial_rotary_factor": config.get("partial_rotary_factor", 1.0)}


def _phi2(metadata: Metadata, config: Config) -> dict[str, Any]:
    return _rotated_share(config)


def _neox(metadata: Metadata, config: Config) -> dict[str, Any]:
    is_parallel, rotated = metadata.get("use_parallel_residual"), _rotated_share(config)
    return rotated | {
        "rotary_pct": rotated["partial_rotary_factor"],
        "use_parallel_residual": is_parallel is None or bool(is_parallel),
        "attention_bias": metadata.has("blk.0.attn_qkv.bias"),
    }


def _stablelm(metadata: Metadata, config: Config) -> dict[str, Any]:
    return _rotated_share(config) | {
        "use_parallel_residual": not metadata.has("blk.0.ffn_norm.weight"),
        "use_qkv_bias": metadata.has("blk.0.attn_q.bias"),
    }


def _starcoder2(metadata: Metadata, config: Config) -> dict[str, Any]:
    return {"use_bias": metadata.has("blk.0.attn_q.bias"), "sliding_window": None}


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
    facts: Callable[[Metadata, Config], dict[str, Any]] = _none
    eps: str = "rms_norm_eps"
    experts: Mapping[str, str] = field(default_factory=dict)
    outside: Mapping[str, str] = field(default_factory=lambda: _OUTSIDE)
    layer: str = "model.layers.{}"
    rotates_neighbours: bool = False
    norm_offset: float = 0.0
    groups_qkv: bool = False
    transposed: bool = False


def _gemma(model_type: str, class_name: str, modules: Mapping[str, str], facts: Any = _none) -> Architecture:
    return Architecture(model_type, class_name, modules, "gelu_pytorch_tanh", facts, norm_offset=1.0)


_MIXTRAL = Architecture(
    "mixtral",
    "MixtralForCausalLM",
    _LLAMA | {"ffn_gate_inp": "block_sparse_moe.gate"},
    facts=_mixtral,
    experts=_MIXTRAL_EXPERTS,
    rotates_neighbours=True,
)
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", "LlamaForCausalLM", facts=_llama, rotates_neighbours=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen2moe": Architecture(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        _LLAMA | _SHARED_EXPERT | {"ffn_gate_inp": "mlp.gate"},
        facts=_qwen2_moe,
        experts=_EXPERTS,
    ),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", _QWEN3),
    "qwen3moe": Architecture(
        "qwen3_moe", "Qwen3MoeForCausalLM", _QWEN3 | {"ffn_gate_inp": "mlp.gate"}, facts=_qwen_moe, experts=_EXPERTS
    ),
    "granite": Architecture("granite", "GraniteForCausalLM", facts=_granite, rotates_neighbours=True),
    "gemma": _gemma("gemma", "GemmaForCausalLM", _LLAMA),
    "gemma2": _gemma("gemma2", "Gemma2ForCausalLM", _GEMMA2, _gemma2),
    "gemma3": _gemma("gemma3_text", "Gemma3ForCausalLM", _GEMMA3, _gemma3),
    "phi2": Architecture(
        "phi",
        "PhiForCausalLM",
        _PHI2,
        "gelu_new",
        _phi2,
        "layer_norm_eps",
        outside=_OUTSIDE | {"output_norm": "model.final_layernorm"},
    ),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", _PHI3, facts=_phi3),
    "stablelm": Architecture("stablelm", "StableLmForCausalLM", facts=_stablelm, eps="layer_norm_eps"),
    "starcoder2": Architecture(
        "starcoder2", "Starcoder2ForCausalLM", _STARCODER2, "gelu_pytorch_tanh", _starcoder2, "norm_epsilon"
    ),
    "starcoder": Architecture(
        "gpt_bigcode",
        "GPTBigCodeForCausalLM",
        _GPT2,
        "gelu_pytorch_tanh",
        _gpt2,
        "layer_norm_epsilon",
        outside=_GPT2_OUTSIDE,
        layer="transformer.h.{}",
    ),
    "gpt2": Architecture(
        "gpt2",
        "GPT2LMHeadModel",
        _GPT2,
        "gelu_new",
        _gpt2,
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
        _falcon,
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
        _neox,
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
