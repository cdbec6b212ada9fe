"""Row shares: in a step of many tokens, a group of threads computes its rows through all layers without other threads.

Threads that divide columns instead meet ten times in each layer, and all wait when one has lost its core to another
process. But they read each weight only once, which is better in steps of few tokens, where memory is the limit.
A row's result is the same in both, because it does not depend on its batch.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from engine.kernels.cpu.adapters import StepAdapters
from engine.kernels.cpu.arguments import NO_WINDOW, Batch, Range
from engine.kernels.cpu.recurrent.recurrent_arguments import StateSteps
from engine.kernels.cpu.step_facts import RowCosts, cut_at
from engine.models.blocks import has_attention
from engine.models.model_config import ModelConfig

_ROWS_PER_SHARE = 6
"""The fewest rows of a share, divided by the number of shares. Each share reads all weights, so memory takes as many
times as long; arithmetic must take longer (docs/performance-notes.md#threads-by-columns-or-by-rows).
"""
_MANY_ROWS = 64
"""Enough rows for a share with any number of others, which find some of the weights in the cache."""
_MANY_ROWS_WITH_AMX = 256
"""The fewest rows of a share with AMX, whose arithmetic takes so little time."""
_MAX_COST = 1.25
"""The most that a share may cost, as a multiple of the mean. One query with a very long context is better attended to
by all threads.
"""


class RowCut(NamedTuple):
    """The rows of a share, see engine.kernels.cpu.threads.barrier.RowShare."""

    rows: Range
    first_needed: int


def costs_of_rows(config: ModelConfig, operand_bytes: int) -> RowCosts:
    """operand_bytes: of a number that the products multiply. A multiplication of attention takes as long as four of
    single bytes.
    """
    q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    mlp = (3 if config.gated else 2) * config.intermediate_size
    products = config.hidden_size * (2 * q_width + 2 * kv_width + mlp)
    attended = [window if has_attention(config, layer) else 1 for layer, window in enumerate(config.windows)]
    return row_costs(products * operand_bytes / (2 * q_width * 4), attended)


def row_costs(row_context: float, windows: Sequence[int | None] = (None,)) -> RowCosts:
    """row_context: tokens of context to which one query attends in the time of a row's products. windows: of the
    layers.
    """
    counts = Counter(window or NO_WINDOW for window in windows)
    of_token = np.array([*counts.values()]) / (counts.total() * row_context)
    return RowCosts(np.array([*counts], np.int64), of_token)


def max_row_shares(num_rows: int, num_threads: int, *, has_amx: bool) -> int:
    """The largest number of row shares of a step, with an equal number of threads each."""
    fitting = (count for count in range(2, num_threads + 1) if num_threads % count == 0)
    return max((count for count in fitting if num_rows >= count * _min_rows(count, has_amx=has_amx)), default=1)


def _min_rows(num_shares: int, *, has_amx: bool) -> int:
    return _MANY_ROWS_WITH_AMX if has_amx else min(_MANY_ROWS, _ROWS_PER_SHARE * num_shares)


def cut_rows(batch: Batch, count: int, costs: RowCosts) -> list[RowCut]:
    """Cut the rows of a step in `count` shares that take about as long, or in one."""
    cuts, needed = np.zeros(count + 1, np.int64), np.zeros(count, np.int64)
    if cut_at(batch.query_starts, batch.context_lens, costs, cuts, needed) > _MAX_COST:
        return [RowCut(Range(0, len(batch.slots)), 0)]
    return [RowCut(Range(*rows), first) for rows, first in zip(pairwise(cuts.tolist()), needed.tolist(), strict=True)]


def batch_of(batch: Batch, rows: Range) -> Batch:
    """Some rows of a step as a step."""
    starts = batch.query_starts
    first, end = int(np.searchsorted(starts, rows.first, "right")) - 1, int(np.searchsorted(starts, rows.end, "left"))
    return Batch(
        slots=batch.slots[rows.first : rows.end],
        segments=batch.segments[first:end],
        context_lens=batch.context_lens[first:end] - np.maximum(0, starts[first + 1 : end + 1] - np.int32(rows.end)),
        prompt_lens=batch.prompt_lens[first:end],
        query_starts=np.clip(starts[first : end + 1], rows.first, rows.end) - np.int32(rows.first),
        rotations=batch.rotations._replace(rows=batch.rotations.rows[rows.first : rows.end]),
    )


def states_of(steps: StateSteps, rows: Range, of_share: Batch) -> StateSteps:
    """The states of some rows of a step; the last token of a sequence may be in a later share."""
    if not len(steps.tables):
        return steps
    starts = steps.query_starts
    first = int(np.searchsorted(starts, rows.first, "right")) - 1
    end = first + len(of_share.context_lens)
    return StateSteps(
        tables=steps.tables[first:end],
        num_repeated=steps.num_repeated[first:end] * (starts[first + 1 : end + 1] <= rows.end),
        query_starts=of_share.query_starts,
        context_lens=of_share.context_lens,
    )


def adapters_of(adapted: StepAdapters, rows: Range) -> StepAdapters:
    """The adapters of some rows."""
    runs = adapted.runs.copy()
    runs[:, 1:] = np.clip(runs[:, 1:], rows.first, rows.end) - rows.first
    return adapted._replace(
        runs=runs[runs[:, 1] < runs[:, 2]],
        normed=adapted.normed[rows.first : rows.end],
        shrunk=adapted.shrunk[rows.first : rows.end],
    )
