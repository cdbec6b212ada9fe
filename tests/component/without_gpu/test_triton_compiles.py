"""Triton's compiler needs no GPU: it makes machine code of every kernel that a step would launch, for several GPUs."""

import re
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from engine.attention.backend import AttentionShape
from engine.attention.triton_paged import TritonAttention
from engine.kv.dtypes import FP8
from tests.component.without_gpu.expert_cases import ExpertCase, random_experts, random_rows
from tests.component.without_gpu.paged_attention import Case, Inputs, random_inputs, sinks_of
from tests.fakes.launches import Launches

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
    # Triton 3.7's own, from Python 3.13 on.
    pytest.mark.filterwarnings("ignore:AnnAssign.__init__ missing 1 required:DeprecationWarning"),
]

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


def launches_of(case: Case) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    backend, given, found = TritonAttention(case.shape, CPU), random_inputs(case, CPU), Launches()
    backend._kernels = found
    backend.attend(*_arguments(case, given))
    backend.attend(*_decode_of_one_split(case))
    return found.different()


def _decode_of_one_split(case: Case) -> tuple[Any, ...]:
    return _arguments(case, random_inputs(replace(case, work=[(0, 1)]), CPU))


def _arguments(case: Case, given: Inputs) -> tuple[Any, ...]:
    sinks = sinks_of(case.shape, CPU)
    return given.queries, given.keys, given.values, given.cache, case.window, given.metadata, sinks


def compiled(name: str, arguments: tuple[Any, ...], constants: dict[str, Any], capability: int) -> Any:
    """What Triton makes of a launch: as its own launcher asks for it, whole numbers of 16 included."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from engine.attention import triton_kernels
    from engine.models import expert_kernels

    kernel = getattr(triton_kernels, name, None) or getattr(expert_kernels, name)
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
        (
            replace(
                BF16, shape=AttentionShape(8, 4, 256, softcap=50.0, has_sinks=True), block_size=256, dtype=torch.float16
            ),
            80,
        ),
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


@pytest.mark.parametrize(
    ("case", "capability"),
    [
        (ExpertCase(1, 8, 2, 4096, 1408, dtype=torch.bfloat16), 90),
        (ExpertCase(256, 8, 2, 4096, 1408, dtype=torch.bfloat16), 80),
        (ExpertCase(300, 8, 2, 2048, 768, dtype=torch.float16), 90),
        (ExpertCase(1, 4, 2, 512, 256, dtype=torch.float32), 80),
        (ExpertCase(20, 4, 2, 72, 40, dtype=torch.bfloat16), 80),
    ],
    ids=str,
)
def test_machine_code_of_experts_is_made(case: ExpertCase, capability: int) -> None:
    """It brings matrices to shared memory by 16 bytes, if rows of a matrix are whole steps."""
    experts, found = random_experts(case, CPU), Launches()
    assert experts._on_device is not None
    experts._on_device.products._kernels = found
    experts(random_rows(case, CPU))
    assert [name for name, _, _ in found.noted] == ["list_choices", "multiply_chosen", "multiply_chosen"]
    for name, arguments, constants in found.different():
        code = compiled(name, arguments, constants, capability)
        assert "cubin" in code.asm
        assert code.metadata.shared <= LEAST_SHARED_BYTES, f"{name} {constants}"
        if constants.get("DEPTH", 1) % 64 == 0:
            copies = re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^]]+\], \[[^]]+\], (\w+)", code.asm["ptx"])
            assert set(copies) == {"0x10"}, f"{constants}: {set(copies)}"
            loads = re.findall(r"ld\.global\S*", code.asm["ptx"])  # of counts, choices and shares
            assert len(loads) < 16, f"{constants}: {loads}"
