"""Describes models in GGUF as Hugging Face does: config.json, and the names and numbers of tensors.

llama.cpp rotates neighbours of a head where Hugging Face rotates halves, so files of Llama have the rows of queries and
keys in another order. Files of Gemma have 1 added to the weights of norms. The architectures and their names are in
architectures.py.
"""

import math
import re
from collections.abc import Container, Iterator, Mapping
from typing import Any

import numpy as np

from checkpoint.gguf.architectures import ARCHITECTURES, architecture_of
from checkpoint.gguf.file import FLOAT_TYPES, GgufFile
from checkpoint.gguf.members import Metadata, decimal
from mesh.domain.errors import ConfigurationError

Floats = np.ndarray[Any, np.dtype[np.float32]]
Numbers = Floats | np.ndarray[Any, np.dtype[np.uint8]]

_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+?(?:\.[a-z]\w*)?)(_exps|\.\d+)?\.(weight|bias)")
"""Layer, tensor, stacked experts or the number of one, and kind. Files from before 2024 have experts one by one."""
_ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that config.json describes."""
_EMBEDDING, _OUTPUT = "token_embd.weight", "output.weight"
_ROTATED = ("attn_q", "attn_k")
_SHARED_GATE, _CONVOLUTION, _CHOICE_BIAS = "ffn_gate_inp_shexp", "shortconv.conv", "exp_probs_b"

_LLAMA3_BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Constants of Llama 3.1 to 3.3. GGUF has the resulting factors instead."""


