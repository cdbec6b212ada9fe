"""`tandem plan` for a device of the table: what it prints, and how measured figures come beside."""

import json
from pathlib import Path
from typing import Any

import pytest

from tandem_cli.main import main

ON_H100 = ("plan", "--device", "h100-sxm")


def plan(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert main([*ON_H100, "--json", *flags]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def results(path: Path, **figures: float) -> Path:
    """A file as `tandem bench` writes it: one client, and eight."""
    points = [
        {
            "arm": "mesh",
            "case": {"kind": kind, "value": clients, "input_tokens": 256, "output_tokens": 64},
            "figures": {name: {"median": value, "low": value, "high": value} for name, value in figures.items()},
        }
        for kind, clients in (("rate", 1.0), ("concurrency", 1.0), ("concurrency", 8.0))
    ]
    path.write_text(json.dumps({"format": "tandem-bench/1", "points": points}))
    return path


def test_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ON_H100, "--price-per-hour", "2", "--users", "10"]) == 0
    out = capsys.readouterr().out
    for said in (
        "H100 SXM",
        "1,024 bytes per token",
        "critical batch: 295",
        "decode step of 32",
        "per million",
        "start",
    ):
        assert said in out


def test_a_batch_that_does_not_fit_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--memory", "0.02", "--bandwidth", "1", "--flops", "1", "--batch", "1", "100000")
    assert main(["plan", *flags, "--price-per-hour", "1"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("decode step")]
    assert [("does not fit" in row) for row in rows] == [False, False, True]


def test_an_encoder_decoder_model_is_refused_with_the_reason(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = {"architectures": ["T5ForConditionalGeneration"], "d_model": 8, "d_ff": 8, "d_kv": 4, "num_heads": 2}
    config |= {"num_layers": 1, "vocab_size": 32, "feed_forward_proj": "relu"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main([*ON_H100, str(tmp_path)]) == 2
    assert "has an encoder, whose output the decoder attends to" in capsys.readouterr().err


def test_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, "--batch", "1", "8", "--rate", "100", "--quantize", "fp8")
    assert found["kv_bytes_per_token"] == 2 * 4 * 2 * 32 * 2
    assert [row["name"] for row in found["predictions"]] == ["prefill_ms", "decode_ms@1", "decode_ms@8"]
    assert found["memory"][0]["weights"] == "fp8"
    assert set(found["workers"]) == {"predicted"}
    assert found["transfer_ms"]["10"] == pytest.approx(256 * 1024 * 8 / 10e9 * 1000)


def test_measured_figures_come_beside(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = results(tmp_path / "results.json", ttft_p50_ms=50.0, tpot_p50_ms=4.0)
    found = plan(capsys, "--batch", "1", "8", "--measured", str(file), "--rate", "2")
    prefill, _, step = found["predictions"]
    assert (prefill["measured_ms"], step["measured_ms"]) == (50.0, 4.0)
    assert step["ratio"] == pytest.approx(4.0 / step["predicted_ms"])
    assert step["measured_tokens_per_s"] == 2000
    assert found["workers"]["measured"]["prefill"] == pytest.approx(2 * 0.05)
    assert found["workers"]["measured"]["decode"] == pytest.approx(2 * 63 * 0.004 / 8)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--bandwidth", "100"], "together"),
        (["--memory", "1", "--bandwidth", "1", "--flops", "1"], "together"),
        (["--batch", "0"], "must be >= 1"),
        (["--measured", "/nowhere"], "holds no results"),
        (["--measure"], "on this machine, not on h100-sxm"),
    ],
)
def test_what_makes_no_sense_is_one_line(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status: object = main([*ON_H100, *flags])
    except SystemExit as ended:
        status = ended.code
    captured = capsys.readouterr()
    assert (status, captured.out, captured.err.count("\n")) == (2, "", 1)
    assert said in captured.err


def test_a_file_without_such_prompts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = results(tmp_path / "results.json", ttft_p50_ms=1.0)
    assert main([*ON_H100, "--measured", str(file), "--input-tokens", "77"]) == 2
    assert "no closed loop with prompts of 77 tokens" in capsys.readouterr().err
