"""Decode steps that several ranks capture and replay together: threads, or processes, gloo, and a stand-in for CUDA
graphs.
"""

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor

from engine.decode_graphs import Captured, Run, StepShape
from engine.model_runner import ModelRunner
from engine.ranks.commands import CaptureSteps, RunGraph, decode_command, encode_command
from engine.settings import NO_GRAPHS, GraphSettings
from mesh.domain.kv import Degrees
from tests.component.ranks.own_memory import ThreadRanks, own_memory_runner
from tests.component.ranks.test_remote_ranks import remote_runner
from tests.component.without_gpu.test_decode_graphs import GRAPHS, Traffic, load, require_same_kv, require_same_steps
from tests.fakes.captured_rank import REPLAYS, stand_ins
from tests.fakes.tape import ReplayDiffers, TapeCapture, TapedSums

LEADER, OTHER = True, False
SMALLEST = StepShape(1, 1)
NOT_CAPTURED = "decode steps not captured"


class BrokenCapture(TapeCapture):
    """Fails at the last step, which is the smallest."""

    def __call__(self, run: Run, rehearse: Run | None = None) -> Captured:
        captured = super().__call__(run, rehearse)
        if len(captured.hidden) == SMALLEST.num_rows:
            raise RuntimeError("operation not permitted when stream is capturing")
        return captured


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> dict[bool, TapeCapture]:
    """The stand-ins of two ranks, by whether the rank is the leader, which is this thread."""
    of_ranks: dict[bool, TapeCapture] = {LEADER: TapeCapture(), OTHER: TapeCapture()}
    main = threading.current_thread()
    for (module, name), stand_in in stand_ins(lambda device: of_ranks[threading.current_thread() is main]).items():
        monkeypatch.setattr(module, name, stand_in)
    return of_ranks


@contextmanager
def two_ranks(model_dir: Path, **changes: Any) -> Iterator[tuple[ModelRunner, ThreadRanks]]:
    """`changes`: settings of the second rank that differ."""
    asked = {"graphs": GRAPHS, "block_size": 4, "num_blocks": 200, "attention": "torch"}
    with own_memory_runner(model_dir, Degrees(2), ThreadRanks(**changes), **asked) as (runner, ranks):
        yield runner, ranks


def test_ranks_replay_the_same_steps(checkpoint: Callable[[str], Path], captures: dict[bool, TapeCapture]) -> None:
    """Their tokens and KV are those of one rank without graphs."""
    plain = load(checkpoint("llama"), None)
    with two_ranks(checkpoint("llama")) as (runner, ranks):
        require_same_steps(plain, runner, Traffic(seed=1), 60)
        kv = torch.cat([runner.kv_cache.tensor, ranks.caches[1].tensor], dim=4)
    require_same_kv(plain.kv_cache.tensor, kv)
    counts = [[graph.num_replays for graph in capture.graphs] for capture in captures.values()]
    assert counts[0] == counts[1]
    assert len(counts[0]) == len(GRAPHS.sizes)
    assert sum(counts[0]) > 30


@pytest.mark.timeout(900)
def test_rank_processes_replay_the_same_steps(
    checkpoint: Callable[[str], Path],
    captures: dict[bool, TapeCapture],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Over gRPC and gloo, with the second rank in a process of its own."""
    replays = tmp_path / "replays"
    monkeypatch.setenv(REPLAYS, str(replays))
    plain = load(checkpoint("llama"), None)
    asked = {"graphs": GRAPHS, "block_size": 4, "num_blocks": 200, "attention": "torch"}
    with remote_runner(checkpoint("llama"), module="tests.fakes.captured_rank", **asked) as (runner, _, _):
        require_same_steps(plain, runner, Traffic(seed=1), 40)
    assert captures[LEADER].num_replays > 20
    assert replays.stat().st_size == captures[LEADER].num_replays


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"graphs": GraphSettings((1, 2, 4), 40)},
            "rank 0 captures 8x1 4x1 .* rank 1 captures 4x1 2x1 ",
        ),
        ({"graphs": GraphSettings(GRAPHS.sizes, 80)}, "up to 40 tokens .* up to 80 tokens"),
        ({"graphs": NO_GRAPHS}, "rank 1 cannot: cuda_graphs is 0"),
    ],
    ids=["other sizes", "other lengths", "none"],
)
def test_ranks_that_would_capture_other_steps_capture_none(
    checkpoint: Callable[[str], Path], captures: dict[bool, TapeCapture], changes: dict[str, Any], reason: str
) -> None:
    with capture_logs() as logs, two_ranks(checkpoint("llama"), **changes) as (runner, _):
        require_same_steps(load(checkpoint("llama"), None), runner, Traffic(seed=1), 5)
    assert not any(capture.graphs for capture in captures.values())
    require_reason(logs, reason)


@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_run_without_graphs_if_one_cannot_capture(
    checkpoint: Callable[[str], Path], captures: dict[bool, TapeCapture], rank: int
) -> None:
    captures[rank == 0] = BrokenCapture()
    with capture_logs() as logs, two_ranks(checkpoint("llama")) as (runner, _):
        require_same_steps(load(checkpoint("llama"), None), runner, Traffic(seed=1), 5)
    assert all(capture.graphs for capture in captures.values())
    assert not any(capture.num_replays for capture in captures.values())
    require_reason(logs, f"rank {rank} cannot capture them: RuntimeError: operation not permitted")


def require_reason(logs: list[Any], reason: str) -> None:
    """Both ranks have logged it."""
    reasons = [entry["reason"] for entry in logs if entry["event"] == NOT_CAPTURED]
    assert len(reasons) == 2
    assert reasons[0] == reasons[1]
    assert re.search(reason, reasons[0]), reasons[0]


class Doubling:
    """A backend that sums two equal parts."""

    def allreduce(self, tensors: list[Tensor]) -> "Doubling":
        tensors[0].mul_(2.0)
        return self

    def wait(self) -> None:
        pass


def test_a_sum_that_is_not_in_the_graph_is_found_out() -> None:
    """One that the host adds up, as gloo does, is done at capture, and in no replay."""
    buffer = torch.ones(4, 6)

    def summed_on_the_host() -> Tensor:
        part = buffer * 3
        part.numpy()[:] *= 2.0
        return part

    def summed() -> Tensor:
        part = buffer * 3
        TapedSums(Doubling()).allreduce([part]).wait()
        return part

    graph, result = TapeCapture()(summed)
    buffer.fill_(2.0)
    graph.replay()
    assert torch.equal(result, torch.full((4, 6), 12.0))
    graph, _ = TapeCapture()(summed_on_the_host)
    with pytest.raises(ReplayDiffers):
        graph.replay()


@pytest.mark.parametrize("command", [CaptureSteps(), RunGraph(5, 3, 7, 4, 2)])
def test_commands(command: CaptureSteps | RunGraph) -> None:
    assert decode_command(encode_command(command)) == command


@pytest.mark.parametrize("command", [RunGraph(2, 3, 7, 4, 2), RunGraph(9, 3, 7, 4, 2)])
def test_impossible_commands(command: RunGraph) -> None:
    """More sequences than tokens; more tokens than the graph has rows."""
    with pytest.raises(ValueError, match="impossible"):
        decode_command(encode_command(command))
