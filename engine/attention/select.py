"""Which attention backend of the eager decoder fits a device, dtypes and a cache."""

from dataclasses import dataclass

import torch

from engine.attention.backend import AttentionBackend, AttentionShape
from engine.attention.cpu import CpuAttention
from engine.attention.flash import MAX_HEAD_DIM, PAGE_TOKENS, FlashAttention, flash_available
from engine.attention.torch_sdpa import TorchAttention
from engine.cpu.batch import why_not_paged
from mesh.domain.errors import ConfigurationError
from mesh.domain.kv import KVLayout


@dataclass(frozen=True, slots=True)
class AttentionPlace:
    """Where a backend is to run: the device, the dtype of queries, and the cache."""

    device: torch.device
    dtype: torch.dtype
    layout: KVLayout

    def __str__(self) -> str:
        kv = f"KV in {self.layout.dtype}, blocks of {self.layout.block_size} tokens"
        return f"{self.device.type} with {self.dtype}, {kv}"


def available_backends(shape: AttentionShape, place: AttentionPlace) -> list[str]:
    """Backends that can run, best first."""
    names, layout = [], place.layout
    if (place.device.type, place.dtype) == ("cpu", torch.float32) and shape.is_plain and why_not_paged(layout) is None:
        names.append("cpu")
    same = layout.dtype == str(place.dtype).removeprefix("torch.")
    paged = layout.block_size % PAGE_TOKENS == 0 and shape.head_dim <= MAX_HEAD_DIM
    half = place.dtype in (torch.float16, torch.bfloat16)
    if place.device.type == "cuda" and half and same and paged and flash_available():
        names.append("flash")
    return [*names, "torch"] if layout.dtype != "int8" else names


def select_backend(shape: AttentionShape, place: AttentionPlace, name: str = "auto") -> AttentionBackend:
    """The backend called `name`, or the best one; ConfigurationError if that one cannot run here."""
    names = available_backends(shape, place)
    if not names or (name != "auto" and name not in names):
        why = why_not_paged(place.layout)
        raise ConfigurationError(
            f"attention backend {name!r} cannot run on {place}; available: {', '.join(names) or 'none'}"
            + (f" (not cpu: {why})" if why is not None else "")
        )
    chosen = names[0] if name == "auto" else name
    if chosen == "cpu":
        return CpuAttention(shape, torch.get_num_threads())
    return FlashAttention(shape) if chosen == "flash" else TorchAttention(shape)
