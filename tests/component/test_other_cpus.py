"""CPUs with smaller vectors than this one: laptops with AVX2, and older ones, on which LLVM could not even compile the
vector loops without ending the process.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.kernels.cpu import machine

Checkpoint = Callable[[str], Path]

_SCRIPT = """
import sys
from pathlib import Path
from engine.kernels.cpu import machine
machine._CPUINFO = Path(sys.argv[2])
from engine.load_runner import load_model_runner
from tests.component.arms import settings
from tests.component.parity import check_parity, run_mixed
model_dir = Path(sys.argv[1])
for quantize in ("none", "int8"):
    runner = load_model_runner(settings(model_dir, quantize=quantize))
    if quantize == "none":
        check_parity(model_dir, runner)
    print(quantize, runner.attention_backend, runner.kv_cache.layout.dtype, len(run_mixed(runner)))
"""


@pytest.mark.parametrize(
    ("cpu", "features", "expected"),
    [
        pytest.param(
            "haswell", "avx2 fma f16c", [["none", "compiled", "float32"], ["int8", "compiled", "int8"]], id="AVX2"
        ),
        pytest.param("nehalem", "sse4_2", [["none", "torch", "float32"], ["int8", "torch", "float16"]], id="SSE"),
    ],
)
def test_models_run(checkpoint: Checkpoint, tmp_path: Path, cpu: str, features: str, expected: list[list[str]]) -> None:
    if cpu == "haswell" and not machine.knows_avx512():
        pytest.skip("this CPU is such a one: all tests run so")
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"flags\t\t: fpu {features}\n")
    packages = os.pathsep.join((str(Path.cwd()), str(Path.cwd() / "client")))
    environ = {
        "NUMBA_CPU_NAME": cpu,
        "NUMBA_CPU_FEATURES": ",".join(f"+{name.replace('_', '.')}" for name in features.split()),
        "ATEN_CPU_CAPABILITY": "avx2",
        "NUMBA_CACHE_DIR": str(tmp_path),
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": packages,
    }
    command = [sys.executable, "-c", _SCRIPT, str(checkpoint("qwen2")), str(cpuinfo)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith(("none ", "int8 "))]
    assert [line[:3] for line in lines] == expected
    assert all(int(line[3]) > 0 for line in lines)
