"""A CPU without AVX-512, as laptops have: its compiler cannot even see the vector loops without ending the process."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

Checkpoint = Callable[[str], Path]

_LIKE_HASWELL = {
    "NUMBA_CPU_NAME": "haswell",
    "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c",
    "ATEN_CPU_CAPABILITY": "avx2",
}
_SCRIPT = """
import sys
from pathlib import Path
from engine.kernels.cpu import machine
machine._CPUINFO = Path(sys.argv[2])
from engine.load import load_model_runner
from tests.component.arms import settings
from tests.component.parity import check_parity, run_mixed
model_dir = Path(sys.argv[1])
for quantize in ("none", "int8"):
    runner = load_model_runner(settings(model_dir, quantize=quantize))
    if quantize == "none":
        check_parity(model_dir, runner)
    print(quantize, runner.attention_backend, runner.kv_cache.layout.dtype, len(run_mixed(runner)))
"""


def test_models_run_without_avx512(checkpoint: Checkpoint, tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("flags\t\t: fpu sse4_2 avx2 fma f16c\n")
    packages = os.pathsep.join((str(Path.cwd()), str(Path.cwd() / "client")))
    environ = _LIKE_HASWELL | {"NUMBA_CACHE_DIR": str(tmp_path), "PATH": "/usr/bin:/bin", "PYTHONPATH": packages}
    command = [sys.executable, "-c", _SCRIPT, str(checkpoint("qwen2")), str(cpuinfo)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith(("none ", "int8 "))]
    assert [line[:3] for line in lines] == [["none", "torch", "float32"], ["int8", "torch", "float16"]]
    assert all(int(line[3]) > 0 for line in lines)
