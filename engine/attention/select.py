"""Which attention backend fits a device, a dtype and a block size."""

import torch

from engine.attention.backend import AttentionBackend, AttentionShape
from engine.attention.cpu import CpuAttention
from engine.attention.flash import MAX_HEAD_DIM, PAGE_TOKENS, FlashAttention, flash_available
from engine.attention.torch_sdpa import TorchAttention
from mesh.domain.errors import ConfigurationError


def available_backends(device: torch.device, dtype: torch.dtype, shape: AttentionShape, block_size: int) -> list[str]:
    """Backends that can run, best first."""
    names = []
    if device.type == "cpu" and dtype == torch.float32:
        names.append("cpu")
    paged = block_size % PAGE_TOKENS == 0 and shape.head_dim <= MAX_HEAD_DIM
    if device.type == "cuda" and dtype in (torch.float16, torch.bfloat16) and paged and flash_available():
        names.append("flash")
    return [*names, "torch"]


def select_backend(
    device: torch.device, dtype: torch.dtype, shape: AttentionShape, block_size: int, name: str = "auto"
) -> AttentionBackend:
    """The backend called `name`, or the best one; ConfigurationError if that one cannot run here."""
    names = available_backends(device, dtype, shape, block_size)
    if name != "auto" and name not in names:
        raise ConfigurationError(
            f"attention backend {name!r} cannot run on {device.type} with {dtype} and blocks of {block_size} tokens; "
            f"available: {', '.join(names)}"
        )
    chosen = names[0] if name == "auto" else name
    if chosen == "cpu":
        return CpuAttention(shape, torch.get_num_threads())
    return FlashAttention(shape) if chosen == "flash" else TorchAttention(shape)
