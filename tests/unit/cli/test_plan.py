"""`tandem plan` for a device of the table: what it prints, and how measured figures come beside."""

import json
import shutil
from math import prod
from pathlib import Path
from typing import Any

import pytest

from engine.kernels.cpu.machine import why_no_loops
from engine.models.parameters import parameter_specs
from engine.models.read_config import load_decoder_config
from tandem_cli.capacity import ranks
from tandem_cli.main import main
from tandem_cli.model_files.model_folders import BUNDLED

ON_H100 = ("plan", "--device", "h100-sxm")


def plan(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert main([*ON_H100, "--json", *flags]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.fixture
def partition(tmp_path: Path) -> Path:
    """The bundled model for two ranks in int8; skips the test where the CPU has no compiled loops."""
    if reason := why_no_loops():
        pytest.skip(reason)
    out = tmp_path / "partition"
    assert main(["partition", "tandem-small", str(out), "--tensor-parallel", "2", "--quantize", "int8"]) == 0
    return out


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
    assert "measured ms" not in out


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
    assert main([*ON_H100, "--measured", str(file)]) == 0
    assert "measured ms" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--bandwidth", "100"], "together"),
        (["--memory", "1", "--bandwidth", "1", "--flops", "1"], "together"),
        (["--batch", "0"], "must be >= 1"),
        (["--memory-share", "1.5"], "must be in (0, 1], got 1.5"),
        (["--measured", "/nowhere"], "cannot read /nowhere: No such file or directory"),
        (["--measure"], "on this machine, not on h100-sxm"),
        (
            ["--input-tokens", "5000"],
            "--input-tokens 5000 and --output-tokens 64 do not fit: the model has a context of",
        ),
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


@pytest.mark.parametrize("content", ["{", "{}", "[]", "[" * 100_000, '{"points": [{}]}'])
def test_other_files_hold_no_results(content: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(content)
    assert main([*ON_H100, "--measured", str(tmp_path / "other.json")]) == 2
    assert capsys.readouterr().err == f"tandem: {tmp_path}/other.json holds no results of tandem bench\n"


def test_a_model_is_named_as_its_folder_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "m[awq]"
    shutil.copytree(BUNDLED, folder)
    assert main([*ON_H100, str(folder)]) == 0
    assert f"{folder}: " in capsys.readouterr().out


def test_a_file_without_such_prompts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = results(tmp_path / "results.json", ttft_p50_ms=1.0)
    assert main([*ON_H100, "--measured", str(file), "--input-tokens", "77"]) == 2
    assert "no closed loop with prompts of 77 tokens" in capsys.readouterr().err


MACHINE = ("--memory", "64", "--bandwidth", "20", "--flops", "0.2")


def test_kv_in_fp8_takes_one_byte(capsys: pytest.CaptureFixture[str]) -> None:
    halves = plan(capsys)["kv_bytes_per_token"]
    found = plan(capsys, "--kv-dtype", "fp8")
    assert (found["precision"]["kv"], found["kv_bytes_per_token"]) == ("fp8", halves / 2)
    ranks = ranks_of(capsys, "--dtype", "float32", "--kv-dtype", "fp8", "--tensor-parallel", "2")
    assert sum(rank["kv_bytes_per_token"] for rank in ranks) == halves / 2


def ranks_of(capsys: pytest.CaptureFixture[str], *flags: str) -> list[dict[str, Any]]:
    assert main(["plan", *MACHINE, "--json", *flags]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["ranks"]
    return found


@pytest.mark.parametrize(
    ("is_compiled", "flags", "weight_bytes"),
    [(True, (), 2), (True, ("--dtype", "float32"), 4), (False, ("--dtype", "float32"), 4)],
)
def test_ranks_divide_weights_and_kv(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    is_compiled: bool,
    flags: tuple[str, ...],
    weight_bytes: int,
) -> None:
    """The bundled model is in fp16. Its KV is fp32 all the same."""
    if not flags and (reason := why_no_loops()):
        pytest.skip(reason)
    monkeypatch.setattr(ranks, "why_not_compiled", lambda *_: None if is_compiled else "no reason")
    assert ranks_of(capsys) == []
    first, second = ranks_of(capsys, "--tensor-parallel", "2", "--threads", "5", *flags)
    assert (first["heads"], second["heads"]) == ([0, 1], [1, 2])
    assert (first["cores"], second["cores"]) == (2, 3)
    assert [rank["kv_bytes_per_token"] for rank in (first, second)] == [2 * 4 * 32 * 4] * 2
    sizes = parameter_bytes(weight_bytes)
    embed, norms = sizes.pop("embed"), sum(sizes.pop(name) for name in list(sizes) if name.endswith("norm"))
    half = sum(sizes.values()) / 2 + norms
    # Compiled: rank 0 embeds, and each holds half of the output matrix. Eager: both embed, rank 0 with it as output.
    expected = (half + embed * 3 / 2, half + embed / 2) if is_compiled else (half + embed, half + embed)
    assert (first["weights_bytes"], second["weights_bytes"]) == expected


def test_stages_divide_layers(capsys: pytest.CaptureFixture[str]) -> None:
    stages = ranks_of(capsys, "--tensor-parallel", "2", "--pipeline-parallel", "2", "--threads", "3")
    assert [(rank["layers"], rank["heads"], rank["cores"]) for rank in stages] == [
        ([0, 2], [0, 1], 0),
        ([0, 2], [1, 2], 0),
        ([2, 4], [0, 1], 0),
        ([2, 4], [1, 2], 0),
    ]
    alone = ranks_of(capsys, "--tensor-parallel", "2")
    whole = sum(rank["weights_bytes"] for rank in alone)
    assert sum(rank["weights_bytes"] for rank in stages) == pytest.approx(whole, rel=1e-3)  # norms are in all stages


def parameter_bytes(weight_bytes: int) -> dict[str, int]:
    config = load_decoder_config(BUNDLED)
    return {spec.name: weight_bytes * prod(spec.shape) for spec in parameter_specs(config)}


def test_the_table_of_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *MACHINE, "--tensor-parallel", "2", "--threads", "2"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    first, second, worker = (next(line for line in lines if line[:1] == [name]) for name in ("0", "1", "worker"))
    assert (first[1:3], second[1:3], worker[1:3]) == (["0..3", "0..0"], ["0..3", "1..1"], ["0..3", "0..1"])
    assert (first[-1], second[-1], worker[-1]) == ("1", "1", "2")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--tensor-parallel", "3"], "tensor_parallel 3 does not fit 2 KV heads: use 2 or fewer"),
        (["--pipeline-parallel", "5"], "pipeline_parallel 5 does not fit 4 layers"),
        (["--quantize", "int8", "--tensor-parallel", "2", "--dtype", "bfloat16"], "in int8 needs the compiled decoder"),
    ],
)
def test_degrees_that_do_not_fit(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *MACHINE, *flags]) == 2
    assert said in capsys.readouterr().err


def test_each_rank_has_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """The eager decoder's cut: both ranks embed, rank 0 has that matrix as output, too."""
    plans = []
    for flags in ((), ("--tensor-parallel", "2")):
        assert main([*ON_H100, *flags, "--json"]) == 0
        plans.append(json.loads(capsys.readouterr().out))
    alone, two = plans
    assert two["device"]["name"] == "2 x H100 SXM"
    for figure in ("memory_bytes", "bandwidth_bytes_per_s", "flops_per_s"):
        assert two["device"][figure] == 2 * alone["device"][figure]
    assert [(rank["heads"], rank["cores"]) for rank in two["ranks"]] == [([0, 1], None), ([1, 2], None)]
    assert two["ranks"][0]["weights_bytes"] == two["ranks"][1]["weights_bytes"]
    assert main([*ON_H100, "--tensor-parallel", "2"]) == 0
    assert capsys.readouterr().out.count("on a GPU") == 3


def test_a_partition_says_its_degree_and_quantization(capsys: pytest.CaptureFixture[str], partition: Path) -> None:
    capsys.readouterr()
    assert main(["plan", *MACHINE, "--json", str(partition)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (len(found["ranks"]), found["precision"]["weights"]) == (2, "int8")
    by_formula = sum(rank["weights_bytes"] for rank in found["ranks"])
    assert found["partition"]["num_bytes"] == pytest.approx(by_formula, rel=0.1)  # which leaves out scales
    for flags in (["--tensor-parallel", "1"], ["--quantize", "none"]):
        assert main(["plan", *MACHINE, str(partition), *flags]) == 2
        assert (
            "is partitioned for tensor_parallel 2, pipeline_parallel 1, dtype float32 and quantize int8"
            in capsys.readouterr().err
        )
    assert main(["plan", *MACHINE, str(partition)]) == 0
    assert "B in 2 files" in capsys.readouterr().out
