"""Families that transformers has no class for: checkpoints under their own names, with something to compare to.

InternLM, Baichuan 7B and ChatGLM compute what a class of transformers does, so that one is the reference, with its
tensors renamed and fused for the checkpoint. ALiBi around Llama (Baichuan 13B) and DeepSeek's experts are written out
here, plainly.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

Tensors = dict[str, Tensor]
_LLAMA = {
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
}
REFERENCE = "reference.safetensors"


def _native(model_type: str, **facts: Any) -> nn.Module:
    config = AutoConfig.for_model(model_type, **_LLAMA | facts)
    model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return model


class _NoRotation(nn.Module):
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ones(1, 1, 16), torch.zeros(1, 1, 16)


class AlibiLlama(nn.Module):
    """Llama whose scores lose slope times distance, in place of rotated heads. It recomputes all for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.model = _native("llama", num_key_value_heads=4)
        self.model.model.rotary_emb = _NoRotation()

    def forward(self, ids: Tensor, past_key_values: Tensor | None = None, use_cache: bool = False) -> SimpleNamespace:
        """As transformers' models do; what it calls its cache are the ids so far."""
        ids_so_far = ids if past_key_values is None else torch.cat((past_key_values, ids), 1)
        positions = torch.arange(ids_so_far.shape[1])
        distance = positions[:, None] - positions
        slopes = torch.tensor([2.0 ** (-2 * head) for head in range(1, 5)])[:, None, None]
        mask = (-slopes * distance).masked_fill(distance < 0, torch.finfo(torch.float32).min)
        logits = self.model(ids_so_far, attention_mask=mask[None], use_cache=False).logits
        return SimpleNamespace(logits=logits[:, -ids.shape[1] :], past_key_values=ids_so_far)


