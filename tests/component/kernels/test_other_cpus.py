"""CPUs with smaller vectors than this one: laptops with AVX2, and older ones, on which LLVM could not even compile the
vector loops without ending the process. And CPUs with instructions that this one may lack, for which code is written.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.kernels.cpu import machine
from tests.component.weights.test_half_weights import copy_narrow

Checkpoint = Callable[[str], Path]

_SCRIPT = """
import sys
from pathlib import Path
import torch
from engine.loading.load_runner import load_model_runner
from tests.component.arms import settings
from tests.component.parity import check_parity, logprob_differences, run_mixed
torch.set_num_threads(1)
model_dir = Path(sys.argv[1])
runs = {}
for quantize in ("none", "int8"):
    runner = load_model_runner(settings(model_dir, quantize=quantize))
    if quantize == "none":
        check_parity(model_dir, runner)
    runs[quantize] = run_mixed(runner)
    print(quantize, runner.attention_backend, runner.kv_cache.layout.dtype)
mean, largest = logprob_differences(runs["int8"], runs["none"])
assert 0 < mean < 0.1, mean  # wrong numbers differ by 1 and more
assert largest < 0.5, largest
"""

_RECURRENT_SCRIPT = """
import sys
from pathlib import Path
import torch
from engine.loading.load_runner import load_model_runner
from tests.component.arms import settings
from tests.component.parity import check_parity
torch.set_num_threads(1)
model_dir = Path(sys.argv[1])
runner = load_model_runner(settings(model_dir))
check_parity(model_dir, runner)
print("recurrent", runner.attention_backend)
"""

_BF16_SCRIPT = """
import sys
from pathlib import Path
from tests.component.weights.test_half_weights import check_as_exact_as_fp32
check_as_exact_as_fp32(Path(sys.argv[1]), "bfloat16")
"""

_COMPILING_SCRIPT = """
import re
import sys
from engine.kernels.cpu import machine
machine.cpu_flags = lambda: frozenset(sys.argv[1].split())
from engine.kernels.cpu.attention.batch import attend_prompt
from engine.kernels.cpu.products.matmul import multiply
from engine.kernels.cpu.products.panels import panel_product
pieces = {"multiply": multiply, "panel_product": panel_product, "attend_prompt": attend_prompt}
for word in sys.argv[2:]:
    name, kind = word.split(":")
    piece = pieces[name]
    piece.address_for(kind)
    code = piece._code.overloads.popitem()[1].library.get_asm_str()
    found = set(re.findall(r"\\b(tdp[a-z0-9]+|vpdpbusd|vdpbf16ps)\\s.*%([tyz])mm", code))
    print(word, *sorted(map(".".join, found)))
"""


_TILES_SCRIPT = """
from engine.kernels.cpu import machine
flags = machine.cpu_flags()
assert not machine.knows_amx()
was_zen_5 = machine.outruns_memory()
machine.cpu_flags = lambda: flags - {"avx_vnni"} if was_zen_5 else flags | {"avx_vnni", "avx512_vp2intersect"}
print(machine.outruns_memory())
from tests.component.kernels.test_cpu_products import test_a_row_does_not_depend_on_its_batch, test_products_are_exact
for kind in ("float32", "bfloat16", "int8"):
    test_products_are_exact(kind)
    test_a_row_does_not_depend_on_its_batch(kind)
