"""A role of a worker: its limits on the engine, and the services over it."""

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass

from engine.loop import EngineLoop, StepResult
from engine.runner import LayerHook
from engine.settings import NO_SPECULATION, Speculation
from engine.sharded_kv_cache import AnyKVCache
from mesh.domain.worker import WorkerRole
from worker.metrics import WorkerMetrics
from worker.ranks.link import RankLink
from worker.runtime import WorkerRuntime


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """A role's limits on its engine. `max_kv_tokens` 0: as memory allows. `max_step_stretch` is SchedulerConfig's.
    Decode steps of the sizes in `graph_sizes` are captured as CUDA graphs.
    """

    max_batch_tokens: int
    max_num_seqs: int
    max_kv_tokens: int = 0
    speculation: Speculation = NO_SPECULATION
    max_step_stretch: float = 0.0
    graph_sizes: tuple[int, ...] = ()


def widest(limits: Sequence[EngineLimits]) -> EngineLimits:
    """The limits of an engine that can serve within each of `limits`: the largest of each. At most one of them has
    speculative decoding."""
    speculations = (limit.speculation for limit in limits if limit.speculation != NO_SPECULATION)
    return EngineLimits(
        max(limit.max_batch_tokens for limit in limits),
        max(limit.max_num_seqs for limit in limits),
        max(limit.max_kv_tokens for limit in limits),
        next(speculations, NO_SPECULATION),
        max(limit.max_step_stretch for limit in limits),
        max((limit.graph_sizes for limit in limits), key=len),
    )


@dataclass(frozen=True, slots=True)
class RoleServices:
    """The services of one role while a worker has it. `names` are full names of gRPC services, for reflection. The
    engine calls `on_step` on the event loop and `on_layers` on its thread. `drained()` waits until no work is left,
    `close()` ends the KV transfers.
    """

    names: tuple[str, ...]
    metrics: WorkerMetrics
    on_step: Callable[[StepResult], None]
    drained: Callable[[], Coroutine[object, object, None]]
    close: Callable[[], Coroutine[object, object, None]]
    on_layers: LayerHook | None = None


OpenServices = Callable[[EngineLoop, AnyKVCache, Sequence[RankLink], WorkerRuntime], RoleServices]
"""Registers a role's services with the server of the runtime, before it starts. They get the engine's thread, its KV,
and the ranks that share no memory with the leader.
"""


@dataclass(frozen=True, slots=True)
class Role:
    """A role that a worker can have, with its limits on the engine."""

    kind: WorkerRole
    limits: EngineLimits
    open: OpenServices