class DeepseekMlp(nn.Module):
    """The 3 of 8 experts with the highest softmax, weighted by it, and one of double width for every token."""

    def __init__(self) -> None:
        super().__init__()
        mlp = type(_native("llama").model.layers[0].mlp)
        expert, shared = (AutoConfig.for_model("llama", **_LLAMA | {"intermediate_size": size}) for size in (32, 64))
        self.gate = nn.Linear(64, 8, bias=False)
        self.experts = nn.ModuleList(mlp(expert) for _ in range(8))
        self.shared_experts = mlp(shared)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, tokens, hidden_size]."""
        shares = self.gate(x).softmax(-1)
        kept = shares * (shares >= shares.topk(3).values[..., -1:])
        routed = sum(expert(x) * kept[..., i, None] for i, expert in enumerate(self.experts))
        return self.shared_experts(x) + routed


def _deepseek() -> nn.Module:
    model = _native("llama", num_key_value_heads=4)
    for layer in model.model.layers[1:]:
        layer.mlp = DeepseekMlp()
    return model


def _fuse_qkv(tensors: Tensors, fused: str, fuse: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensors:
    """q_proj, k_proj and v_proj of each layer as one tensor."""
    result = {name: tensor for name, tensor in tensors.items() if not any(f"{p}_proj" in name for p in "qkv")}
    for name in tensors:
        if "q_proj" in name:
            parts = (tensors[name.replace("q_proj", f"{p}_proj")] for p in "qkv")
            result[name.replace("self_attn.q_proj", fused)] = fuse(*parts)
    return result


def _renamed(tensors: Tensors, **names: str) -> Tensors:
    """`a__b` stands for `a.b`."""
    for old, new in names.items():
        tensors = {name.replace(old.replace("__", "."), new): tensor for name, tensor in tensors.items()}
    return tensors


def _stacked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.cat((q, k, v))


def _grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    heads = (part.view(_LLAMA["num_key_value_heads"], -1, 16, 64) for part in (q, k, v))
    return torch.cat(tuple(heads), 1).reshape(-1, 64)


def _internlm2(tensors: Tensors) -> Tensors:
    return _renamed(
        _fuse_qkv(tensors, "attention.wqkv", _grouped),
        embed_tokens="tok_embeddings",
        lm_head="output",
        self_attn__o_proj="attention.wo",
        mlp__gate_proj="feed_forward.w1",
        mlp__up_proj="feed_forward.w3",
        mlp__down_proj="feed_forward.w2",
        input_layernorm="attention_norm",
        post_attention_layernorm="ffn_norm",
    )


def _exaone(tensors: Tensors) -> Tensors:
    return _renamed(
        tensors,
        model__embed_tokens="transformer.wte",
        model__norm="transformer.ln_f",
        model__layers="transformer.h",
        self_attn__o_proj="attn.attention.out_proj",
        self_attn="attn.attention",
        mlp__gate_proj="mlp.c_fc_0",
        mlp__up_proj="mlp.c_fc_1",
        mlp__down_proj="mlp.c_proj",
        input_layernorm="ln_1",
        post_attention_layernorm="ln_2",
    )


def one_by_one(tensors: Tensors) -> Tensors:
    """Experts that transformers stacks."""
    result: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            names = ("gate_proj", "up_proj")
        elif name.endswith("experts.down_proj"):
            names = ("down_proj",)
        else:
            result[name] = tensor
            continue
        for number, matrix in enumerate(tensor):
            parts = zip(names, matrix.chunk(len(names)), strict=True)
            result |= {f"{name.rpartition('.')[0]}.{number}.{part}.weight": rows.contiguous() for part, rows in parts}
    return result


def _bailing(tensors: Tensors) -> Tensors:
    return _renamed(
        _fuse_qkv(one_by_one(tensors), "attention.query_key_value", _stacked),
        embed_tokens="word_embeddings",
        self_attn__o_proj="attention.dense",
        self_attn__q_norm="attention.query_layernorm",
        self_attn__k_norm="attention.key_layernorm",
        e_score_correction_bias="expert_bias",
    )


def _layer_normed() -> nn.Module:
    model = _native("llama")
    for module in model.modules():
        for name, _ in list(module.named_children()):
            if name in ("input_layernorm", "post_attention_layernorm", "norm"):
                setattr(module, name, nn.LayerNorm(64, eps=1e-5))
    return model


def _chatglm(tensors: Tensors) -> Tensors:
    return _renamed(
        _fuse_qkv(tensors, "self_attention.query_key_value", _stacked),
        model__embed_tokens="transformer.embedding.word_embeddings",
        lm_head="transformer.output_layer",
        model__norm="transformer.encoder.final_layernorm",
        model__layers="transformer.encoder.layers",
        self_attn__o_proj="self_attention.dense",
        mlp__gate_up_proj="mlp.dense_h_to_4h",
        mlp__down_proj="mlp.dense_4h_to_h",
    )


def _pack(tensors: Tensors) -> Tensors:
    return _fuse_qkv(_renamed(tensors, model__model="model", model__lm_head="lm_head"), "self_attn.W_pack", _stacked)


@dataclass(frozen=True)
class Remote:
    """`config` is their config.json, `theirs` turns the reference's tensors into those of their checkpoints."""

    reference: Callable[[], nn.Module]
    config: Mapping[str, Any]
    theirs: Callable[[Tensors], Tensors] = dict


_EPSLESS = {key: value for key, value in _LLAMA.items() if key not in ("rms_norm_eps", "num_hidden_layers")}
_LENGTHLESS = {key: value for key, value in _LLAMA.items() if key != "max_position_embeddings"}

_LING: Mapping[str, Any] = _LLAMA | {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_shared_experts": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "norm_topk_prob": False,
    "use_bias": False,
    "use_qkv_bias": False,
}

