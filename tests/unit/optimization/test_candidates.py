"""What is tried: candidates, and those that are pruned, with the reasons."""

import pytest

from engine.models.read_config import load_decoder_config
from mesh.domain.errors import ConfigurationError
from mesh.settings import as_flags
from tandem_cli.capacity.roofline import Precision
from tandem_cli.model_files.model_folders import BUNDLED
from tandem_cli.optimization.candidates import (
    BASE,
    USUAL,
    Candidate,
    Demand,
    Layout,
    Machine,
    combine,
    memory_needed,
    prune,
    require_some,
    usual_layouts,
    why_not_here,
)

HALF = Precision("float16", "float16", "float32")


def test_combinations_begin_with_the_base_and_its_precision_together() -> None:
    candidates = combine(["int8"], ["ngram"], [USUAL, Layout(0, 1)])
    assert [candidate.name for candidate in candidates] == [
        "base, 1 prefill + 1 decode",
        "base, 1 colocated",
        "base, ngram, 1 prefill + 1 decode",
        "base, ngram, 1 colocated",
        "int8, 1 prefill + 1 decode",
        "int8, 1 colocated",
        "int8, ngram, 1 prefill + 1 decode",
        "int8, ngram, 1 colocated",
    ]


def test_settings_are_those_of_up() -> None:
    candidate = Candidate("int4", "draft", Layout(0, 2, 2))
    assert as_flags(**candidate.settings("./small")) == (
        "--quantize=int4",
        "--speculative=draft",
        "--draft-model=./small",
        "--colocated=true",
        "--decode=2",
        "--tensor-parallel=2",
    )
    assert as_flags(**Candidate("awq", "none", USUAL).settings("")) == ("--prefill=1", "--decode=1")
    assert as_flags(**Candidate("bfloat16", "none", USUAL).settings(""))[0] == "--dtype=bfloat16"


def test_ranks_are_tried_between_numa_nodes_only() -> None:
    assert [layout.name for layout in usual_layouts(2, 1)] == ["1 prefill + 1 decode", "1 colocated", "2 colocated"]
    assert "1 colocated x 2 ranks" in [layout.name for layout in usual_layouts(16, 2)]


def test_what_the_device_lacks() -> None:
    cpu, gpu = Machine("cpu", 1e9, 2), Machine("cuda", 1e9, 2)
    assert why_not_here("int8", cpu) is None
    assert "no fp8 arithmetic" in str(why_not_here("fp8", cpu))
    assert "computed on CPUs only" in str(why_not_here("awq", gpu))
    assert why_not_here(BASE, gpu) is None
    eager = Machine("cpu", 1e9, 2, "activation gelu")
    assert why_not_here("gptq", eager) == "int4 needs the compiled decoder: activation gelu"
    assert why_not_here("int8", eager) is None


def test_memory_by_formula() -> None:
    config = load_decoder_config(BUNDLED)
    needed = memory_needed(config, HALF, Demand(8, 300))
    weights = 2_885_888 * 2
    kv = 8 * 300 * 2 * 4 * 2 * 32 * 4
    assert needed(Candidate(BASE, "none", Layout(0, 1))) == weights + kv
    assert needed(Candidate(BASE, "none", Layout(0, 3))) == 3 * weights + kv
    assert needed(Candidate(BASE, "none", USUAL)) == 2 * weights + 2 * kv
    assert needed(Candidate("int8", "none", Layout(0, 1))) < weights + kv


def test_pruning_names_the_reasons() -> None:
    layouts = [USUAL, Layout(0, 1), Layout(0, 4)]
    candidates = combine(["fp8", "gptq"], ["none"], layouts)
    machine = Machine("cpu", 100.0, 2)
    sizes = {1: 50.0, 2: 95.0, 4: 60.0}
    pruned = prune(
        candidates, machine, Demand(8, 300), lambda each: sizes[each.layout.num_workers], {"gptq": "family X"}
    )
    reasons = {candidate.name: reason for candidate, reason in pruned.items()}
    assert "needs 0.0 GB for weights and 8 sequences of 300 tokens" in reasons["base, 1 prefill + 1 decode"]
    assert reasons["base, 4 colocated"] == "4 workers on 2 cores"
    assert reasons["gptq, 1 colocated"] == "family X"
    assert "fp8" in reasons["fp8, 1 colocated"]
    assert [each.name for each in require_some(candidates, pruned)] == ["base, 1 colocated"]


def test_nothing_fits() -> None:
    candidates = combine(["int8"], ["none"], [USUAL])
    pruned = prune(candidates, Machine("cpu", 10e9, 2), Demand(8, 300), lambda each: 20e9, {})
    with pytest.raises(ConfigurationError, match=r"base, 1 prefill \+ 1 decode: needs 20.0 GB .*; 9.0 GB are free"):
        require_some(candidates, pruned)
