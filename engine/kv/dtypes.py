"""The types of KV in torch, and the conversion of keys and values to them."""

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
_LARGEST_FP8 = 448.0


def kv_type(name: str) -> torch.dtype:
    """The type of a cache whose layout has this dtype."""
    found: torch.dtype = FP8 if name == "fp8" else getattr(torch, name)
    return found


def as_stored(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values as a cache of this type holds them: rounded to nearest even. fp8 saturates, and keeps NaN."""
    if dtype == FP8 and rows.dtype != FP8:
        rows = rows.clamp(-_LARGEST_FP8, _LARGEST_FP8)  # torch converts larger ones to NaN
    return rows.to(dtype)


def pair_as_stored(keys: Tensor, values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values [..., head_dim] as a cache of this type holds them. A key too large for float16 becomes infinity,
    of whose score softmax may make any number: its value becomes NaN, so that all who see it fail.
    """
    keys, values = as_stored(keys, dtype), as_stored(values, dtype)
    if dtype == torch.float16:
        values = values.masked_fill(~keys.isfinite().all(-1, keepdim=True), float("nan"))
    return keys, values


def as_bytes(numbers: Tensor) -> Tensor:
    """fp8 as bytes, which torch and Triton move on every device; numbers of other types unchanged."""
    return numbers.view(torch.uint8) if numbers.dtype == FP8 else numbers
