"""The table of all families can be made, as people make it; here, one of its rows."""

import subprocess
import sys


def parity(*families: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.parity", *families]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_rows() -> None:
    done = parity("--tensor-parallel", "2", "mixtral", "falcon-7b", "t5")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert lines[1].startswith("mixtral MixtralForCausalLM no: ")
    assert " 30 tokens, all equal" in lines[1]
    assert "not possible: tensor_parallel 2 does not fit 1 KV heads: use 1 or fewer" in lines[2]
    assert lines[3].endswith("does not fit an encoder-decoder model: ranks cannot divide its encoder yet; use 1")
    assert lines[4] == "1 of 1: tokens equal, log-probs within 0.0001; 2 not possible"