REMOTE_FAMILIES: Mapping[str, Remote] = {
    "internlm": Remote(
        lambda: _native("llama", num_key_value_heads=4, attention_bias=True),
        _LLAMA | {"architectures": ["InternLMForCausalLM"], "bias": True, "num_key_value_heads": 4},
    ),
    "internlm2": Remote(lambda: _native("llama"), _LLAMA | {"architectures": ["InternLM2ForCausalLM"]}, _internlm2),
    "internlm3": Remote(
        lambda: _native("llama"), _LLAMA | {"architectures": ["InternLM3ForCausalLM"], "bias": False, "qkv_bias": False}
    ),
    "baichuan-7b": Remote(
        lambda: _native("llama", num_key_value_heads=4),
        _LLAMA | {"architectures": ["BaiChuanForCausalLM"], "num_key_value_heads": None},
        _pack,
    ),
    "baichuan-13b": Remote(
        AlibiLlama,
        _LENGTHLESS | {"architectures": ["BaichuanForCausalLM"], "num_key_value_heads": None, "model_max_length": 512},
        _pack,
    ),
    "chatglm": Remote(
        lambda: _native("glm", head_dim=16, attention_bias=True, rms_norm_eps=1e-5, pad_token_id=None),
        {
            "architectures": ["ChatGLMModel"],
            "padded_vocab_size": 264,
            "hidden_size": 64,
            "ffn_hidden_size": 96,
            "num_layers": 3,
            "num_attention_heads": 4,
            "kv_channels": 16,
            "multi_query_attention": True,
            "multi_query_group_num": 2,
            "seq_length": 512,
            "layernorm_epsilon": 1e-5,
            "add_qkv_bias": True,
            "add_bias_linear": False,
            "rmsnorm": True,
            "post_layer_norm": True,
        },
        _chatglm,
    ),
    "exaone": Remote(
        lambda: _native("llama", rms_norm_eps=1e-5),
        _EPSLESS
        | {
            "architectures": ["ExaoneForCausalLM"],
            "num_layers": 3,
            "layer_norm_epsilon": 1e-5,
            "activation_function": "silu",
        },
        _exaone,
    ),
    "mimo": Remote(
        lambda: _native("qwen2", head_dim=16),
        _LLAMA | {"architectures": ["MiMoForCausalLM"], "head_dim": 16, "use_sliding_window": False},
    ),
    "minicpm": Remote(
        lambda: _native(
            "granite",
            embedding_multiplier=3.0,
            attention_multiplier=0.25,
            residual_multiplier=1.4 / 3**0.5,
            logits_scaling=2.0,
        ),
        _LLAMA
        | {
            "architectures": ["MiniCPMForCausalLM"],
            "scale_emb": 3,
            "scale_depth": 1.4,
            "dim_model_base": 32,
            "tie_word_embeddings": False,
        },
    ),
    "orion": Remote(_layer_normed, _LLAMA | {"architectures": ["OrionForCausalLM"], "rms_norm_eps": 1e-5}),
    "ling": Remote(
        _deepseek, {**_LING, "architectures": ["BailingMoeForCausalLM"], "num_key_value_heads": 4}, _bailing
    ),
    "ling2": Remote(
        lambda: _native(
            "glm4_moe",
            head_dim=16,
            use_qk_norm=True,
            partial_rotary_factor=0.5,
            n_routed_experts=8,
            num_experts_per_tok=3,
            n_shared_experts=2,
            moe_intermediate_size=32,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=2.5,
            first_k_dense_replace=1,
        ),
        {
            **_LING,
            "architectures": ["BailingMoeV2ForCausalLM"],
            "head_dim": 16,
            "use_qk_norm": True,
            "use_rmsnorm": True,
            "partial_rotary_factor": 0.5,
            "norm_topk_prob": True,
            "score_function": "sigmoid",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
        },
        _bailing,
    ),
    "deepseek": Remote(
        _deepseek,
        _LLAMA
        | {
            "architectures": ["DeepseekForCausalLM"],
            "num_key_value_heads": 4,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "norm_topk_prob": False,
            "scoring_func": "softmax",
        },
    ),
}

RENAMED = ("internlm", "internlm3", "baichuan-7b", "exaone", "mimo", "minicpm", "orion", "ling", "ling2")
"""Those whose layers are another family's under other names: once read, they are run by the same code."""


def save_remote(family: str, model: nn.Module, model_dir: Path) -> None:
    """Save `model`, the reference of `family`, as it is and as their checkpoint."""
    remote, tensors = REMOTE_FAMILIES[family], dict(model.state_dict())
    model_dir.mkdir(parents=True, exist_ok=True)
    save_file(tensors, model_dir / REFERENCE)
    (model_dir / "family").write_text(family)
    save_file(
        {name: tensor.contiguous() for name, tensor in remote.theirs(tensors).items()}, model_dir / "model.safetensors"
    )
    config = {**remote.config, "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258}
    (model_dir / "config.json").write_text(json.dumps(config))


def load_reference(model_dir: Path) -> Any:
    """What to compare a checkpoint with, in fp32: transformers' own class, or the reference saved beside it."""
    if not (model_dir / REFERENCE).exists():
        # transformers counts ALiBi twice in Falcon's eager attention.
        raw = json.loads((model_dir / "config.json").read_text())
        attention = "sdpa" if raw.get("alibi") else "eager"
        return AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=torch.float32, attn_implementation=attention
        ).eval()
    model = REMOTE_FAMILIES[model_dir.joinpath("family").read_text()].reference()
    model.load_state_dict(load_file(model_dir / REFERENCE))
    return model.eval()
