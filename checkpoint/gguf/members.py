"""Members of config.json that only some architectures of llama.cpp have, by the facts of a file."""

from collections.abc import Mapping
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
                raise self.error(f"layers that differ in {key} are not read")
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
        """Of layers with attention; files of models with others may say 0 for these."""
        stated = self.get("attention.head_count_kv")
        heads = sorted({*stated} - {0}) if isinstance(stated, list) else [stated or self.count("attention.head_count")]
        if len(heads) != 1 or int(heads[0]) < 1:
            raise self.error(f"KV heads {stated!r:.100} are not read: all layers with attention must have as many")
        return int(heads[0])

    def error(self, reason: str) -> ConfigurationError:
        return ConfigurationError(f"{self._file.path}: {reason}")

    def has(self, tensor: str) -> bool:
        return tensor in self._file.tensors


def decimal(number: float) -> float:
    """The number of few digits that was rounded to fp32."""
    return float(f"{number:.7g}")


def none(metadata: Metadata, config: Config) -> dict[str, Any]:
    return {}


def llama(metadata: Metadata, config: Config) -> dict[str, Any]:
    return {"attention_bias": metadata.has("blk.0.attn_q.bias"), "mlp_bias": metadata.has("blk.0.ffn_up.bias")}


def smollm3(metadata: Metadata, config: Config) -> dict[str, Any]:
    # In llama.cpp every fourth layer is without rotary positions.
    return llama(metadata, config) | {"no_rope_layer_interval": 4, "use_sliding_window": False}


def minicpm(metadata: Metadata, config: Config) -> dict[str, Any]:
    # Older files leave the factors out, which are those of MiniCPM 1 and 2 then.
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    residual, logits = metadata.get("residual_scale"), metadata.get("logit_scale")
    return {
        "scale_emb": decimal(metadata.get("embedding_scale") or 12.0),
        "scale_depth": decimal(residual * layers**0.5) if residual else 1.4,
        "dim_model_base": decimal(hidden / logits) if logits else 256,
    }


def ernie4_5(metadata: Metadata, config: Config) -> dict[str, Any]:
    return {"use_bias": metadata.has("blk.0.attn_q.bias")}


def seed_oss(metadata: Metadata, config: Config) -> dict[str, Any]:
    return llama(metadata, config) | {"attention_out_bias": metadata.has("blk.0.attn_output.bias")}


def glm4(metadata: Metadata, config: Config) -> dict[str, Any]:
    return {"attention_bias": metadata.has("blk.0.attn_q.bias"), "pad_token_id": None}


def olmo2(metadata: Metadata, config: Config) -> dict[str, Any]:
    if metadata.get("attention.sliding_window"):
        raise metadata.error("OLMo 3 is not read from GGUF: give the original checkpoint")
    return llama(metadata, config)


def exaone4(metadata: Metadata, config: Config) -> dict[str, Any]:
    # 32B has windows in three of four layers, 1.2B none.
    if window := metadata.get("attention.sliding_window"):
        return {"sliding_window": int(window), "sliding_window_pattern": 4}
    return {"sliding_window": None, "layer_types": ["full_attention"] * config["num_hidden_layers"]}


def lfm2(metadata: Metadata, config: Config) -> dict[str, Any]:
    kv_heads = metadata.get("attention.head_count_kv")
    if not isinstance(kv_heads, list):
        raise metadata.error("attention.head_count_kv must say for each layer of LFM2 whether it has attention")
    return {
        "layer_types": ["full_attention" if heads else "conv" for heads in kv_heads],
        "conv_L_cache": metadata.count("shortconv.l_cache"),
        "conv_bias": False,
        "block_auto_adjust_ff_dim": False,
    }


