"""Small models of Llama 4, Gemma 3n and Gemma 4 with every option that they have, in the words of their configs."""

from typing import Any

LLAMA4: dict[str, Any] = {
    "model_type": "llama4_text",
    "num_hidden_layers": 4,
    "head_dim": 16,
    "intermediate_size": 32,
    "intermediate_size_mlp": 96,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "interleave_moe_layer_step": 2,
    "no_rope_layer_interval": 3,
    "attention_chunk_size": 16,
    "floor_scale": 8,
    "attn_scale": 0.5,
    "attention_bias": True,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 1.0,
        "original_max_position_embeddings": 32,
    },
}
_GEMMA4: dict[str, Any] = {
    "model_type": "gemma4_text",
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 12,
    "final_logit_softcapping": 30.0,
}
_TWO_OF_THREE = ["sliding_attention", "sliding_attention", "full_attention"]
MIXED: dict[str, dict[str, Any]] = {
    "gemma3n": {
        "model_type": "gemma3n_text",
        "head_dim": 16,
        "num_key_value_heads": 1,
        "sliding_window": 12,
        "num_hidden_layers": 8,
        "intermediate_size": [96, 96, 64, 96, 96, 64, 96, 96],
        "layer_types": [*_TWO_OF_THREE, "sliding_attention", *_TWO_OF_THREE, "full_attention"],
        "num_kv_shared_layers": 3,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": 250,
        "pad_token_id": 0,
        "laurel_rank": 32,
        "activation_sparsity_pattern": [0.9, 0.5, 0.3, 0.0, 0.7, 0.0, 0.0, 0.8],
    },
    "gemma4": _GEMMA4
    | {
        "num_key_value_heads": 1,
        "num_hidden_layers": 8,
        "layer_types": [*_TWO_OF_THREE, "sliding_attention", *_TWO_OF_THREE, "full_attention"],
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": 264,
    },
    "gemma4-moe": _GEMMA4
    | {
        "num_key_value_heads": 4,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "num_hidden_layers": 3,
        "layer_types": _TWO_OF_THREE,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
}
