"""Triton's compiler needs no GPU: it makes machine code of every kernel that a step would launch, for several GPUs."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from engine.attention.backend import AttentionShape
from engine.attention.triton_paged import TritonAttention
from engine.kv_types import FP8
from tests.component.paged_attention import Case, random_inputs

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

CPU = torch.device("cpu")
LEAST_SHARED_BYTES = 99 * 1024  # that a program may have, of compute capabilities from 8.0 on
TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
OPTIONS = ("num_stages", "enable_fp_fusion")
SHAPE = AttentionShape(8, 2, 128)
ALIBI = (0.5, 0.25, 0.1)
# A decode of one split and of several, drafts, and a chunk that is not cut.
WORK = [(0, 1), (299, 300), (290, 295), (5, 40)]
BF16 = Case(SHAPE, WORK, dtype=torch.bfloat16)


@dataclass
class Launches:
    """Stands in for the module of kernels, and notes how each would be launched."""

    noted: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        def note(*arguments: Any, **constants: Any) -> None:
            self.noted.append((name, arguments, constants))

        return _Grids(note)


@dataclass
class _Grids:
    launch: Callable[..., None]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self.launch


def launches_of(case: Case) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """The launches of a step, without those that would need no other code."""
    backend, given, found = TritonAttention(case.shape, CPU), random_inputs(case, CPU), Launches()
    backend._kernels = found
    backend.attend(given.queries, given.keys, given.values, given.cache, case.window, given.metadata)
    backend.attend(*_decode_of_one_split(case))
    different = {(name, str(constants)): (name, arguments, constants) for name, arguments, constants in found.noted}
    return list(different.values())


def _decode_of_one_split(case: Case) -> tuple[Any, ...]:
    given = random_inputs(replace(case, work=[(0, 1)]), CPU)
    return given.queries, given.keys, given.values, given.cache, case.window, given.metadata


def compiled(name: str, arguments: tuple[Any, ...], constants: dict[str, Any], capability: int) -> Any:
    """What Triton makes of a launch: as its own launcher asks for it, whole numbers of 16 included."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from engine.attention import triton_kernels

    kernel = getattr(triton_kernels, name)
    options = {key: value for key, value in constants.items() if key in OPTIONS}
    constants = {key: value for key, value in constants.items() if key not in OPTIONS}
    signature, attributes = {}, {}
    for index, (parameter, value) in enumerate(zip(kernel.params, arguments, strict=False)):
        is_tensor = isinstance(value, torch.Tensor)
        signature[parameter.name] = TYPES[value.dtype] if is_tensor else "fp32" if isinstance(value, float) else "i32"
        if is_tensor or (isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize):
            attributes[(index,)] = [["tt.divisibility", 16]]
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.mark.parametrize(
    ("case", "capability"),
    [
        (BF16, 80),
        (BF16, 90),
        (replace(BF16, kv_dtype=FP8), 80),
        (replace(BF16, kv_dtype=FP8, dtype=torch.float16), 90),
        pytest.param(replace(BF16, dtype=torch.float32, window=100), 80, marks=pytest.mark.soak),
        (replace(BF16, shape=AttentionShape(8, 4, 256, softcap=50.0), block_size=256, dtype=torch.float16), 80),
        (
            replace(BF16, shape=AttentionShape(3, 1, 80, alibi=ALIBI), block_size=24, window=9, kv_dtype=torch.float32),
            90,
        ),
    ],
    ids=str,
)
def test_machine_code_is_made(case: Case, capability: int) -> None:
    launches = launches_of(case)
    assert [name for name, _, _ in launches].count("attend_tiles") == 3
    assert {name for name, _, _ in launches} == {"write_rows", "attend_tiles", "combine_splits"}
    for name, arguments, constants in launches:
        code = compiled(name, arguments, constants, capability)
        assert "cubin" in code.asm
        assert code.metadata.shared <= LEAST_SHARED_BYTES, f"{name} {constants}"
