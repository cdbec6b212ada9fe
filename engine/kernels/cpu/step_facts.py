"""Facts of a step that the caller needs before its threads begin. Each function goes over the sequences once: in numpy
each operation would take as long as tens of them.
"""

from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.kernels.cpu.arguments import Batch, Int32s, Int64s
from engine.kernels.cpu.compilation.compiler import entry, jit
from engine.kernels.cpu.machine import SPLIT


class RowCosts(NamedTuple):
    """The cost of a row's attention: of each token that it sees, in each kind of layers. All else of a row costs 1."""

    windows: Int64s  # [kinds]: most tokens that a row sees
    of_token: NDArray[np.float64]  # [kinds]


class StepFacts(NamedTuple):
    has_prompt: bool  # a token of the step is one of a prompt
    num_split: int  # results per head of generated tokens whose contexts are attended to in parts


def facts_of(batch: Batch) -> StepFacts:
    return StepFacts(*_facts_of(batch.query_starts, batch.context_lens, batch.prompt_lens))


@partial(entry, nogil=False)
def _facts_of(query_starts: Int32s, context_lens: Int32s, prompt_lens: Int32s) -> tuple[bool, int]:
    has_prompt, num_split = False, 0
    for seq in range(len(context_lens)):
        context, num_tokens = context_lens[seq], query_starts[seq + 1] - query_starts[seq]
        has_prompt |= prompt_lens[seq] > context - num_tokens
        num_parts = (context + SPLIT - 1) // SPLIT
        if num_parts > 1:
            num_split += num_parts * min(num_tokens, max(0, context - prompt_lens[seq]))
    return has_prompt, num_split


@partial(entry, nogil=False)
def cut_at(query_starts: Int32s, context_lens: Int32s, costs: RowCosts, cuts: Int64s, needed: Int64s) -> float:
    """Cut the rows of a step in shares [cuts[i], cuts[i + 1]) of about the same cost. The first sequence of share i
    begins in share needed[i]. Returns the cost of the dearest share, divided by the mean; infinity if a share is empty.
    """
    total, count = 0.0, len(needed)
    for seq in range(len(context_lens)):
        for position in range(context_lens[seq] - query_starts[seq + 1] + query_starts[seq], context_lens[seq]):
            total += _cost_of(position, costs)
    share, done, begun, dearest = 0, 0.0, 0.0, 0.0
    for seq in range(len(context_lens)):
        first = context_lens[seq] - query_starts[seq + 1]
        for row in range(query_starts[seq], query_starts[seq + 1]):
            if cuts[share] == row:
                needed[share] = share
                while cuts[needed[share]] > query_starts[seq]:
                    needed[share] -= 1
            done += _cost_of(first + row, costs)
            if share < count - 1 and done >= total * (share + 1) / count:
                share += 1
                cuts[share], dearest, begun = row + 1, max(dearest, done - begun), done
    cuts[count] = query_starts[-1]
    is_empty = share < count - 1 or cuts[share] == cuts[count]
    return np.inf if is_empty else max(dearest, total - begun) * count / total


@jit
def _cost_of(position: int, costs: RowCosts) -> float:
    cost = 1.0
    for kind in range(len(costs.windows)):
        cost += min(position, costs.windows[kind]) * costs.of_token[kind]
    return cost
