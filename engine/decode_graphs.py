"""DecodeGraphs: decode steps as CUDA graphs. A GPU repeats the work of a captured step without the host's launches.

    at start   for each shape of step: run the layers once on buffers that never move, and capture what they launch
    a step     its arrays -> the buffers, by one copy -> replay -> hidden states

A graph repeats shapes, addresses and every number that the host knew at capture. So all that differs between steps is
in the buffers, and tables are read as if sequences were as long as they may become: attention must read the lengths
on the device.

A step is replayed with the smallest captured number of sequences that holds it. If some of them have drafts to verify,
all have rows for as many drafts as there may be. Padding rows write to a spare block that no sequence has; their
results are not read. Steps with prompts or adapters are not captured, nor are logits and sampling. Several ranks
capture and replay together: engine/ranks/graphs.py.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.backend import ForwardMetadata, chunks_of
from engine.device_copies import Staging, part
from engine.step_input import StepInput
from mesh.domain.kv_groups import KVGroups


class Graph(Protocol):
    """Captured work: torch.cuda.CUDAGraph."""

    def replay(self) -> None:
        """Do the work again, on what the buffers hold now."""
        ...


class Captured(NamedTuple):
    """`hidden` is overwritten by each replay."""

    graph: Graph
    hidden: Tensor


Run = Callable[[], Tensor]


class Capture(Protocol):
    """Plug point: CudaCapture."""

    def __call__(self, run: Run, rehearse: Run | None = None) -> Captured:
        """Capture the work of `run`. `rehearse` is called before, outside of the capture: by default it is `run`."""
        ...


Forward = Callable[[Tensor, ForwardMetadata], Tensor]
"""Computes all layers on token ids [num_tokens]: hidden states [num_tokens, hidden_size]."""


class StepShape(NamedTuple):
    """A step of `num_seqs` sequences with up to `num_queries` tokens each."""

    num_seqs: int
    num_queries: int

    @property
    def num_rows(self) -> int:
        return self.num_seqs * self.num_queries


def step_shapes(sizes: Sequence[int], max_drafts: int) -> list[StepShape]:
    """Return the steps to capture for these numbers of sequences, without drafts and with, the largest first."""
    shapes = {StepShape(size, num_queries) for size in sizes for num_queries in (1, 1 + max_drafts)}
    return sorted(shapes, key=lambda shape: (shape.num_rows, shape), reverse=True)


class CudaCapture:
    """Captures on a GPU. All graphs share one pool of memory: no two are replayed at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Run, rehearse: Run | None = None) -> Captured:
        # torch synchronises with the thread's current device, and so would take memory of another worker's.
        with torch.cuda.device(self._stream.device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                (rehearse or run)()  # compiles kernels and allocates workspaces, which a capture must not do
            self._stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            # Other threads may do as they like meanwhile: by default, what allocates there would end the capture.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                hidden = run()
        return Captured(graph, hidden)


class DecodeGraphs:
    """The captured steps of one model. The constructor captures them, for each number of sequences in `sizes`, without
    drafts and with up to `max_drafts` for each.
    """

    def __init__(
        self, forward: Forward, buffers: "DecodeBuffers", sizes: Sequence[int], capture: Capture, max_drafts: int = 0
    ) -> None:
        self._buffers = buffers
        self._sizes = sorted(sizes)
        self._max_queries = 1 + max_drafts
        # The largest first: its memory serves the others.
        with torch.inference_mode():
            self._captured = {
                shape: capture(partial(_forward_on, buffers, shape, forward))
                for shape in step_shapes(sizes, max_drafts)
            }
        self.on_run: Callable[[StepInput, StepShape], None] | None = None
        """Called before each step that `run` replays."""

    def can_run(self, step: StepInput) -> bool:
        is_decode = len(step.token_ids) == len(step.sample_rows)  # no prompt: tokens and their drafts
        fits = len(step.context_lens) <= self._sizes[-1] and _most_queries(step) <= self._max_queries
        return is_decode and fits and not step.adapters and self._buffers.fit(step)

    def run(self, step: StepInput) -> Tensor:
        """Hidden states [num_tokens, hidden_size] of a step that `can_run` accepts, valid until the next call."""
        size = self._sizes[bisect_left(self._sizes, len(step.context_lens))]
        shape = StepShape(size, 1 if _most_queries(step) == 1 else self._max_queries)
        if self.on_run is not None:
            self.on_run(step, shape)
        return self.replay(step, shape)

    def replay(self, step: StepInput, shape: StepShape) -> Tensor:
        """As `run`, with a shape that was captured and that holds the step. Raises KeyError for another shape."""
        self._buffers.fill(step, shape)
        graph, hidden = self._captured[shape]
        graph.replay()
        return hidden[: len(step.token_ids)]


def _forward_on(buffers: "DecodeBuffers", shape: StepShape, forward: Forward) -> Tensor:
    """Metadata are made anew each time: what layers share there is computed in each run."""
    return forward(buffers.token_ids(shape), buffers.metadata(shape))


def _most_queries(step: StepInput) -> int:
    """The most tokens that a sequence of the step computes."""
    return int(np.diff(step.query_starts).max())


_OF_ROWS = ("token_ids", "positions", "rope_lengths", "slot_mapping")
_OF_SEQUENCES = ("context_lens", "prompt_lens")


class DecodeBuffers:
    """The arrays of decode steps of up to the `largest` shape, on the device, at addresses that never change.

    `spare_block` is a block of the model's cache that no sequence gets. Block tables have rows of `max_blocks` for each
    group. Only their columns in use are sent, and then spread on the device; older block ids remain after them.
    """

    def __init__(
        self, largest: StepShape, max_blocks: int, groups: KVGroups, spare_block: int, device: torch.device
    ) -> None:
        self._max_context = max_blocks * groups.block_size
        self._num_groups = groups.count
        num_seqs = largest.num_seqs
        # Begins as padding, of sequences without a token: what is done at capture is in the spare block, too.
        spare_slot = spare_block * groups.block_size
        padding = {"slot_mapping": spare_slot, "rope_lengths": 1, "context_lens": 1, "prompt_lens": 1}
        arrays: dict[str, NDArray[Any]] = {
            name: np.full(largest.num_rows * self._width(name), padding.get(name, 0), np.int64) for name in _OF_ROWS
        }
        arrays |= {name: np.full(num_seqs, padding[name], np.int32) for name in _OF_SEQUENCES}
        arrays["query_starts"] = np.zeros(num_seqs + 1, np.int32)
        arrays["tables"] = np.full(num_seqs * groups.count * max_blocks, spare_block, np.int32)
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
        self._block_tables = self._device["tables"].view(num_seqs, groups.count, max_blocks).clone()

    def _width(self, name: str) -> int:
        """The numbers of a row."""
        return self._num_groups if name == "slot_mapping" else 1

    def fit(self, step: StepInput) -> bool:
        """True if no block table of the step is too long."""
        return step.block_tables.shape[1] <= self._num_groups * self._block_tables.shape[2]

    def fill(self, step: StepInput, shape: StepShape) -> None:
        """Send a step, and padding up to this shape: sequences of one token, or of none where others have drafts."""
        num_tokens, (num_used, width) = len(step.token_ids), step.block_tables.shape
        num_seqs = shape.num_seqs
        self._staging.wait()
        for names, num_filled, end in ((_OF_ROWS, num_tokens, shape.num_rows), (_OF_SEQUENCES, num_used, num_seqs)):
            for name in names:
                each = self._width(name)
                self._host[name][: num_filled * each] = getattr(step, name)
                self._host[name][num_filled * each : end * each] = self._padding[name]
        starts = self._host["query_starts"]
        starts[: num_used + 1] = step.query_starts
        starts[num_used + 1 : num_seqs + 1] = num_tokens
        if shape.num_queries == 1:
            starts[num_used + 1 : num_seqs + 1] += np.arange(1, num_seqs - num_used + 1, dtype=np.int32)
        tables = self._host["tables"][: num_seqs * width].reshape(num_seqs, width)
        tables[:num_used] = step.block_tables
        tables[num_used:] = self._padding["tables"]
        self._staging.send(self._tables_at + tables.nbytes)
        sent = self._device["tables"][: num_seqs * width].view(num_seqs, self._num_groups, -1)
        self._block_tables[:num_seqs, :, : sent.shape[2]] = sent

    def token_ids(self, shape: StepShape) -> Tensor:
        return self._device["token_ids"][: shape.num_rows]

    def metadata(self, shape: StepShape) -> ForwardMetadata:
        """Metadata of a step of this shape, whose sequences are as long as they may become."""
        device, (num_seqs, num_queries), num_rows = self._device, shape, shape.num_rows
        has_drafts = num_queries > 1
        lens = [self._max_context] * num_seqs if has_drafts else []
        return ForwardMetadata(
            positions=device["positions"][:num_rows],
            rope_lengths=device["rope_lengths"][:num_rows],
            slot_mapping=device["slot_mapping"][: num_rows * self._num_groups],
            block_tables=self._block_tables[:num_seqs].flatten(1),
            context_lens=device["context_lens"][:num_seqs],
            prompt_lens=device["prompt_lens"][:num_seqs],
            query_starts=device["query_starts"][: num_seqs + 1],
            num_decodes=0 if has_drafts else num_seqs,
            chunks=chunks_of(range(0, num_rows + 1, num_queries), lens, 0) if has_drafts else (),
            max_decode_context=0 if has_drafts else self._max_context,
            is_captured=True,
            num_groups=self._num_groups,
        )
