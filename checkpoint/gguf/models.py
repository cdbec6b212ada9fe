"""Describes models in GGUF as Hugging Face does: config.json, and the names and numbers of tensors.

llama.cpp rotates neighbours of a head where Hugging Face rotates halves, so files of Llama have the rows of queries and
keys in another order. Files of Gemma have 1 added to the weights of norms.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from checkpoint.gguf.file import FLOAT_TYPES, GgufFile
from mesh.domain.errors import ConfigurationError

Floats = np.ndarray[Any, np.dtype[np.float32]]

_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that config.json describes."""

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
_QWEN3_MOE = _QWEN3 | {"ffn_gate_inp": "mlp.gate"}
_GEMMA2 = _LLAMA | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA3 = _GEMMA2 | {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_PHI3 = _LLAMA | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_ROTATED = ("self_attn.q_proj", "self_attn.k_proj")

_LLAMA3_BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Constants of Llama 3.1 to 3.3. GGUF has the resulting factors instead."""


@dataclass(frozen=True, slots=True)
class _Architecture:
    """An architecture of llama.cpp as Hugging Face knows it. `modules`: a layer's tensors and its modules."""

    model_type: str
    class_name: str
    modules: Mapping[str, str] = field(default_factory=lambda: _LLAMA)
    activation: str = "silu"
    rotates_neighbours: bool = False
    norm_offset: float = 0.0


_ARCHITECTURES = {
    "llama": _Architecture("llama", "LlamaForCausalLM", rotates_neighbours=True),
    "qwen2": _Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": _Architecture("qwen3", "Qwen3ForCausalLM", _QWEN3),
    "qwen3moe": _Architecture("qwen3_moe", "Qwen3MoeForCausalLM", _QWEN3_MOE),
    "gemma": _Architecture("gemma", "GemmaForCausalLM", activation="gelu_pytorch_tanh", norm_offset=1.0),
    "gemma2": _Architecture("gemma2", "Gemma2ForCausalLM", _GEMMA2, "gelu_pytorch_tanh", norm_offset=1.0),
    "gemma3": _Architecture("gemma3_text", "Gemma3ForCausalLM", _GEMMA3, "gelu_pytorch_tanh", norm_offset=1.0),
    "phi3": _Architecture("phi3", "Phi3ForCausalLM", _PHI3),
}


class GgufModel:
    """A model of a GGUF file. Raises ConfigurationError for an architecture that is not known."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._prefix = str(file.require("general.architecture"))
        if self._prefix not in _ARCHITECTURES:
            known = ", ".join(_ARCHITECTURES)
            raise ConfigurationError(f"{file.path} is of architecture {self._prefix}; those that are read: {known}")
        self._architecture = _ARCHITECTURES[self._prefix]
        if self._prefix == "llama" and self._get("expert_count"):
            raise ConfigurationError(
                f"{file.path} is a mixture of experts of Llama's kind, which is not read from GGUF"
            )

    @property
    def dtype(self) -> str:
        """The dtype that keeps the file's numbers: that of its matrices, or bfloat16 for quantised ones."""
        types = {self._file.type_of(name) for name, tensor in self._file.tensors.items() if len(tensor.shape) > 1}
        if types == {"F32"}:
            return "float32"
        return "float16" if types <= FLOAT_TYPES and "BF16" not in types else "bfloat16"

    def config(self) -> dict[str, Any]:
        """The contents of config.json. Raises ConfigurationError."""
        architecture, tensors = self._architecture, self._file.tensors
        heads = self._count("attention.head_count")
        hidden = self._count("embedding_length")
        head_dim = int(self._get("attention.key_length") or self._get("rope.dimension_count") or hidden // heads)
        config: dict[str, Any] = {
            "architectures": [architecture.class_name],
            "model_type": architecture.model_type,
            "dtype": self.dtype,
            "vocab_size": int(self._tensor("token_embd.weight").shape[1]),
            "hidden_size": hidden,
            "intermediate_size": self._count("feed_forward_length"),
            "num_hidden_layers": self._count("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": int(self._get("attention.head_count_kv") or heads),
            "head_dim": head_dim,
            "hidden_act": architecture.activation,
            "max_position_embeddings": self._count("context_length"),
            "rms_norm_eps": _decimal(self._require("attention.layer_norm_rms_epsilon")),
            "rope_theta": _decimal(self._get("rope.freq_base") or 10_000.0),
            "tie_word_embeddings": "output.weight" not in tensors,
        }
        if self._prefix == "llama":
            config |= {"attention_bias": "blk.0.attn_q.bias" in tensors, "mlp_bias": "blk.0.ffn_up.bias" in tensors}
        if (rotated := int(self._get("rope.dimension_count") or head_dim)) != head_dim:
            config["partial_rotary_factor"] = rotated / head_dim
        if scaling := self._rope_scaling(config):
            config["rope_scaling"] = scaling
        return config | self._differences(config)

    def tensors(self) -> Iterator[tuple[str, Floats]]:
        """The tensors of the checkpoint, dequantised, by their names there. Raises ConfigurationError."""
        for name in self._file.tensors:
            if name in _ROPE_FACTORS:
                continue
            stored, layer = self._file.read(name), _LAYER.fullmatch(name)
            if layer and layer[2] in _EXPERTS:
                for number, matrix in enumerate(stored):
                    yield f"model.layers.{layer[1]}.mlp.experts.{number}.{_EXPERTS[layer[2]]}.weight", matrix
            else:
                target = self._target(name, layer)
                yield target, self._as_stored(target, stored)

    def _target(self, name: str, layer: re.Match[str] | None) -> str:
        if name in _OUTSIDE:
            return _OUTSIDE[name]
        if layer is None or layer[2] not in self._architecture.modules:
            raise ConfigurationError(f"{self._file.path}: tensor {name} is not known in models of {self._prefix}")
        return f"model.layers.{layer[1]}.{self._architecture.modules[layer[2]]}.{layer[3]}"

    def _as_stored(self, target: str, numbers: Floats) -> Floats:
        """The numbers as Hugging Face stores them."""
        if self._architecture.norm_offset and target.endswith("norm.weight"):
            return numbers - np.float32(self._architecture.norm_offset)
        module = target.rpartition(".")[0]
        if self._architecture.rotates_neighbours and module.endswith(_ROTATED):
            heads = self._count("attention.head_count")
            if module.endswith("k_proj"):
                heads = int(self._get("attention.head_count_kv") or heads)
            return _in_halves(numbers, heads)
        return numbers

    def _differences(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Keys that only the model's own architecture has."""
        window = self._get("attention.sliding_window")
        if self._prefix == "qwen3moe":
            return {
                "num_experts": int(self._require("expert_count")),
                "num_experts_per_tok": int(self._require("expert_used_count")),
                "moe_intermediate_size": int(self._require("expert_feed_forward_length")),
                "norm_topk_prob": True,  # llama.cpp always does
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
            }
        if self._prefix == "phi3":
            original = self._get("rope.scaling.original_context_length")
            return {
                "sliding_window": int(window) if window else None,
                "original_max_position_embeddings": int(original or self._count("context_length")),
                "pad_token_id": None,  # transformers' default is an id of Phi's own vocabulary
            }
        if self._prefix in ("gemma2", "gemma3"):
            # llama.cpp knows the models of 27B by their layers. All others scale by the size of a head.
            is_27b = config["num_hidden_layers"] == {"gemma2": 46, "gemma3": 62}[self._prefix]
            scalar = config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]
            differences = {
                "query_pre_attn_scalar": scalar,
                "sliding_window": int(window or 4096),
                "attn_logit_softcapping": self._get("attn_logit_softcapping"),
                "final_logit_softcapping": self._get("final_logit_softcapping"),
            }
            if self._prefix == "gemma3":
                base = _decimal(self._get("rope.freq_base_swa") or 10_000.0)
                differences |= {"rope_local_base_freq": base, "sliding_window_pattern": 6}
            return differences
        return {}

    def _rope_scaling(self, config: Mapping[str, Any]) -> dict[str, Any] | None:
        """`rope_scaling` of config.json. Raises ConfigurationError for factors that no such entry describes."""
        original = self._get("rope.scaling.original_context_length")
        if "rope_factors_long.weight" in self._file.tensors:
            return {
                "type": "longrope",
                "long_factor": self._file.read("rope_factors_long.weight").tolist(),
                "short_factor": self._file.read("rope_factors_short.weight").tolist(),
                "original_max_position_embeddings": int(self._require("rope.scaling.original_context_length")),
            }
        if "rope_freqs.weight" in self._file.tensors:
            return self._llama3_scaling(self._file.read("rope_freqs.weight"), config)
        kind, factor = self._get("rope.scaling.type"), self._get("rope.scaling.factor")
        if kind in (None, "none") or not factor or factor == 1.0:
            return None
        if kind not in ("linear", "yarn"):
            raise ConfigurationError(f"{self._file.path}: rotary positions scaled as {kind} are not read from GGUF")
        scaling = {"rope_type": kind, "factor": _decimal(factor)}
        return scaling | ({"original_max_position_embeddings": int(original)} if original else {})

    def _llama3_scaling(self, factors: Floats, config: Mapping[str, Any]) -> dict[str, Any]:
        scaling = {"rope_type": "llama3", "factor": _decimal(factors.max()), **_LLAMA3_BANDS}
        expected = _llama3_factors(scaling, config["rope_theta"], 2 * len(factors))
        if not np.allclose(factors, expected, rtol=1e-3):
            raise ConfigurationError(f"{self._file.path}: the factors of rope_freqs are not those of Llama 3.1 to 3.3")
        return scaling

    def _get(self, key: str) -> Any:
        return self._file.metadata.get(f"{self._prefix}.{key}")

    def _require(self, key: str) -> Any:
        value = self._file.require(f"{self._prefix}.{key}")
        if isinstance(value, list):
            if len(set(value)) > 1:
                raise ConfigurationError(f"{self._file.path}: layers that differ in {key} are not read")
            value = value[0]
        return value

    def _count(self, key: str) -> int:
        count = int(self._require(key))
        if count < 1:
            raise ConfigurationError(f"{self._file.path} says {self._prefix}.{key} {count}, which must be at least 1")
        return count

    def _tensor(self, name: str) -> Any:
        if name not in self._file.tensors:
            raise ConfigurationError(f"{self._file.path} has no tensor {name}")
        return self._file.tensors[name]


def _decimal(number: float) -> float:
    """The number of few digits that was rounded to fp32."""
    return float(f"{number:.7g}")


def _in_halves(numbers: Floats, heads: int) -> Floats:
    """Rows of each head in two halves, where llama.cpp has the two of a rotated pair beside each other."""
    if len(numbers) % (2 * heads):
        raise ConfigurationError(f"{len(numbers)} rows of queries or keys are not those of {heads} heads")
    pairs = numbers.reshape(heads, len(numbers) // heads // 2, 2, *numbers.shape[1:])
    return pairs.swapaxes(1, 2).reshape(numbers.shape)


def _llama3_factors(scaling: Mapping[str, Any], theta: float, dim: int) -> list[float]:
    """The numbers by which Llama 3.1 divides its rotary frequencies; see transformers' modeling_rope_utils."""
    original, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    factors = []
    for i in range(0, dim, 2):
        length = 2 * math.pi * theta ** (i / dim)
        smooth = min(1.0, max(0.0, (original / length - low) / (high - low)))
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors
