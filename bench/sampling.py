"""Time of drawing the tokens of a step from its logits, by compiled loops and by torch's operations.

    python -m bench.sampling [--vocabulary 49152 151936] [--rows 1 8 32] [--repeats 7]

Logits are random, with the spread of a language model's. Times are CPU times of one thread, medians, with all that
sampling does between logits and tokens on the host. `engine/sampling/host_rows.py` has the loops, which CPUs with AVX2
use; `engine/sampling/row_math.py` the operations in torch, which GPUs use.
"""

import argparse
import itertools
import statistics
import time

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from engine.sampling.host_rows import HostRows
from engine.sampling.row_math import DeviceRows, Logits, RowMath
from engine.sampling.sampler import Sampler
from engine.sequence import SequenceState
from mesh.domain.request import SamplingParams, SequenceSpec
from mesh.interrupts import run_program
from mesh.process import keep_freed_memory

_GREEDY = SamplingParams()
_KINDS: dict[str, tuple[SamplingParams, int]] = {  # parameters, top_logprobs
    "the most likely": (_GREEDY, 0),
    "20 top_logprobs": (_GREEDY, 20),
    "penalties": (SamplingParams(presence_penalty=0.5, frequency_penalty=0.5), 0),
    "temperature 0.8": (SamplingParams(temperature=0.8), 0),
    "top_p 0.95": (SamplingParams(temperature=0.8, top_p=0.95), 0),
    "top_k 20, top_p 0.8": (SamplingParams(temperature=0.7, top_k=20, top_p=0.8), 0),
    "min_p 0.05": (SamplingParams(temperature=0.8, min_p=0.05), 0),
    "typical_p 0.9": (SamplingParams(temperature=0.8, typical_p=0.9), 0),
}
_SPREAD = 3.0  # standard deviation


def sampling_ms(math: RowMath, logits: Tensor, params: SamplingParams, num_top: int, repeats: int) -> float:
    """Median of the CPU milliseconds of one draw for all rows."""
    sampler = Sampler(rows=math)
    specs = [SequenceSpec(f"r{row}", 0, (1, 2, 3), 3, params, top_logprobs=num_top) for row in range(len(logits))]
    sequences, taken = list(map(SequenceState, specs)), []
    for _ in range(repeats + 1):
        begun_s = time.thread_time()
        drawn = sampler.draw(Logits(logits), sequences)
        drawn.read(drawn.tensors)
        taken.append(time.thread_time() - begun_s)
    return 1000 * statistics.median(taken[1:])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.sampling", description=__doc__.split("\n\n")[0])
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[49152, 151936])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as workers do
    generator = torch.Generator().manual_seed(0)
    table = Table("vocabulary", "rows", "tokens", "loops ms", "torch ms", "ratio", title="a step's draws")
    for size, rows in itertools.product(options.vocabulary, options.rows):
        logits = _SPREAD * torch.randn(rows, size, generator=generator)
        for kind, wanted in _KINDS.items():
            loops, others = (sampling_ms(m, logits, *wanted, options.repeats) for m in (HostRows(), DeviceRows()))
            table.add_row(f"{size:,}", str(rows), kind, f"{loops:.2f}", f"{others:.2f}", f"{others / loops:.1f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    run_program(main)
