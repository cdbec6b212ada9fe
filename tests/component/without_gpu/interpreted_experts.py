"""Kernels of experts in Triton's interpreter, on CPU; run by test_triton_attention.py in a process of its own."""

import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.runtime.errors import InterpreterError

from engine.attention import triton_paged
from engine.loading import graphs
from engine.loading.load_runner import load_model_runner
from engine.models import expert_kernels, expert_products
from engine.models.expert_products import ExpertProducts, ListedChoices
from engine.settings import GraphSettings
from mesh.domain.kv import Degrees, Span
from tests.component import arms
from tests.component.lora.adapters import read_adapters, run_together, write_adapter
from tests.component.parity import check_parity
from tests.component.ranks.own_memory import ThreadRanks, own_memory_runner
from tests.component.without_gpu.expert_cases import (
    ExpertCase,
    parts_of_ranks,
    random_experts,
    random_rows,
    require_near,
)
from tests.component.without_gpu.mistakes import changed
from tests.component.without_gpu.test_decode_graphs import Traffic, load, require_same_kv, require_same_steps
from tests.fakes.captured_rank import stand_ins
from tests.fakes.tape import NotCapturable, TapeCapture, TapedKernels

CPU = torch.device("cpu")
FORCED = {"attention": "triton", "num_blocks": 160}
GRAPHS = GraphSettings((1, 4), 40, max_drafts=2)
FAMILIES = ("mixtral", "qwen2-moe", "qwen3-moe", "deepseek", "gpt-oss")


@st.composite
def cases(draw: st.DrawFn) -> ExpertCase:
    num_experts = draw(st.integers(1, 9))
    first = draw(st.integers(0, num_experts - 1))
    held = Span(first, draw(st.integers(1, num_experts - first)))
    return ExpertCase(
        num_rows=draw(st.one_of(st.integers(1, 40), st.sampled_from([16, 17, 256, 257]))),
        num_experts=num_experts,
        top_k=draw(st.integers(1, min(num_experts, 4))),
        hidden=draw(st.sampled_from([16, 40, 64, 72, 130])),
        inner=draw(st.sampled_from([16, 24, 70, 128])),
        held=draw(st.sampled_from([None, held])),
        dtype=draw(st.sampled_from([torch.float32, torch.float16])),
    )


@settings(max_examples=15, derandomize=True)
@given(cases())
def test_any_step(case: ExpertCase) -> None:
    require_near(case, CPU)


@pytest.mark.soak
@settings(max_examples=400, derandomize=True)
@given(cases())
def test_any_of_many_steps(case: ExpertCase) -> None:
    require_near(case, CPU)


MISTAKES = {
    "experts of another rank": ("== first_expert + expert)", "== expert)"),
    "choices numbered from where they are read": ("+ at, choice, mask", "+ at, choice - first, mask"),
    "the first tile only": ("range(0, count, ROWS)", "range(0, tl.minimum(count, ROWS), ROWS)"),
    "an expert with the matrix of another": ("tl.load(offsets + expert)", "tl.load(offsets + expert // 2)"),
    "the second product with rows of the first": ("choice // CHOICES_PER_ROW", "choice // 4"),
    "shares added": ("total *= ", "total += "),
    "the last inputs left out": ("range(0, DEPTH, STEP)", "range(0, DEPTH - STEP + 1, STEP)"),
    "the last outputs left out": ("column < WIDTH", "column < WIDTH // 16 * 16"),
}


@pytest.mark.parametrize("mistake", ["", *MISTAKES])
def test_a_mistake_in_a_kernel_would_be_found_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mistake: str
) -> None:
    kernels = changed(expert_kernels, tmp_path, *([MISTAKES[mistake]] if mistake else []))
    monkeypatch.setattr(expert_products, "import_module", lambda name: kernels)
    case = ExpertCase(num_rows=300, top_k=4, held=Span(1, 4))
    if not mistake:
        require_near(case, CPU)
        return
    with pytest.raises((AssertionError, InterpreterError), match=r"differs|invalid value"):
        require_near(case, CPU)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_parts_of_ranks_add_up(num_ranks: int) -> None:
    case = ExpertCase(num_rows=21, num_experts=8, top_k=3)
    alone = random_experts(case, CPU)(random_rows(case, CPU))
    torch.testing.assert_close(parts_of_ranks(case, CPU, num_ranks), alone, atol=1e-5, rtol=1e-5)


def test_experts_that_no_row_chooses_are_not_read() -> None:
    """Theirs are NaN here."""
    case = ExpertCase(num_rows=1, num_experts=5, top_k=2)
    experts, x = random_experts(case, CPU), random_rows(case, CPU)
    wanted, chosen = experts(x), experts.router(x)[0].flatten().tolist()
    assert experts._on_device is not None
    for matrices in (experts._on_device._ups, experts._on_device._downs):
        for expert, weight in enumerate(matrices._weights):
            if expert not in chosen:
                weight.fill_(torch.nan)
    assert torch.equal(experts(x), wanted)


def test_matrices_that_are_not_aligned_are_copied() -> None:
    weight = torch.randn(3, 65)[:, 1:]
    assert weight.data_ptr() % 64
    [kept] = expert_products.ExpertMatrices([expert_products.LinearParameters(weight)])._weights
    assert torch.equal(kept, weight)
    assert kept.is_contiguous()
    assert kept.data_ptr() % 64 == 0


