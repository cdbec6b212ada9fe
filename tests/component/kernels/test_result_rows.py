"""Rows that nobody reads are left behind the last layer that writes KV, and the numbers of the others stay the same, to
the bit."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.attention.backend import AdapterRows
from engine.batch import ScheduledBatch
from engine.kernels.cpu.arguments import Batch
from engine.models import compiled_decoder
from engine.models.loop_memory import LoopMemory
from engine.models.result_rows import adapters_of_results, batch_of_results
from engine.runner import FinishBatch
from mesh.domain.kv import Span
from mesh.domain.tokens import SampledToken
from tests.component.arms import load_arm
from tests.component.driving import Driver, Run
from tests.component.kernels import test_row_shares
from tests.component.kernels.test_row_shares import batch, runs_of, shares
from tests.component.lora.adapters import four_adapters

__all__ = ["shares"]

Checkpoint = Callable[[str], Path]


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Has the number of result rows of each step that left others behind."""
    numbers: list[int] = []

    def of_results(batch: Batch, rows: Any) -> Batch:
        numbers.append(len(rows))
        return batch_of_results(batch, rows)

    monkeypatch.setattr(compiled_decoder, "batch_of_results", of_results)
    yield numbers
    torch.set_num_threads(1)


def tokens_of(runs: list[Run]) -> list[list[SampledToken]]:
    return [run.tokens for run in runs]


def check(left: list[int], model_dir: Path, *digests: str, **settings: object) -> None:
    torch.set_num_threads(1)
    expected = tokens_of(runs_of(load_arm(model_dir, "compiled", **settings), *digests))
    assert not left, "all rows are read where log-probs of the prompt are asked for"
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        left.clear()
        runner = load_arm(model_dir, "compiled", **settings)
        assert tokens_of(runs_of(runner, *digests, prompt_logprobs=False)) == expected
        assert {1, 2} <= set(left)


@pytest.mark.parametrize(
    "family", [*test_row_shares._FAMILIES, "qwen3-moe", "afmoe", "cohere2-moe", "nemotron-h", "lfm2"]
)
def test_families(checkpoint: Checkpoint, shares: list[int], left: list[int], family: str) -> None:
    check(left, checkpoint(family))


def test_layers_that_read_the_kv_of_earlier_ones(checkpoint: Checkpoint, shares: list[int], left: list[int]) -> None:
    """They are all behind the last layer that writes KV, in groups of their own."""
    check(left, checkpoint("gemma4"), layers_per_group=1)


def test_int8(checkpoint: Checkpoint, shares: list[int], left: list[int]) -> None:
    check(left, checkpoint("mistral"), quantize="int8", kv_dtype="int8")


def test_adapters(checkpoint: Checkpoint, tmp_path: Path, shares: list[int], left: list[int]) -> None:
    adapters = four_adapters(checkpoint("llama"), tmp_path)
    check(left, checkpoint("llama"), adapters[0].digest, "", adapters[1].digest, "", adapters=adapters)


def test_latent_attention_computes_all_rows(checkpoint: Checkpoint, left: list[int]) -> None:
    expected = tokens_of(runs_of(load_arm(checkpoint("deepseek-v2"), "compiled")))
    runner = load_arm(checkpoint("deepseek-v2"), "compiled")
    assert tokens_of(runs_of(runner, prompt_logprobs=False)) == expected
    assert not left


@pytest.mark.parametrize("family", ["llama", "gemma4"])
def test_all_rows_go_on_if_kv_is_not_finite(
    checkpoint: Checkpoint, shares: list[int], left: list[int], monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Then the first and the second half of a layer are two runs of the loop for the same rows."""
    torch.set_num_threads(1)
    expected = tokens_of(runs_of(load_arm(checkpoint(family), "compiled")))
    monkeypatch.setattr(LoopMemory, "is_finite", lambda *_: False)
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        assert tokens_of(runs_of(load_arm(checkpoint(family), "compiled"), prompt_logprobs=False)) == expected
    assert not left
    assert {1, 2, 3} <= set(shares)


def test_cores_that_are_given_back_before_the_last_layers(
    checkpoint: Checkpoint, left: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load_arm(checkpoint("gemma4"), "compiled", layers_per_group=1)
    expected, lent = tokens_of(runs_of(runner, prompt_logprobs=False)), sorted(os.sched_getaffinity(0))[:2]

    class Lending(Driver):
        def begin(self, *work: tuple[Run, int]) -> FinishBatch:
            runner.use_cores(tuple(lent))
            return super().begin(*work)

        def note_layers(self, batch: ScheduledBatch, layers: Span) -> None:
            runner.use_cores(() if layers.first % 2 else tuple(lent))

    monkeypatch.setattr(test_row_shares, "Driver", Lending)
    assert tokens_of(runs_of(runner, prompt_logprobs=False)) == expected
    assert left


def test_each_result_row_is_a_sequence_behind_what_it_sees() -> None:
    """A generated token; a prompt's last token; three of the middle of one."""
    step = batch((1, 30), (60, 60), (39, 139))
    results = batch_of_results(step, np.array([0, 60, 70, 71, 98]))
    assert results.query_starts.tolist() == [0, 1, 2, 3, 4, 5]
    assert results.context_lens.tolist() == [30, 60, 110, 111, 138]
    assert results.prompt_lens.tolist() == [30, 60, 139, 139, 139]
    assert results.segments.tolist() == [[0], [1], [2], [2], [2]]
    assert results.slots.tolist() == [[0], [60], [70], [71], [98]]


def test_adapters_of_result_rows() -> None:
    rows = np.array([0, 60, 99])
    adapters = (AdapterRows(4, 0, 1), AdapterRows(5, 1, 60), AdapterRows(6, 60, 100))
    assert adapters_of_results(adapters, rows) == (AdapterRows(4, 0, 1), AdapterRows(6, 1, 3))
