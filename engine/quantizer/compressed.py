"""Writes compressed-tensors, the format of llm-compressor, which vLLM and transformers read: the reverse of
engine/quantized_formats/compressed_tensors.py.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from engine.quantized_formats.matrix import QuantizedMatrix
from engine.quantized_formats.storage import MatrixStorage

Activations = Literal["int8", "fp8"] | None
"""The numbers to which activations are rounded, with a scale for each token, while the model runs; None: none."""

_PACKED_AT_ONCE = 2**20
"""Numbers that are packed at once. Each takes 24 bytes meanwhile."""


def stored_tensors(matrix: QuantizedMatrix, storage: MatrixStorage, scales_dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of a matrix without zeros, by the last part of their names."""
    scales = matrix.scales.to(scales_dtype)
    if storage.format == "plain":
        return {"weight": matrix.values, "weight_scale": scales}
    shape = torch.tensor(matrix.values.shape, dtype=torch.int64)
    return {"weight_packed": pack(matrix.values, storage.num_bits), "weight_scale": scales, "weight_shape": shape}


def pack(values: Tensor, num_bits: int) -> Tensor:
    """int8 [rows, numbers] -> int32 [rows, words]: 2^(bits - 1) is added to each, the first are in the lowest bits."""
    per_word = 32 // num_bits
    packed = torch.empty(len(values), -(-values.shape[1] // per_word), dtype=torch.int32)
    rows_at_once = max(1, _PACKED_AT_ONCE // values.shape[1])
    for some, words in zip(torch.split(values, rows_at_once), torch.split(packed, rows_at_once), strict=True):
        unsigned = some.to(torch.int64) + 2 ** (num_bits - 1)
        padded = torch.nn.functional.pad(unsigned, (0, -some.shape[1] % per_word)).view(len(some), -1, per_word)
        sums = (padded << torch.arange(per_word) * num_bits).sum(2)
        words.copy_(torch.where(sums >= 2**31, sums - 2**32, sums))
    return packed


def describe(storage: MatrixStorage, activations: Activations, kept: Sequence[str]) -> dict[str, Any]:
    """quantization_config of config.json. `kept`: modules that are not quantised."""
    group: dict[str, Any] = {"targets": ["Linear"], "weights": _weights(storage)}
    group["input_activations"] = None if activations is None else _rows(activations)
    return {
        "quant_method": "compressed-tensors",
        "format": _format(storage),
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [*kept],
        "kv_cache_scheme": None,
    }


def _format(storage: MatrixStorage) -> str:
    if storage.format == "packed":
        return "pack-quantized"
    return "float-quantized" if storage.is_float else "int-quantized"


def _weights(storage: MatrixStorage) -> dict[str, Any]:
    strategy = (
        {"strategy": "group", "group_size": storage.block_inputs} if storage.block_inputs else {"strategy": "channel"}
    )
    facts = {"num_bits": storage.num_bits, "type": _kind(storage.is_float), "symmetric": True, "dynamic": False}
    return facts | strategy


def _rows(activations: Literal["int8", "fp8"]) -> dict[str, Any]:
    kind = _kind(activations == "fp8")
    return {"num_bits": 8, "type": kind, "symmetric": True, "dynamic": True, "strategy": "token"}


def _kind(is_float: bool) -> str:
    return "float" if is_float else "int"