@pytest.mark.parametrize("family", ["qwen2-moe", *(pytest.param(name, marks=pytest.mark.soak) for name in FAMILIES)])
def test_models_say_what_transformers_says(checkpoint: Callable[[str], Path], family: str) -> None:
    runner = load_model_runner(arms.settings(checkpoint(family), **FORCED))
    assert runner.model.why_experts_on_host is None  # type: ignore[attr-defined]
    check_parity(checkpoint(family), runner)


@pytest.mark.parametrize("family", ["mixtral", "qwen2-moe"])
def test_captured_steps_are_those_of_the_host(checkpoint: Callable[[str], Path], family: str) -> None:
    """Of experts that the host selects, with torch's attention; of single tokens and of drafts."""
    require_captured(checkpoint(family), num_steps=8)


@pytest.mark.soak
@pytest.mark.parametrize("family", FAMILIES)
def test_many_captured_steps_are_those_of_the_host(checkpoint: Callable[[str], Path], family: str) -> None:
    capture = require_captured(checkpoint(family), num_steps=40)
    assert all(graph.num_replays for graph in capture.graphs)


def require_captured(model_dir: Path, num_steps: int) -> TapeCapture:
    capture = TapeCapture()
    plain, graphed = load(model_dir, None, GRAPHS), load(model_dir, capture, GRAPHS, attention="triton")
    require_same_steps(plain, graphed, Traffic(1, 0.2, 2, plain.kv_cache.layout.groups.count), num_steps)
    require_same_kv(plain.kv_cache.tensor, graphed.kv_cache.tensor)
    assert capture.num_replays > num_steps / 3
    return capture


def test_a_read_by_the_host_would_be_found_out(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    list_choices = ExpertProducts.list_choices

    def unless_nobody_chose(self: ExpertProducts, chosen: torch.Tensor, experts: Span) -> ListedChoices:
        listed = list_choices(self, chosen, experts)
        assert sum(listed.counts.tolist()) > 0
        return listed

    monkeypatch.setattr(ExpertProducts, "list_choices", unless_nobody_chose)
    with pytest.raises(NotCapturable):
        load(checkpoint("mixtral"), TapeCapture(), GRAPHS, attention="triton")


def test_choices_of_another_step_would_be_found_out(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the capture, which a graph would repeat."""
    list_choices, listed = ExpertProducts.list_choices, {}

    def once(self: ExpertProducts, chosen: torch.Tensor, experts: Span) -> ListedChoices:
        if len(chosen) not in listed:
            listed[len(chosen)] = list_choices(self, chosen, experts)
        return listed[len(chosen)]

    monkeypatch.setattr(ExpertProducts, "list_choices", once)
    model_dir, graphs = checkpoint("mixtral"), GraphSettings((4,), 40)
    plain, graphed = load(model_dir, None, graphs), load(model_dir, TapeCapture(), graphs, attention="triton")
    with pytest.raises(AssertionError):
        require_same_steps(plain, graphed, Traffic(1, drafted=0.0), 8)


def test_rows_with_adapters_are_left_to_the_host(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    model_dir = checkpoint("mixtral")
    adapters = read_adapters(write_adapter(model_dir, tmp_path / "experts", targets="experts", seed=3))
    digests, said = {0: "", 1: adapters[0].digest}, []
    for attention in ("triton", "torch"):
        wanted = arms.settings(model_dir, adapters=adapters, **FORCED | {"attention": attention, "enforce_eager": True})
        said.append([run.token_ids for run in run_together(load_model_runner(wanted), digests)])
    assert said[0] == said[1]


class InTurn:
    """Kernels that several threads launch: the interpreter has one state for all."""

    def __init__(self, kernels: Any, lock: threading.Lock) -> None:
        self._kernels = kernels
        self._lock = lock

    def __getattr__(self, name: str) -> "InTurn":
        return InTurn(getattr(self._kernels, name), self._lock)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **constants: Any) -> None:
            with self._lock:
                self._kernels[grid](*arguments, **constants)

        return launch


def test_ranks_replay_the_same_steps(checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has half of the experts, and computes no others."""
    main, lock = threading.current_thread(), threading.Lock()
    captures = {True: TapeCapture(), False: TapeCapture()}
    for (module, name), stand_in in stand_ins(lambda device: captures[threading.current_thread() is main]).items():
        monkeypatch.setattr(module, name, stand_in)
    monkeypatch.setattr(graphs, "_CAPTURED_ATTENTION", ("triton",))
    for module in (triton_paged, expert_products):
        monkeypatch.setattr(module, "import_module", lambda name: TapedKernels(InTurn(import_module(name), lock)))
    plain = load(checkpoint("mixtral"), None)
    asked = {"graphs": GraphSettings((1, 4), 40), "block_size": 4, "num_blocks": 200, "attention": "triton"}
    with own_memory_runner(checkpoint("mixtral"), Degrees(2), ThreadRanks(), **asked) as (runner, ranks):
        require_same_steps(plain, runner, Traffic(seed=1), 8)
        kv = torch.cat([runner.kv_cache.tensor, ranks.caches[1].tensor], dim=4)
    require_same_kv(plain.kv_cache.tensor, kv)
    counts = [[graph.num_replays for graph in capture.graphs] for capture in captures.values()]
    assert counts[0] == counts[1]
    assert sum(counts[0]) > 2
