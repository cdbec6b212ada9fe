"""bench.limits and bench.peers.neighbours: what they derive from what they measure."""

import os
from pathlib import Path

import psutil
import pytest

from bench.arithmetic import ARITHMETICS, operations_per_s
from bench.limits import read_comparison, roofline, tokens_per_s
from bench.peers.neighbours import Case, busy, cell
from bench.shapes import write_shape
from tandem_cli.capacity.roofline import Device

MACHINE = Device("two cores", 1e12, 50e9, {"float32": 500e9, "bfloat16": 1e12, "int8": 2e12, "int4": 2e12}, "a test")


def test_a_roofline_is_the_prompts_and_then_the_steps(tmp_path: Path) -> None:
    capacity = roofline(MACHINE, write_shape("narrow", tmp_path), "none")
    in_all_s = 3 * capacity.prefill_s(100) + 9 * capacity.decode_step_s(3, 105)
    assert tokens_per_s(capacity, 3, 100, 10) == pytest.approx(3 * 10 / in_all_s)


@pytest.mark.parametrize(("quantize", "weights"), [("none", "float32"), ("bf16", "bfloat16"), ("int8", "int8")])
def test_weights_are_of_the_type_that_was_asked_for(tmp_path: Path, quantize: str, weights: str) -> None:
    capacity = roofline(MACHINE, write_shape("narrow", tmp_path), quantize)
    assert capacity.precision.weights == weights
    assert capacity.device.flops_per_s == MACHINE.flops_per_s[weights]


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "No such file"), ("{", "is not what bench.peers.compare"), ('{"rows": []}', "lacks 'shape'")],
)
def test_a_file_without_a_comparison_is_refused(tmp_path: Path, content: str | None, said: str) -> None:
    file = tmp_path / "compared.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SystemExit, match=said):
        read_comparison(file)


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
def test_the_cores_compute(arithmetic: str) -> None:
    assert operations_per_s(arithmetic, 1) > 1e9


def test_cores_are_busy_as_long_as_asked_for() -> None:
    core = min(os.sched_getaffinity(0))
    before = set(psutil.Process().children())
    with busy([core], 2):
        loops = [child for child in psutil.Process().children() if child not in before]
        assert [loop.cpu_affinity() for loop in loops] == [[core], [core]]
    assert not any(loop.is_running() for loop in loops)


def test_a_cell_says_the_share_of_the_quiet_machine_and_the_ratio_to_the_best_peer() -> None:
    rates = {
        Case("tandem", 8, 0): 200.0,
        Case("tandem", 8, 1): 96.0,
        Case("vllm", 8, 1): 60.0,
        Case("vllm", 8, 0): 150.0,
    }
    peers = frozenset({"vllm", "openvino"})
    assert cell(Case("tandem", 8, 1), rates, peers) == "96, 48%, 1.60 x"
    assert cell(Case("vllm", 8, 1), rates, peers) == "60, 40%"
    assert cell(Case("tandem", 8, 3), rates, peers) == ""
