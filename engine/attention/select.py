"""Selection of the eager decoder's attention backend by device, dtype and KV layout."""

from dataclasses import dataclass

import torch

from engine.attention.backend import AttentionBackend, AttentionShape
from engine.attention.cpu import CpuAttention
from engine.attention.flash import MAX_HEAD_DIM, PAGE_TOKENS, FlashAttention, flash_available
from engine.attention.torch_sdpa import TorchAttention
from engine.models.cpu_support import why_not_paged
from mesh.domain.errors import ConfigurationError
from mesh.domain.kv import KVLayout


@dataclass(frozen=True, slots=True)
class AttentionTarget:
    """The device, the dtype of queries, and the KV layout that a backend must support."""

    device: torch.device
    dtype: torch.dtype
    layout: KVLayout

    def __str__(self) -> str:
        kv = f"KV in {self.layout.dtype}, blocks of {self.layout.block_size} tokens"
        return f"{self.device.type} with {self.dtype}, {kv}"


def available_backends(shape: AttentionShape, target: AttentionTarget) -> list[str]:
    """Names of the backends that support this shape and target, fastest first."""
    names, layout = [], target.layout
    is_cpu_fp32 = (target.device.type, target.dtype) == ("cpu", torch.float32)
    if is_cpu_fp32 and shape.is_plain and why_not_paged(layout) is None:
        names.append("cpu")
    same_dtype = layout.dtype == str(target.dtype).removeprefix("torch.")
    paged = layout.block_size % PAGE_TOKENS == 0 and shape.head_dim <= MAX_HEAD_DIM
    half = target.dtype in (torch.float16, torch.bfloat16)
    if target.device.type == "cuda" and half and same_dtype and paged and flash_available():
        names.append("flash")
    return [*names, "torch"] if layout.dtype != "int8" else names


def select_backend(shape: AttentionShape, target: AttentionTarget, name: str = "auto") -> AttentionBackend:
    """The backend called `name`, or, with "auto", the fastest one. Raises ConfigurationError if it cannot run here."""
    names = available_backends(shape, target)
    if not names or (name != "auto" and name not in names):
        why = why_not_paged(target.layout)
        raise ConfigurationError(
            f"attention backend {name!r} cannot run on {target}; available: {', '.join(names) or 'none'}"
            + (f" (not cpu: {why})" if why is not None else "")
        )
    chosen = names[0] if name == "auto" else name
    if chosen == "cpu":
        return CpuAttention(shape, torch.get_num_threads())
    return FlashAttention(shape) if chosen == "flash" else TorchAttention(shape)
