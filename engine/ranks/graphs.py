"""RankGraphs: CUDA graphs of decode steps in all ranks of a stage, which sum within every layer.

    rank 0 ─ capture ─▶ others      all write what they would capture, and read what the others would
                                    equal: all sum once for each step, so that they are connected as a step needs it
                                    each captures by itself, writes how that went, and reads how it went elsewhere
    rank 0 ─ replay ─▶ others       the step and the shape of its graph; each fills its buffers and replays

A capture records sums, and a rehearsal leaves them out, so no rank waits for another while it may fail. All ranks read
the same notes, and so decide the same: if the steps of two differ, or one cannot capture them, none of them replays.
Only NCCL's sums can be captured.
"""

from functools import partial
from typing import TYPE_CHECKING

import structlog
import torch

from engine.decode_graphs import Capture, Captured, DecodeGraphs, Run, StepShape
from engine.kv.cache import KVCache
from engine.loading.graphs import capture_for, capture_graphs, graph_shapes, why_not_captured
from engine.ranks.commands import RunGraph
from engine.ranks.shared import read_step
from engine.runner_settings import RunnerSettings

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from engine.models.decoder import Decoder
    from engine.ranks.collectives import CollectiveGroup

log = structlog.get_logger(__name__)

_CAPTURED = "captured"
_MAX_REASON_CHARS = 500


class RankGraphs:
    """The graphs of one rank. `store` is that by which the ranks have met; the cache has a spare block."""

    def __init__(
        self, settings: RunnerSettings, decoder: "Decoder", cache: KVCache, group: "CollectiveGroup", store: "Store"
    ) -> None:
        self._settings = settings
        self._decoder = decoder
        self._cache = cache
        self._group = group
        self._store = store
        self._graphs: DecodeGraphs | None = None

    def capture(self) -> DecodeGraphs | None:
        """Capture decode steps when all ranks do; None in all of them if one does not. Raises WorkerLost."""
        plans = self._exchange("plan", self._plan())
        if reason := _difference(plans):
            log.warning("decode steps not captured", reason=reason)
            return None
        self._sum_each_shape()
        graphs, outcome = self._try_capture()
        outcomes = self._exchange("outcome", outcome)
        if failed := [f"rank {rank} {said}" for rank, said in enumerate(outcomes) if said != _CAPTURED]:
            log.warning("decode steps not captured", reason="; ".join(failed))
            return None
        self._graphs = graphs
        return graphs

    def replay(self, command: RunGraph) -> None:
        """In other ranks than 0: replay a step that rank 0 replays."""
        assert self._graphs is not None, "rank 0 replays only what all ranks have captured"
        step = read_step(self._group.steps.buffers, command)
        self._graphs.replay(step, StepShape(command.graph_seqs, command.graph_queries))

    def _plan(self) -> str:
        """A text of the steps that this rank would capture. Ranks can capture together if their texts are equal."""
        settings, graphs = self._settings, self._settings.graphs
        if reason := why_not_captured(settings, self._decoder):
            return f"cannot: {reason}"
        shapes = " ".join(f"{shape.num_seqs}x{shape.num_queries}" for shape in graph_shapes(settings))
        attention = self._decoder.attention_backend
        kv = f"{self._cache.num_blocks} blocks of {settings.block_size}"
        return f"captures {shapes} up to {graphs.max_tokens} tokens in {settings.dtype}, {attention}, {kv}"

    def _sum_each_shape(self) -> None:
        """NCCL connects ranks at the first sum of a size, which a capture must not wait for."""
        device, dtype = self._cache.tensor.device, getattr(torch, self._settings.dtype)
        for shape in graph_shapes(self._settings):
            self._group.sum(torch.zeros(shape.num_rows, self._decoder.config.hidden_size, dtype=dtype, device=device))
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def _try_capture(self) -> tuple[DecodeGraphs | None, str]:
        try:
            capture = partial(self._capture_alone, capture_for(self._cache.tensor.device))
            return capture_graphs(self._settings, self._decoder, self._cache, capture), _CAPTURED
        except Exception as error:  # whatever it is, the others must know
            log.warning("a rank cannot capture decode steps", exc_info=error)
            return None, f"cannot capture them: {type(error).__name__}: {error}"[:_MAX_REASON_CHARS]

    def _capture_alone(self, capture: Capture, run: Run, rehearse: Run | None = None) -> Captured:
        def run_without_sums() -> torch.Tensor:
            with self._group.without_sums():
                return (rehearse or run)()

        return capture(run, run_without_sums)

    def _exchange(self, topic: str, own: str) -> list[str]:
        """Exchange notes on a topic. Returns those of all ranks, in their order, when all have written theirs."""
        group = self._group
        self._store.set(_note(topic, group.rank), own.encode())  # type: ignore[arg-type]
        return [bytes(self._store.get(_note(topic, rank))).decode() for rank in range(group.degrees.num_ranks)]


def _note(topic: str, rank: int) -> str:
    return f"graphs-{topic}-{rank}"


def _difference(plans: list[str]) -> str | None:
    """Why ranks with these plans cannot capture together, or None."""
    for rank, plan in enumerate(plans):
        if plan.startswith("cannot"):
            return f"rank {rank} {plan}"
        if plan != plans[0]:
            return f"rank 0 {plans[0]}, rank {rank} {plan}"
    return None