"""


_CACHES = ("HOME", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR")
_COMPILED = {"none": ["compiled", "float32"], "int8": ["compiled", "int8"]}
_EAGER = {"none": ["torch", "float32"], "int8": ["torch", "float16"]}


@pytest.mark.parametrize(
    ("limit", "taken", "expected"),
    [
        pytest.param("AVX512_CORE", "avx512_vnni", _COMPILED, marks=pytest.mark.soak),
        pytest.param("AVX2_VNNI", "avx512f", _COMPILED, marks=pytest.mark.soak),
        ("AVX2", "avx512f", _COMPILED),
        ("SSE41", "avx2", _EAGER),
    ],
)
def test_models_run(checkpoint: Checkpoint, limit: str, taken: str, expected: dict[str, list[str]]) -> None:
    written = run_limited(limit, taken, _SCRIPT, checkpoint("qwen2"))
    lines = [line.split() for line in written.splitlines() if line.startswith(tuple(expected))]
    assert {kind: found for kind, *found in lines} == expected


@pytest.mark.soak
@pytest.mark.parametrize(
    ("limit", "taken", "expected"),
    [
        ("AVX512_CORE", "avx512_vnni", "compiled"),
        ("AVX2_VNNI", "avx512f", "compiled"),
        ("AVX2", "avx512f", "compiled"),
        ("SSE41", "avx2", "torch"),
    ],
)
def test_recurrent_models_run(checkpoint: Checkpoint, limit: str, taken: str, expected: str) -> None:
    written = run_limited(limit, taken, _RECURRENT_SCRIPT, checkpoint("jamba"))
    assert f"recurrent {expected}" in written.splitlines()


def run_limited(limit: str, taken: str, script: str, *model_dirs: Path) -> str:
    """What a script writes on a CPU without the instruction set `taken`; skips the test where all CPUs are so. Keeps
    compiled code where a service does: the next run compiles nothing.
    """
    if taken not in machine.cpu_flags():
        pytest.skip("this CPU is such a one: all tests run so")
    packages = os.pathsep.join((str(Path.cwd()), str(Path.cwd() / "client")))
    environ = {name: value for name, value in os.environ.items() if name in _CACHES}
    environ |= {"ONEDNN_MAX_CPU_ISA": limit, "PATH": "/usr/bin:/bin", "PYTHONPATH": packages}
    command = [sys.executable, "-c", script, *map(str, model_dirs)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("limit", "taken"), [("AVX512_CORE_VNNI", "avx512_bf16"), ("AVX2", "avx512f")])
def test_bf16_becomes_fp32_where_the_cpu_cannot_multiply_it(
    checkpoint: Checkpoint, tmp_path: Path, limit: str, taken: str
) -> None:
    narrow = copy_narrow(checkpoint("llama-tied"), tmp_path / "narrow", "bfloat16")
    run_limited(limit, taken, _BF16_SCRIPT, narrow)


_AVX2 = "avx2 f16c fma"
_AVX512 = f"{_AVX2} avx512f avx512bw avx512vl avx512_vnni avx512_bf16"


@pytest.mark.parametrize(
    ("cpu", "flags", "instructions"),
    [
        (
            "sapphirerapids",
            f"{_AVX512} amx_tile amx_int8 amx_bf16",
            {
                "multiply:int8": "tdpbusd.t vpdpbusd.z",
                "multiply:int16": "tdpbf16ps.t vdpbf16ps.z",
                "attend_prompt:float32": "tdpbf16ps.t",
            },
        ),
        ("alderlake", f"{_AVX2} avx_vnni", {"panel_product:int8": "vpdpbusd.y"}),
    ],
)
def test_code_for_instructions_that_this_cpu_may_lack(
    tmp_path: Path, cpu: str, flags: str, instructions: dict[str, str]
) -> None:
    """It is compiled, not run. LLVM ends the process if it cannot select an instruction. A letter names the registers:
    AMX's tiles, or vectors of 64 or 32 bytes.
    """
    if machine.why_no_loops() is not None:
        pytest.skip("this may be no x86 at all")
    environ = os.environ | {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", _COMPILING_SCRIPT, flags, *instructions]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == [f"{piece} {found}" for piece, found in instructions.items()]


def test_tiles_of_zen_4_and_zen_5(tmp_path: Path) -> None:
    """Whichever of the two this CPU is: with the tiles of the other one."""
    if not {"avx512f", "avx512_vnni"} <= machine.cpu_flags() or machine.knows_amx():
        pytest.skip("it is neither")
    environ = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", _TILES_SCRIPT]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == [str(not machine.outruns_memory())]


@pytest.mark.parametrize(
    ("limit", "left"),
    [
        ("", {"avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_int8"}),
        ("avx512_core_bf16", {"avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni"}),
        ("AVX512_CORE_VNNI", {"avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx_vnni"}),
        ("AVX512_CORE", {"avx2", "fma", "f16c", "avx512f"}),
        ("AVX2_VNNI", {"avx2", "fma", "f16c", "avx_vnni"}),
        ("AVX2", {"avx2", "fma", "f16c"}),
        ("AVX", {"f16c"}),
        ("SSE41", set()),
    ],
)
def test_a_limit_takes_instruction_sets_away(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: str, left: set[str]
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("flags\t\t: avx2 fma f16c avx512f avx512_vnni avx512_bf16 avx_vnni amx_int8\n")
    monkeypatch.setattr(machine, "_CPUINFO", cpuinfo)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    assert machine.cpu_flags.__wrapped__() == left
    # LLVM spells them differently.
    assert machine.is_allowed("avx512bf16") == ("avx512_bf16" in left)
    assert machine.is_allowed("amx-int8") == ("amx_int8" in left)


def test_code_for_x86_runs_on_no_other_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """/proc/cpuinfo may be that of another CPU, which emulates this one."""
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("flags\t\t: avx2 fma f16c\n")
    monkeypatch.setattr(machine, "_CPUINFO", cpuinfo)
    monkeypatch.setattr(machine, "cpu_flags", machine.cpu_flags.__wrapped__)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    reasons = {}
    for architecture in ("x86_64", "aarch64"):
        monkeypatch.setattr("platform.machine", lambda name=architecture: name)
        reasons[architecture] = machine.why_no_loops()
    assert reasons == {"x86_64": None, "aarch64": "the CPU is aarch64, not x86-64"}


def test_a_limit_that_is_not_known_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX3")
    reason = machine.why_no_loops()
    assert reason is not None
    assert reason.startswith("ONEDNN_MAX_CPU_ISA is AVX3, not one of SSE41, AVX, AVX2")
