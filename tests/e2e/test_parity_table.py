"""The table of all families can be made, as people make it; here, one of its rows."""

import subprocess
import sys


def parity(*families: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.parity", *families]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_row() -> None:
    done = parity("gemma2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gemma2 Gemma2ForCausalLM torch 216 tokens, all equal" in " ".join(done.stdout.split())
    assert done.stdout.endswith("1 of 1: tokens equal, log-probs within 0.0001\n")
