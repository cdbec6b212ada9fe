"""The Triton kernels of attention and of experts, run by Triton's interpreter: in a process of its own, because it is
switched on when imported.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
ROOT = Path(__file__).resolve().parents[3]


_LONGEST_S = {"not soak": 890, "soak": 14_400}


@pytest.mark.timeout(14_500)
@pytest.mark.parametrize("part", ["not soak", pytest.param("soak", marks=pytest.mark.soak)])
def test_kernels_equal_torch(part: str) -> None:
    plain = ("-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "--timeout", str(_LONGEST_S[part]))
    files = [f"tests/component/without_gpu/interpreted_{kernels}.py" for kernels in ("triton", "experts")]
    plugin = ("-p", "tests.component.without_gpu.quick_interpreter")
    command = [sys.executable, "-m", "pytest", *plain, *plugin, *files, "-m", part]
    environ = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'client'}"}
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=_LONGEST_S[part], check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
