"""Threads that compute some rows of a step alone give the very same numbers as threads that share out columns."""

import math
import os
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.batch import ScheduledBatch
from engine.kernels.cpu.arguments import NO_ROTATIONS, Batch
from engine.model_runner import ModelRunner
from engine.models import compiled_decoder, row_shares
from engine.models.row_shares import RowCut, batch_of, cut_rows, max_row_shares, row_costs
from engine.runner import FinishBatch
from mesh.domain.kv import Span
from tests.component.arms import load_arm
from tests.component.driving import Driver, Run
from tests.component.lora.adapters import four_adapters
from tests.component.ranks.test_ranks import require_equal
from tests.fakes.requests import make_request

Checkpoint = Callable[[str], Path]
LENGTHS = (30, 20, 70, 45)
NUM_NEW = 6


@pytest.fixture
def shares(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Shares of a few rows are allowed, of rows at any cost. Has the number of shares of each step."""
    monkeypatch.setattr(row_shares, "_MANY_ROWS", 3)
    monkeypatch.setattr(row_shares, "_MANY_ROWS_WITH_AMX", 3)
    monkeypatch.setattr(row_shares, "_MAX_COST", 10)
    numbers: list[int] = []

    def cut(*arguments: Any) -> list[RowCut]:
        cuts = cut_rows(*arguments)
        numbers.append(len(cuts))
        return cuts

    monkeypatch.setattr(compiled_decoder, "cut_rows", cut)
    yield numbers
    torch.set_num_threads(1)


def runs_of(runner: ModelRunner, *digests: str, prompt_logprobs: bool = True) -> list[Run]:
    """Prompts that begin in different steps, so that most steps have generated tokens and several chunks."""
    driver, drawn = Driver(runner), random.Random(5)
    digests = digests or ("",) * len(LENGTHS)
    runs = [
        driver.add(
            make_request(
                f"r{number}",
                [drawn.randrange(256) for _ in range(length)],
                max_new_tokens=NUM_NEW,
                prompt_logprobs=prompt_logprobs,
                adapter=digest,
            )
        )
        for number, (length, digest) in enumerate(zip(LENGTHS, digests, strict=True))
    ]
    driver.step((runs[0], 30))
    driver.step((runs[0], 1), (runs[1], 20), (runs[2], 13))
    driver.step((runs[0], 1), (runs[1], 1), (runs[2], 40), (runs[3], 21))
    driver.finish(*runs, chunk=24)
    for run in runs:
        runner.forget(run.sequence)
    return runs


def check_threads(shares: list[int], model_dir: Path, *digests: str, **settings: object) -> None:
    torch.set_num_threads(1)
    expected = runs_of(load_arm(model_dir, "compiled", **settings), *digests)
    for num_threads in (2, 3, 4):
        torch.set_num_threads(num_threads)
        shares.clear()
        require_equal(runs_of(load_arm(model_dir, "compiled", **settings), *digests), expected)
        assert set(shares) >= {1, num_threads}


_OTHER_FAMILIES = ["phi3-longrope", "olmo3", "ministral3", "qwen3.5", "falcon-h1", "gemma4", "jamba-dense"]
_FAMILIES = ["llama", "gemma2", "gpt-neox", "gpt2", "bloom", "qwen3", *_OTHER_FAMILIES]


@pytest.mark.parametrize("family", _FAMILIES)
def test_families(checkpoint: Checkpoint, shares: list[int], family: str) -> None:
    check_threads(shares, checkpoint(family))


def test_no_share_sees_what_blocks_held_before(checkpoint: Checkpoint, shares: list[int]) -> None:
    """A recurrent state may be NaN as KV. The rest of a block is filled by a later share."""
    torch.set_num_threads(2)
    runner = load_arm(checkpoint("falcon-h1"), "compiled")
    expected = runs_of(runner)
    runner.kv_cache.tensor.fill_(math.nan)
    require_equal(runs_of(runner), expected)
    assert 2 in shares


@pytest.mark.parametrize(
    "types", [{"quantize": "int8", "kv_dtype": "int8"}, {"quantize": "int4"}, {"dtype": "bfloat16"}]
)
def test_types_of_numbers(checkpoint: Checkpoint, shares: list[int], types: dict[str, object]) -> None:
    check_threads(shares, checkpoint("mistral"), **types)


def test_adapters(checkpoint: Checkpoint, tmp_path: Path, shares: list[int]) -> None:
    adapters = four_adapters(checkpoint("llama"), tmp_path)
    digests = (adapters[0].digest, "", adapters[1].digest, adapters[0].digest)
    check_threads(shares, checkpoint("llama"), *digests, adapters=adapters)


def test_cores_that_are_given_back_between_layers(
    checkpoint: Checkpoint, shares: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of the step is shared out among the threads that are left."""
    runner = load_arm(checkpoint("llama"), "compiled")
    expected, lent = runs_of(runner), sorted(os.sched_getaffinity(0))[:2]

    class Lending(Driver):
        def begin(self, *work: tuple[Run, int]) -> FinishBatch:
            runner.use_cores(tuple(lent))
            return super().begin(*work)

        def note_layers(self, batch: ScheduledBatch, layers: Span) -> None:
            runner.use_cores(())

    monkeypatch.setattr(f"{__name__}.Driver", Lending)
    shares.clear()
    require_equal(runs_of(runner), expected)
    assert set(shares) == {1, 1 + len(lent)}


def batch(*sequences: tuple[int, int]) -> Batch:
    """A step of sequences with so many rows, the last of so many tokens of context."""
    rows, contexts = np.array(sequences, np.int32).T
    starts = np.array([0, *np.cumsum(rows)], np.int32)
    segments = np.arange(len(rows), dtype=np.int64).reshape(-1, 1)
    return Batch(np.arange(starts[-1])[:, None], segments, contexts, contexts, starts, NO_ROTATIONS)


def bounds(
    step: Batch, count: int, row_context: float = 1000.0, windows: Sequence[int | None] = (None,)
) -> list[tuple[int, int, int]]:
    return [(*cut.rows, cut.first_needed) for cut in cut_rows(step, count, row_costs(row_context, windows))]


def test_rows_of_a_prompt_cost_more_the_later_they_are() -> None:
    assert bounds(batch((100, 100)), 2, math.inf) == [(0, 50, 0), (50, 100, 0)]
    assert bounds(batch((100, 100)), 2, 10.0) == [(0, 69, 0), (69, 100, 0)]
    assert bounds(batch((100, 10_000)), 2, 10.0) == [(0, 51, 0), (51, 100, 0)]


def test_rows_cost_no_more_than_windows_let_them_see() -> None:
    prompt, query = batch((2000, 2000)), batch((1, 1_000_000), (255, 255))
    firsts = [bounds(prompt, 2, 1000.0, windows)[1][0] for windows in ([None], [1000, None], [1000], [1])]
    assert firsts == sorted(firsts, reverse=True)
    assert firsts[-1] == 1001
    assert len(bounds(query, 2, 1000.0, [None, 500])) == 1
    assert len(bounds(query, 2, 1000.0, [600, 500])) == 2, "the one with a long context sees little of it"


def test_a_share_needs_those_with_earlier_rows_of_its_first_sequence() -> None:
    cuts = bounds(batch((1, 30), (1, 30), (238, 238), (40, 40), (120, 120)), 8, math.inf)
    assert [first for first, _, _ in cuts] == [0, 50, 100, 150, 200, 250, 300, 350]
    assert [needed for _, _, needed in cuts] == [0, 0, 0, 0, 0, 4, 5, 5]
    assert bounds(batch((60, 60), (60, 60)), 2, math.inf)[1] == (60, 120, 1), "the sequence begins with the share"


def test_a_query_that_takes_longer_than_a_share_is_left_to_all_threads() -> None:
    assert bounds(batch((1, 1_000_000), (255, 255)), 2) == [(0, 256, 0)]
    assert len(bounds(batch((1, 100_000), (255, 255)), 2)) == 2
    assert bounds(batch(*[(1, 1_000_000)] * 7), 8) == [(0, 7, 0)], "no share is empty"


def test_rows_of_a_share_are_a_step() -> None:
    step = batch((1, 30), (60, 60), (39, 139))
    first, last = (batch_of(step, cut.rows) for cut in cut_rows(step, 2, row_costs(math.inf)))
    assert (first.query_starts.tolist(), first.context_lens.tolist()) == ([0, 1, 50], [30, 49])
    assert (last.query_starts.tolist(), last.context_lens.tolist()) == ([0, 11, 50], [60, 139])
    assert (first.segments.tolist(), last.segments.tolist()) == ([[0], [1]], [[1], [2]])
    joined = np.concatenate([first.slots, last.slots])
    assert (joined == step.slots).all()


def test_shares_have_as_many_threads_and_enough_rows() -> None:
    threads = {rows: max_row_shares(rows, 8, has_amx=False) for rows in (1, 23, 24, 95, 96, 383, 384, 4096)}
    assert threads == {1: 1, 23: 1, 24: 2, 95: 2, 96: 4, 383: 4, 384: 8, 4096: 8}
    assert [max_row_shares(rows, 32, has_amx=False) for rows in (1023, 1024, 2047, 2048)] == [8, 16, 16, 32]
    assert [max_row_shares(512, count, has_amx=True) for count in (1, 2, 3, 4)] == [1, 2, 1, 2]
    assert all(a <= b for a, b in pairwise(threads.values()))
