"""Steps of attention and of experts for a GPU, the most telling first; on CPU short ones, for the interpreter."""

import torch

from engine.attention.backend import AttentionShape
from engine.kv.dtypes import FP8
from tests.component.without_gpu.expert_cases import ExpertCase
from tests.component.without_gpu.paged_attention import Case, Work

_LLAMA_8B = AttentionShape(32, 8, 128)
_SHAPES = (
    _LLAMA_8B,
    AttentionShape(14, 2, 64),
    AttentionShape(8, 4, 256, softcap=50.0),
    AttentionShape(16, 16, 80),
    AttentionShape(8, 8, 64, alibi=tuple(2.0 ** -(i + 1) for i in range(8))),
    AttentionShape(71, 1, 64),
    AttentionShape(64, 8, 64, has_sinks=True),
)
_WORK = [(0, 1), (16, 17), (255, 256), (300, 301), (2048, 2049), (4999, 5000)]
_CHUNKS = [(0, 200), (700, 705), (500, 900), (0, 1025)]
_SHORT = AttentionShape(4, 1, 128)
_SHORT_WORK = [(0, 1), (256, 257)]
_SHORT_CHUNKS = [(20, 25), (10, 30)]


def cases(device: torch.device) -> list[Case]:
    """Every type, block size and shape, but not every combination: each compiles kernels of its own."""
    is_large = device.type == "cuda"
    work: Work = [*_WORK, *_CHUNKS] if is_large else [*_SHORT_WORK, *_SHORT_CHUNKS]
    half = torch.bfloat16 if is_large else torch.float16  # the interpreter is not exact in bf16
    basic = [
        Case(_LLAMA_8B if is_large else _SHORT, work, 16, None, half),
        Case(_LLAMA_8B, work, 16, None, torch.float32),
        Case(_LLAMA_8B, work, 16, None, torch.float16),
        Case(_LLAMA_8B, work, 256, None, half),
        Case(_LLAMA_8B, work, 16, 300, half),
        Case(_LLAMA_8B, work, 32, None, half),
        Case(_LLAMA_8B, work, 64, None, half),
    ]
    others = [Case(shape, work, 16, window, half) for shape in _SHAPES[1:] for window in (None, 1000)]
    exact = [Case(shape, work, 32, 300, torch.float32) for shape in _SHAPES[1:]]
    return [*basic, *others, *exact, *(Case(_LLAMA_8B, work, 16, None, half, kv) for kv in (torch.float32, FP8))]


def alone_case(device: torch.device) -> Case:
    """A sequence whose last token must not depend on what is computed beside it."""
    is_large = device.type == "cuda"
    end = 3000 if is_large else 300
    shape, dtype = (_LLAMA_8B, torch.bfloat16) if is_large else (_SHORT, torch.float32)
    return Case(shape, [(end - 1, end)], dtype=dtype)


def timed_cases(device: torch.device) -> list[tuple[str, Case]]:
    """By what they are: decodes and prompts of an 8B model."""
    is_large = device.type == "cuda"
    dtype = torch.bfloat16 if is_large else torch.float32
    shape = _LLAMA_8B if is_large else AttentionShape(2, 1, 16)
    length, batch = (2048, 32) if is_large else (40, 2)
    work: dict[str, Work] = {
        f"{batch} decodes at {length}": [(length - 1, length)] * batch,
        "1 decode at the same": [(length - 1, length)],
        f"prompt of {length}": [(0, length)],
        f"5 rows of drafts at {length}": [(length - 5, length)] * batch,
    }
    sizes = (16, 256, 32) if is_large else (16,)
    return [(name, Case(shape, work[name], size, None, dtype)) for size in sizes for name in work]


def expert_cases(device: torch.device) -> list[ExpertCase]:
    """Every type and height of a tile."""
    is_large = device.type == "cuda"
    half = torch.bfloat16 if is_large else torch.float16
    hidden, inner = (2048, 768) if is_large else (64, 32)
    return [
        ExpertCase(num_rows, 16, 4, hidden, inner, dtype=dtype)
        for dtype in (half, torch.float32, torch.float16)
        for num_rows in ((1, 32, 200, 1000) if is_large else (3,))
    ]


def timed_experts(device: torch.device) -> list[tuple[str, ExpertCase]]:
    """By what they are: two models' experts, with as many rows as a decode step or a short prompt has."""
    if device.type != "cuda":
        return [("experts", ExpertCase(2))]
    shapes = {"2 of 8, as Mixtral": (8, 2, 4096, 14336), "8 of 128, as Qwen 3": (128, 8, 2048, 768)}
    return [
        (name, ExpertCase(num_rows, *shape, dtype=torch.bfloat16))
        for name, shape in shapes.items()
        for num_rows in (1, 32, 256)
    ]
