"""The benchmark of loading: that it runs, not what it finds."""

import pytest

from bench import loading
from bench.shapes import SHAPES
from engine.kernels.cpu.machine import why_no_loops

TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 128,
    "vocab_size": 4096,
}


@pytest.mark.soak  # nine processes
def test_both_sources_are_loaded_and_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    loading.main(["--shape", "tiny", "--quantize", "int8", "--repeats", "1"])
    out = capsys.readouterr().out
    assert "tiny: a checkpoint of 1 MB in fp32" in out
    rows = [line.split("│")[1].strip() for line in out.splitlines() if line.startswith("│")]
    if reason := why_no_loops():
        assert (rows, reason in out) == (["checkpoint"], True)
    else:
        assert rows == ["checkpoint", "partition"]
        assert "peak memory" in out
        assert "0.0 MB of the weights are its own; logits of all loads are equal to the bit" in " ".join(out.split())
