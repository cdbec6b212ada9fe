"""The parts of one model's router that operators see, in metrics and through the Mesh service."""

from typing import Protocol

from router.admission.in_flight import InFlightTable
from router.admission.limiter import ConcurrencyLimiter
from router.admission.queue import PlacementQueue
from router.workers.mesh_view import MeshView


class OperatedModel(Protocol):
    """A model as RouterMetrics and MeshServicer read it. Implementation: ModelRouter."""

    limiter: ConcurrencyLimiter
    queue: PlacementQueue
    in_flight: InFlightTable
    mesh: MeshView
