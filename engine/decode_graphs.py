"""DecodeGraphs: decode steps as CUDA graphs. A GPU repeats the work of a captured step without the host's launches.

    at start   for each number of rows: run the layers once on buffers that never move, and capture what they launch
    a step     its arrays -> the buffers, by one copy -> replay -> hidden states

A graph repeats shapes, addresses and every number that the host knew at capture. So all that differs between steps is
in the buffers, and tables are read as if sequences were as long as they may become: attention must read the lengths
on the device.

A step is replayed with the smallest captured number of rows that holds it. Further rows compute one token each, in a
spare block that no sequence has. Steps with prompts, drafts or adapters are not captured, nor are logits and sampling.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.backend import ForwardMetadata
from engine.device_copies import Staging, part
from engine.model import LayerGroups, Model
from engine.step_input import StepInput


class Graph(Protocol):
    """Captured work: torch.cuda.CUDAGraph."""

    def replay(self) -> None:
        """Do the work again, on what the buffers hold now."""
        ...


class Captured(NamedTuple):
    """`hidden` is overwritten by each replay."""

    graph: Graph
    hidden: Tensor


Capture = Callable[[Callable[[], Tensor]], Captured]
"""Captures the work of a function, which it may run several times. Plug point: CudaCapture."""


class CudaCapture:
    """Captures on a GPU. All graphs share one pool of memory: no two are replayed at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Tensor]) -> Captured:
        # torch synchronises with the thread's current device, and so would take memory of another worker's.
        with torch.cuda.device(self._stream.device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                run()  # compiles kernels and allocates workspaces, which a capture must not do
            self._stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            # Other threads may do as they like meanwhile: by default, what allocates there would end the capture.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                hidden = run()
        return Captured(graph, hidden)


class DecodeGraphs:
    """The captured steps of one model. The constructor captures them, for each number of rows in `sizes`."""

    def __init__(self, model: Model, buffers: "DecodeBuffers", sizes: Sequence[int], capture: Capture) -> None:
        self._model = model
        self._buffers = buffers
        self._sizes = sorted(sizes)
        # The largest first: its memory serves the others.
        with torch.inference_mode():
            self._captured = {rows: capture(partial(self._forward, rows)) for rows in reversed(self._sizes)}

    def can_run(self, step: StepInput) -> bool:
        num_rows = len(step.token_ids)
        is_decode = num_rows == step.num_decodes == len(step.sample_rows)
        return is_decode and num_rows <= self._sizes[-1] and not step.adapters and self._buffers.hold(step)

    def run(self, step: StepInput) -> Tensor:
        """Hidden states [num_tokens, hidden_size] of a step that `can_run` accepts, valid until the next call."""
        num_rows = len(step.token_ids)
        captured_rows = self._sizes[bisect_left(self._sizes, num_rows)]
        self._buffers.fill(step, captured_rows)
        graph, hidden = self._captured[captured_rows]
        graph.replay()
        return hidden[:num_rows]

    def _forward(self, num_rows: int) -> Tensor:
        groups = LayerGroups(self._model.config.num_layers, self._model.config.num_layers)
        return self._model.begin(self._buffers.token_ids(num_rows), self._buffers.metadata(num_rows), groups)()


_WIDE = ("token_ids", "positions", "rope_lengths", "slots")
_NARROW = ("context_lens", "prompt_lens")


class DecodeBuffers:
    """The arrays of decode steps of up to `num_rows` sequences, on the device, at addresses that never change.

    `spare_block` is a block of the model's cache that no sequence gets. Block tables have rows of `max_blocks`. Only
    their columns in use are sent, and then spread on the device; behind them remain older ids of blocks.
    """

    def __init__(self, num_rows: int, max_blocks: int, block_size: int, spare_block: int, device: torch.device) -> None:
        self._max_context = max_blocks * block_size
        # Begins as padding: work that is done before the first step, at capture, is in the spare block, too.
        padding = {"slots": spare_block * block_size, "rope_lengths": 1, "context_lens": 1, "prompt_lens": 1}
        arrays: dict[str, NDArray[Any]] = {name: np.full(num_rows, padding.get(name, 0), np.int64) for name in _WIDE}
        arrays |= {name: np.full(num_rows, padding[name], np.int32) for name in _NARROW}
        arrays["tables"] = np.full(num_rows * max_blocks, spare_block, np.int32)
        self._padding = {name: int(array[0]) for name, array in arrays.items()}
        self._staging = Staging(sum(array.nbytes for array in arrays.values()), device)
        self._host: dict[str, NDArray[Any]] = {}
        self._device: dict[str, Tensor] = {}
        offset = 0
        for name, array in arrays.items():
            self._tables_at = offset
            self._host[name] = self._staging.host[offset : offset + array.nbytes].view(array.dtype)
            self._host[name][:] = array
            self._device[name] = part(self._staging.device, offset, array)
            offset += array.nbytes
        self._staging.send(offset)
        self._block_tables = self._device["tables"].view(num_rows, max_blocks).clone()
        self._query_starts = torch.arange(num_rows + 1, dtype=torch.int32, device=device)

    def hold(self, step: StepInput) -> bool:
        """True if no block table of the step is too long."""
        return step.block_tables.shape[1] <= self._block_tables.shape[1]

    def fill(self, step: StepInput, num_rows: int) -> None:
        """Send a step of single tokens, and padding up to `num_rows` rows."""
        num_used, width = step.block_tables.shape
        self._staging.wait()
        for name in (*_WIDE, *_NARROW):
            self._host[name][:num_used] = getattr(step, name)
            self._host[name][num_used:num_rows] = self._padding[name]
        tables = self._host["tables"][: num_rows * width].reshape(num_rows, width)
        tables[:num_used] = step.block_tables
        tables[num_used:] = self._padding["tables"]
        self._staging.send(self._tables_at + tables.nbytes)
        self._block_tables[:num_rows, :width] = self._device["tables"][: num_rows * width].view(num_rows, width)

    def token_ids(self, num_rows: int) -> Tensor:
        return self._device["token_ids"][:num_rows]

    def metadata(self, num_rows: int) -> ForwardMetadata:
        """Metadata of a step of so many sequences, as long as they may become."""
        device = self._device
        return ForwardMetadata(
            positions=device["positions"][:num_rows],
            rope_lengths=device["rope_lengths"][:num_rows],
            slot_mapping=device["slots"][:num_rows],
            block_tables=self._block_tables[:num_rows],
            context_lens=device["context_lens"][:num_rows],
            prompt_lens=device["prompt_lens"][:num_rows],
            query_starts=self._query_starts[: num_rows + 1],
            num_decodes=num_rows,
            chunks=(),
            max_decode_context=self._max_context,
        )