def granite(metadata: Metadata, config: Config) -> dict[str, Any]:
    scale = metadata.get("attention.scale")
    return llama(metadata, config) | {
        "embedding_multiplier": decimal(metadata.get("embedding_scale") or 1.0),
        "attention_multiplier": decimal(scale) if scale else config["head_dim"] ** -0.5,
        "residual_multiplier": decimal(metadata.get("residual_scale") or 1.0),
        "logits_scaling": decimal(metadata.get("logit_scale") or 1.0),
    }


def mixtral(metadata: Metadata, config: Config) -> dict[str, Any]:
    return {
        "num_local_experts": metadata.count("expert_count"),
        "num_experts_per_tok": metadata.count("expert_used_count"),
        "sliding_window": None,  # which llama.cpp does not know in models of this kind
    }


def qwen_moe(metadata: Metadata, config: Config) -> dict[str, Any]:
    return {
        "num_experts": metadata.count("expert_count"),
        "num_experts_per_tok": metadata.count("expert_used_count"),
        "moe_intermediate_size": metadata.count("expert_feed_forward_length"),
        "norm_topk_prob": metadata.architecture == "qwen3moe",  # as llama.cpp does
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def qwen2_moe(metadata: Metadata, config: Config) -> dict[str, Any]:
    shared = metadata.count("expert_shared_feed_forward_length")
    return qwen_moe(metadata, config) | {"shared_expert_intermediate_size": shared}


_SIGMOID = 2
"""In `expert_gating_func`: experts are chosen by sigmoids."""


def sigmoid_experts(metadata: Metadata, config: Config) -> dict[str, Any]:
    """Experts as DeepSeek V3 has them, in its words. The last layers may be of multi-token prediction."""
    if metadata.get("expert_gating_func") != _SIGMOID:
        raise metadata.error(f"experts of {metadata.architecture} that no sigmoid chooses are not read")
    behind = int(metadata.get("nextn_predict_layers") or 0)
    return {
        "num_hidden_layers": config["num_hidden_layers"] - behind,
        "num_nextn_predict_layers": behind,
        "n_routed_experts": metadata.count("expert_count"),
        "n_shared_experts": int(metadata.get("expert_shared_count") or 0),
        "num_experts_per_tok": metadata.count("expert_used_count"),
        "moe_intermediate_size": metadata.count("expert_feed_forward_length"),
        "first_k_dense_replace": int(metadata.get("leading_dense_block_count") or 0),
        "norm_topk_prob": bool(metadata.get("expert_weights_norm")),
        "routed_scaling_factor": decimal(metadata.get("expert_weights_scale") or 1.0),
        "n_group": int(metadata.get("expert_group_count") or 1),
        "topk_group": int(metadata.get("expert_group_used_count") or 1),
    }


def glm4_moe(metadata: Metadata, config: Config) -> dict[str, Any]:
    return sigmoid_experts(metadata, config) | {
        "attention_bias": metadata.has("blk.0.attn_q.bias"),
        "use_qk_norm": metadata.has("blk.0.attn_q_norm.weight"),
        "pad_token_id": None,
    }


def dots1(metadata: Metadata, config: Config) -> dict[str, Any]:
    return sigmoid_experts(metadata, config) | {"sliding_window": None}


def bailing_moe2(metadata: Metadata, config: Config) -> dict[str, Any]:
    facts = sigmoid_experts(metadata, config)
    num_shared = facts.pop("n_shared_experts")
    return facts | {
        "num_experts": facts.pop("n_routed_experts"),
        "num_shared_experts": num_shared,
        "moe_shared_expert_intermediate_size": int(
            metadata.get("expert_shared_feed_forward_length") or facts["moe_intermediate_size"]
        ),
        "score_function": "sigmoid",
        "use_qk_norm": True,
        "use_rmsnorm": True,
        "use_bias": False,
        "use_qkv_bias": metadata.has("blk.0.attn_qkv.bias"),
    }


def ernie4_5_moe(metadata: Metadata, config: Config) -> dict[str, Any]:
    return {
        "moe_num_experts": metadata.count("expert_count"),
        "moe_k": metadata.count("expert_used_count"),
        "moe_intermediate_size": metadata.count("expert_feed_forward_length"),
        "moe_num_shared_experts": int(metadata.get("expert_shared_count") or 0),
        "moe_layer_start_index": int(metadata.get("leading_dense_block_count") or 0),
        "moe_layer_end_index": config["num_hidden_layers"] - 1,
        "moe_layer_interval": int(metadata.get("interleave_moe_layer_step") or 1),
        "use_bias": False,
    }


def olmoe(metadata: Metadata, config: Config) -> dict[str, Any]:
    # llama.cpp has shares of OLMoE as the softmax gives them.
    counts = {"num_experts": metadata.count("expert_count"), "num_experts_per_tok": metadata.count("expert_used_count")}
    return llama(metadata, config) | counts | {"norm_topk_prob": False}


def lfm2_moe(metadata: Metadata, config: Config) -> dict[str, Any]:
    return lfm2(metadata, config) | {
        "num_experts": metadata.count("expert_count"),
        "num_experts_per_tok": metadata.count("expert_used_count"),
        "moe_intermediate_size": metadata.count("expert_feed_forward_length"),
        "num_dense_layers": int(metadata.get("leading_dense_block_count") or 0),
        "norm_topk_prob": True,
        "use_expert_bias": True,
        "routed_scaling_factor": decimal(metadata.get("expert_weights_scale") or 1.0),
    }


def phi3(metadata: Metadata, config: Config) -> dict[str, Any]:
    window, original = metadata.get("attention.sliding_window"), metadata.get("rope.scaling.original_context_length")
    return {
        "sliding_window": int(window) if window else None,
        "original_max_position_embeddings": int(original or metadata.count("context_length")),
        "pad_token_id": None,  # transformers' default is an id of Phi's own vocabulary
    }


def gemma2(metadata: Metadata, config: Config) -> dict[str, Any]:
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


def gemma3(metadata: Metadata, config: Config) -> dict[str, Any]:
    base = decimal(metadata.get("rope.freq_base_swa") or 10_000.0)
    return gemma2(metadata, config) | {"rope_local_base_freq": base, "sliding_window_pattern": 6}


def gpt2(metadata: Metadata, config: Config) -> dict[str, Any]:
    return {"n_inner": config["intermediate_size"], "multi_query": metadata.architecture == "starcoder"}


def falcon(metadata: Metadata, config: Config) -> dict[str, Any]:
    return {
        "new_decoder_architecture": metadata.kv_heads > 1,
        "num_ln_in_parallel_attn": 2 if metadata.has("blk.0.attn_norm_2.weight") else 1,
        "num_kv_heads": metadata.kv_heads,
        "ffn_hidden_size": config["intermediate_size"],
    }


def _rotated_share(config: Config) -> dict[str, Any]:
    """The rotated share, for families where transformers' default is not the whole head."""
    return {"partial_rotary_factor": config.get("partial_rotary_factor", 1.0)}


def phi2(metadata: Metadata, config: Config) -> dict[str, Any]:
    return _rotated_share(config)


def neox(metadata: Metadata, config: Config) -> dict[str, Any]:
    is_parallel, rotated = metadata.get("use_parallel_residual"), _rotated_share(config)
    return rotated | {
        "rotary_pct": rotated["partial_rotary_factor"],
        "use_parallel_residual": is_parallel is None or bool(is_parallel),
        "attention_bias": metadata.has("blk.0.attn_qkv.bias"),
    }


def stablelm(metadata: Metadata, config: Config) -> dict[str, Any]:
    return _rotated_share(config) | {
        "use_parallel_residual": not metadata.has("blk.0.ffn_norm.weight"),
        "use_qkv_bias": metadata.has("blk.0.attn_q.bias"),
    }


def starcoder2(metadata: Metadata, config: Config) -> dict[str, Any]:
    return {"use_bias": metadata.has("blk.0.attn_q.bias"), "sliding_window": None}
