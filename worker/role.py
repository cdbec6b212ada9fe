"""A role of a worker: its limits on the engine, and the services over it."""

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass

from engine.engine import StepResult
from engine.kv.sharded_cache import AnyKVCache
from engine.loop import EngineLoop
from engine.runner import LayerHook
from mesh.domain.worker import WorkerRole
from worker.metrics import WorkerMetrics
from worker.ranks.connection import RankConnection
from worker.role_server import RoleServer
from worker.runner_settings import EngineLimits


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


OpenServices = Callable[[EngineLoop, AnyKVCache, Sequence[RankConnection], RoleServer], RoleServices]
"""Registers a role's services with the role's server, before it starts. They get the engine's thread, its KV,
and the ranks that share no memory with the leader.
"""


@dataclass(frozen=True, slots=True)
class Role:
    """A role that a worker can have, with its limits on the engine."""

    kind: WorkerRole
    limits: EngineLimits
    open: OpenServices
