"""Selection of the eager decoder's attention backend by device, dtype and KV layout."""

from dataclasses import dataclass

import structlog
import torch

from engine.attention import triton_paged
from engine.attention.backend import AttentionBackend, AttentionShape
from engine.attention.cpu import CpuAttention
from engine.attention.flash import MAX_HEAD_DIM, PAGE_TOKENS, FlashAttention, why_no_flash_attn
from engine.attention.torch_sdpa import TorchAttention
from engine.attention.triton_paged import TritonAttention
from engine.models.cpu_support import why_not_paged
from mesh.domain.errors import ConfigurationError
from mesh.domain.kv import KVLayout

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class AttentionTarget:
    """The device, the dtype of queries, and the KV layout that a backend must support."""

    device: torch.device
    dtype: torch.dtype
    layout: KVLayout

    def __str__(self) -> str:
        kv = f"KV in {self.layout.dtype}, blocks of {self.layout.block_size} tokens"
        return f"{self.device.type} with {self.dtype}, {kv}"


def reasons_against(shape: AttentionShape, target: AttentionTarget) -> dict[str, str | None]:
    """By backend, fastest first: the reason why it cannot run this shape on this target; None if it can."""
    against = {
        "cpu": _why_not_cpu(target),
        "flash": _why_not_flash(shape, target),
        "triton": _why_not_triton(shape, target),
        "torch": "KV in int8 is for the kernels of the CPU" if target.layout.dtype == "int8" else None,
    }
    if target.device.type == "cpu":
        against["triton"] = against.pop("triton")  # interpreted: slower than any other
    return against


def available_backends(shape: AttentionShape, target: AttentionTarget) -> list[str]:
    """Names of the backends that support this shape and target, fastest first."""
    return [name for name, reason in reasons_against(shape, target).items() if reason is None]


def select_backend(shape: AttentionShape, target: AttentionTarget, name: str) -> AttentionBackend:
    """The backend called `name`, or, with "auto", the fastest one. Raises ConfigurationError if it cannot run here."""
    against = reasons_against(shape, target)
    names = available_backends(shape, target)
    if not names or (name != "auto" and name not in names):
        reasons = {name: against[name]} if name != "auto" else against
        raise ConfigurationError(
            f"attention backend {name!r} cannot run on {target}; available: {', '.join(names) or 'none'} "
            f"({_in_words(reasons)})" + ("" if names else _other_settings(target))
        )
    chosen = names[0] if name == "auto" else name
    log.info(
        "attention backend chosen", name=chosen, asked=name, available=",".join(names), cannot_run=_in_words(against)
    )
    match chosen:
        case "cpu":
            return CpuAttention(shape, torch.get_num_threads())
        case "flash":
            return FlashAttention(shape)
        case "triton":
            return TritonAttention(shape, target.device)
    return TorchAttention(shape)


def _in_words(reasons: dict[str, str | None]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items() if reason is not None)


def _other_settings(target: AttentionTarget) -> str:
    """The settings to change if no backend can run, which only happens with KV in int8."""
    is_narrow = target.device.type == "cpu" and target.dtype != torch.float32
    return f": set kv_dtype to another type than int8{', or dtype to float32' if is_narrow else ''}"


def _why_not_cpu(target: AttentionTarget) -> str | None:
    if (target.device.type, target.dtype) != ("cpu", torch.float32):
        return f"it computes torch.float32 on cpu, not {target.dtype} on {target.device.type}"
    return why_not_paged(target.layout)


def _why_not_flash(shape: AttentionShape, target: AttentionTarget) -> str | None:
    layout = target.layout
    if target.device.type != "cuda":
        return f"it is for CUDA, not {target.device.type}"
    if target.dtype not in (torch.float16, torch.bfloat16):
        return f"it computes in float16 and bfloat16, not {target.dtype}"
    if layout.dtype != str(target.dtype).removeprefix("torch."):
        return f"KV in {layout.dtype} differs from queries in {target.dtype}"
    if shape.head_dim > MAX_HEAD_DIM:
        return f"heads of {shape.head_dim}, over {MAX_HEAD_DIM}"
    if shape.has_sinks:
        return "it knows no attention sinks"
    if layout.block_size % PAGE_TOKENS:
        return f"blocks of {layout.block_size} tokens, not a multiple of {PAGE_TOKENS}"
    return triton_paged.why_too_old(target.device) or why_no_flash_attn()


def _why_not_triton(shape: AttentionShape, target: AttentionTarget) -> str | None:
    if target.layout.dtype == "int8":
        return "it reads KV in floating point, not int8"
    if shape.head_dim > triton_paged.MAX_HEAD_DIM:
        return f"heads of {shape.head_dim}, over {triton_paged.MAX_HEAD_DIM}"
    return triton_paged.why_not_triton(target.device)