class GgufModel:
    """A model of a GGUF file. Raises ConfigurationError for an architecture that is not known."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._metadata = metadata = Metadata(file)
        architecture = architecture_of(metadata)
        if architecture is None:
            known = ", ".join(ARCHITECTURES)
            raise ConfigurationError(
                f"{file.path} is of architecture {metadata.architecture}; those that are read: {known}"
            )
        self._architecture = architecture

    @property
    def dtype(self) -> str:
        """The dtype that keeps the file's numbers: that of its matrices, or bfloat16 for quantised ones."""
        types = self._matrix_types()
        if types == {"F32"}:
            return "float32"
        return "float16" if types <= FLOAT_TYPES and "BF16" not in types else "bfloat16"

    @property
    def is_quantized(self) -> bool:
        return not self._matrix_types() <= FLOAT_TYPES

    def _matrix_types(self) -> set[str]:
        return {self._file.type_of(name) for name, tensor in self._file.tensors.items() if len(tensor.shape) > 1}

    @property
    def is_tied(self) -> bool:
        """True if the output matrix is the embedding. A file may hold both."""
        embedding, output = self._tensor(_EMBEDDING), self._file.tensors.get(_OUTPUT)
        if output is None:
            return True
        return embedding.tensor_type == output.tensor_type and np.array_equal(embedding.data, output.data)

    def config(self) -> dict[str, Any]:
        """The contents of config.json. Raises ConfigurationError."""
        architecture, metadata = self._architecture, self._metadata
        heads, hidden = metadata.count("attention.head_count"), metadata.count("embedding_length")
        rotated = metadata.get("rope.dimension_count")
        # llama.cpp rotates whole heads in its architecture "llama", and says in older files only how many numbers.
        whole = rotated if metadata.architecture == "llama" else None
        head_dim = int(metadata.get("attention.key_length") or whole or hidden // heads)
        eps = metadata.get("attention.layer_norm_rms_epsilon") or metadata.require("attention.layer_norm_epsilon")
        config: dict[str, Any] = {
            "architectures": [architecture.class_name],
            "model_type": architecture.model_type,
            "dtype": self.dtype,
            "vocab_size": int(self._tensor(_EMBEDDING).shape[1]),
            "hidden_size": hidden,
            "intermediate_size": metadata.count("feed_forward_length"),
            "num_hidden_layers": metadata.count("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": metadata.kv_heads,
            "hidden_act": architecture.activation,
            "max_position_embeddings": metadata.count("context_length"),
            architecture.eps: decimal(eps),
            "rope_theta": decimal(metadata.get("rope.freq_base") or 10_000.0),
            "tie_word_embeddings": self.is_tied,
        }
        if architecture.eps == "rms_norm_eps" or head_dim != hidden // heads:  # Falcon's class cannot be given it
            config["head_dim"] = head_dim
        if rotated and int(rotated) != head_dim:
            config["partial_rotary_factor"] = int(rotated) / head_dim
        if scaling := self._rope_scaling(config):
            config["rope_scaling"] = scaling
        return config | architecture.facts(metadata, config)

    def tensors(self, kept: Container[str] = ()) -> Iterator[tuple[str, str, Numbers]]:
        """The tensors of the checkpoint: their names there, types in the file, and numbers in fp32, dequantised.
        Matrices of the types `kept` are bytes instead, [outputs, bytes of a row]. Raises ConfigurationError.
        """
        left_out = {*_ROPE_FACTORS, _OUTPUT} if self.is_tied else set(_ROPE_FACTORS)
        for name, tensor in self._file.tensors.items():
            if name not in left_out:
                kind = self._file.type_of(name)
                is_kept = kind in kept and len(tensor.shape) > 1
                numbers = self._file.read_blocks(name) if is_kept else self._file.read(name)
                for target, own in self._modules(name, numbers):
                    yield target, kind, own

    def _modules(self, name: str, numbers: Numbers) -> Iterator[tuple[str, Numbers]]:
        """The tensors that tensor `name` becomes."""
        parts, architecture = _NAME.fullmatch(name), self._architecture
        layer, kind, expert, suffix = parts.groups() if parts else (None, name, None, "")
        table = architecture.outside if layer is None else architecture.experts if expert else architecture.modules
        if kind not in table:
            raise ConfigurationError(
                f"{self._file.path}: tensor {name} is not known in models of {self._metadata.architecture}"
            )
        prefix = "" if layer is None else f"{architecture.layer.format(layer)}."
        target = prefix + table[kind] + ("" if kind == _CHOICE_BIAS else f".{suffix}")
        if expert is None:
            yield target, self._as_stored(kind, target, numbers)
        elif expert == "_exps":
            for number, matrix in enumerate(numbers):
                yield target.format(number), matrix
        else:
            yield target.format(expert[1:]), numbers

    def _as_stored(self, kind: str, target: str, numbers: Numbers) -> Numbers:
        """The numbers as Hugging Face stores them."""
        architecture, heads = self._architecture, self._metadata.count("attention.head_count")
        if architecture.norm_offset and target.endswith("norm.weight"):
            return numbers - np.float32(architecture.norm_offset)
        if architecture.rotates_neighbours and kind in _ROTATED:
            return _in_halves(numbers, heads if kind == "attn_q" else self._metadata.kv_heads)
        if architecture.groups_qkv and kind == "attn_qkv":
            return _in_groups(numbers, heads, self._metadata.kv_heads)
        if architecture.transposed and kind in architecture.modules and numbers.ndim > 1:
            return numbers if numbers.dtype == np.uint8 else numbers.T  # blocks are along inputs
        if kind == _CONVOLUTION:
            return numbers[:, None]
        is_row = kind == _SHARED_GATE or "moe_statics" in target
        return numbers.reshape(1, -1) if is_row else numbers

    def _rope_scaling(self, config: Mapping[str, Any]) -> dict[str, Any] | None:
        """`rope_scaling` of config.json. Raises ConfigurationError for factors that no such entry describes."""
        original = self._metadata.get("rope.scaling.original_context_length")
        if "rope_factors_long.weight" in self._file.tensors:
            return {
                "type": "longrope",
                "long_factor": self._file.read("rope_factors_long.weight").tolist(),
                "short_factor": self._file.read("rope_factors_short.weight").tolist(),
                "original_max_position_embeddings": int(self._metadata.require("rope.scaling.original_context_length")),
            }
        if "rope_freqs.weight" in self._file.tensors:
            return self._llama3_scaling(self._file.read("rope_freqs.weight"), config)
        kind, factor = self._metadata.get("rope.scaling.type"), self._metadata.get("rope.scaling.factor")
        if kind in (None, "none") or not factor or factor == 1.0:
            return None
        if kind not in ("linear", "yarn"):
            raise ConfigurationError(f"{self._file.path}: rotary positions scaled as {kind} are not read from GGUF")
        scaling = {"rope_type": kind, "factor": decimal(factor)}
        return scaling | ({"original_max_position_embeddings": int(original)} if original else {})

    def _llama3_scaling(self, factors: Floats, config: Mapping[str, Any]) -> dict[str, Any]:
        scaling = {"rope_type": "llama3", "factor": decimal(factors.max()), **_LLAMA3_BANDS}
        expected = _llama3_factors(scaling, config["rope_theta"], 2 * len(factors))
        if not np.allclose(factors, expected, rtol=1e-3):
            raise ConfigurationError(f"{self._file.path}: the factors of rope_freqs are not those of Llama 3.1 to 3.3")
        return scaling

    def _tensor(self, name: str) -> Any:
        if name not in self._file.tensors:
            raise ConfigurationError(f"{self._file.path} has no tensor {name}")
        return self._file.tensors[name]


def _in_halves(numbers: Numbers, heads: int) -> Numbers:
    """Rows of each head in two halves, where llama.cpp has the two of a rotated pair beside each other."""
    if len(numbers) % (2 * heads):
        raise ConfigurationError(f"{len(numbers)} rows of queries or keys are not those of {heads} heads")
    pairs = numbers.reshape(heads, len(numbers) // heads // 2, 2, *numbers.shape[1:])
    return pairs.swapaxes(1, 2).reshape(numbers.shape)


def _in_groups(numbers: Numbers, heads: int, kv_heads: int) -> Numbers:
    """Rows of all queries, all keys and all values, by key/value head."""
    if len(numbers) % (heads + 2 * kv_heads):
        raise ConfigurationError(
            f"{len(numbers)} rows of queries, keys and values are not those of {heads} and {kv_heads} heads"
        )
    head_dim = len(numbers) // (heads + 2 * kv_heads)
    parts = np.split(numbers, (heads * head_dim, (heads + kv_heads) * head_dim))
    return np.concatenate([part.reshape(kv_heads, -1, *numbers.shape[1:]) for part in parts], 1).reshape(numbers.shape)


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
