"""HostRows: sampling on CPU by compiled loops, in the threads of the model (engine/kernels/cpu/sampling/draws.py)."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.device_copies import Arrays, Tensors
from engine.kernels.cpu.arguments import Matrix, Range
from engine.kernels.cpu.buffers import round_up
from engine.kernels.cpu.compilation.stored import Kernel, Stored, job, stored
from engine.kernels.cpu.machine import LANES, why_no_loops
from engine.kernels.cpu.sampling.draws import Draws, draw_rows, draw_scratch
from engine.kernels.cpu.sampling.logits import Summaries, Tops, find_tops, summarise
from engine.kernels.cpu.sampling.masked_rows import MaskedRows, copy_rows
from engine.kernels.cpu.threads.barrier import RowShare, Team
from engine.kernels.cpu.threads.mailbox import lead, mailboxes
from engine.kernels.cpu.threads.phases import PHASES
from engine.sampling.row_math import DeviceRows, Drawing, RandomRows, RowMath, Summary
from mesh.domain.request import SamplingParams


class RowThreads(Protocol):
    """Plug point: OneThread, and LoopThreads of the compiled decoder."""

    @property
    def count(self) -> int: ...

    def run(self, kernel: Kernel, arguments: Sequence[Sequence[Stored]]) -> None:
        """Run a kernel in all threads, each with its own three arguments, followed by its team."""
        ...


class OneThread:
    """The caller alone."""

    count = 1

    def __init__(self) -> None:
        none = np.zeros(1, np.int64)
        cycles, share = np.zeros(len(PHASES) + 1, np.int64), RowShare(0, 0, none)
        self._team = stored(Team(0, 1, none, 0, 1, none, cycles, share))
        self._boxes = mailboxes(1)

    def run(self, kernel: Kernel, arguments: Sequence[Sequence[Stored]]) -> None:
        [own] = arguments
        lead(job(kernel, (*own, self._team), Range(0, 0)), self._boxes, np.zeros(0, np.int64))


class HostRows:
    """RowMath of tensors on CPU. The constructor compiles its loops, so that no request waits for that."""

    def __init__(self, threads: RowThreads | None = None) -> None:
        self._threads = threads or OneThread()
        self._scratch: list[Stored] = []
        summarise(np.zeros((1, 1), np.float32))
        row, wanted = torch.zeros(1, 1), RandomRows([0], [SamplingParams(temperature=1.0)], np.zeros(1))
        self.drawing(wanted, 1).tokens(row, {})
        self.top(row, torch.zeros(1, dtype=torch.int64), 1)
        self.copied(row, {})

    def summarise(self, values: Tensor) -> Summary:
        return host_summary(summarise(_with_whole_rows(values).numpy()))

    def argmax(self, values: Tensor) -> Tensor:
        return torch.from_numpy(values.numpy().argmax(1))

    def top(self, values: Tensor, rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
        values, shape = _with_whole_rows(values), (len(rows), count)
        found, columns = np.empty(shape, np.float32), np.empty(shape, np.int64)
        self._run(find_tops, Tops(_matrix(values), values.shape[1], rows.numpy(), found, columns))
        return torch.from_numpy(found), torch.from_numpy(columns)

    def copied(self, values: Tensor, masks: Tensors) -> Tensor:
        values, mask_of = _with_whole_rows(values), np.full(len(values), -1, np.int64)
        copies, bits = torch.empty(values.shape), np.zeros((0, 1), np.uint8)
        if masks:
            bits = masks["mask_bits"].numpy()
            mask_of[masks["masked"].numpy()] = np.arange(len(bits))
        self._run(copy_rows, MaskedRows(_matrix(values), _matrix(copies), values.shape[1], mask_of, bits))
        return copies

    def drawing(self, wanted: RandomRows, vocab_size: int) -> Drawing:
        return _HostDrawing(wanted, vocab_size, self)

    def draw(self, draws: Draws) -> None:
        """Draw the tokens."""
        threads, length = self._threads, round_up(draws.num_columns, LANES)
        if self._scratch and len(self._scratch[0].value.values) != length:
            self._scratch.clear()
        while len(self._scratch) < threads.count:
            self._scratch.append(stored(draw_scratch(draws.num_columns)))
        arguments = stored(draws)
        threads.run(draw_rows, [(arguments, scratch, scratch) for scratch in self._scratch[: threads.count]])

    def _run(self, kernel: Kernel, arguments: Tops | MaskedRows) -> None:
        """Run a kernel that divides the rows among all threads."""
        self._threads.run(kernel, [(stored(arguments),) * 3] * self._threads.count)


class _HostDrawing:
    def __init__(self, wanted: RandomRows, vocab_size: int, rows: HostRows) -> None:
        self._rows = rows
        limits = [
            (p.temperature, p.top_k if p.top_k < vocab_size else 0, p.top_p, p.min_p, p.typical_p, uniform)
            for p, uniform in zip(wanted.params, wanted.uniforms.tolist(), strict=True)
        ]
        self._limits = np.array(limits, np.float64)
        self.arrays: Arrays = {"drawing": np.array(wanted.rows, np.int64)}

    def tokens(self, logits: Tensor, tensors: Tensors) -> Tensor:
        logits, rows = _with_whole_rows(logits), self.arrays["drawing"]
        tokens = np.empty_like(rows)
        self._rows.draw(Draws(_matrix(logits), logits.shape[1], rows, self._limits, tokens))
        return torch.from_numpy(tokens)


def host_summary(summaries: Summaries) -> Summary:
    """Shares the memory of `largest` and `normalisers`."""
    largest, normaliser, highest = map(torch.from_numpy, summaries)
    return Summary(largest, normaliser, highest - normaliser)


def _with_whole_rows(values: Tensor) -> Tensor:
    return values if values.stride(1) == 1 else values.contiguous()


def _matrix(values: Tensor) -> Matrix:
    return Matrix(values.data_ptr(), values.stride(0) * values.element_size())


def rows_for(device: torch.device) -> RowMath:
    return HostRows() if device.type == "cpu" and why_no_loops() is None else DeviceRows()
