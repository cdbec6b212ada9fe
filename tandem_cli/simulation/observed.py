"""The observations of a simulation: every request, gaps between tokens, load over time. No router, no clock."""

from collections import Counter
from dataclasses import dataclass, field

from mesh.domain.worker import WorkerRole
from tandem_cli.load_test.figures import Record


@dataclass(frozen=True, slots=True)
class RoleSample:
    """Workers of one role at one moment. `kv` and `slots` are workers' worth of KV and of slots in use or waited for;
    `busy_s` and `prompt_tokens` are totals of all workers that there have been. `pending_tokens` wait at workers,
    `waiting_tokens` in the router for this role."""

    num_workers: int
    kv: float
    slots: float
    busy_s: float
    prompt_tokens: int
    pending_tokens: int
    waiting_tokens: float


@dataclass(frozen=True, slots=True)
class Sample:
    """The mesh at one moment, in seconds since the first arrival."""

    at_s: float
    num_queued: int
    roles: dict[WorkerRole, RoleSample]


@dataclass(slots=True)
class Observed:
    """Observations of one simulation. Times are in seconds since the first arrival. Records have the times of their
    first and last tokens only; `gaps` counts gaps between tokens by their length in seconds. `paid_worker_s` are the
    seconds of all workers of a role."""

    records: list[Record] = field(default_factory=list)
    gaps: Counter[float] = field(default_factory=Counter)
    samples: list[Sample] = field(default_factory=list)
    paid_worker_s: dict[WorkerRole, float] = field(default_factory=lambda: dict.fromkeys(WorkerRole, 0.0))
    duration_s: float = 0.0
    num_replays: int = 0
    num_switches: int = 0
