"""Which CPU cores each worker gets. Pure: knows no processes.

Prefill would slow decode steps down if they shared a core, so every worker gets its own as long as there are enough.
The router is not pinned: it needs little.
"""

from collections.abc import Sequence
from dataclasses import dataclass

Cores = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CorePlan:
    """Cores of each prefill and decode worker, by number. A worker runs as many threads as it has cores."""

    prefill: tuple[Cores, ...]
    decode: tuple[Cores, ...]


def assign_cores(
    available: Sequence[int], *, num_prefill: int, num_decode: int, max_per_worker: int | None = None
) -> CorePlan:
    """Share `available` out, prefill workers first.

    With enough cores each worker gets a run of neighbours; what does not divide evenly goes to prefill, which is bound
    by compute (decode is bound by memory). With fewer cores than workers, workers take turns and share.
    """
    num_workers = num_prefill + num_decode
    if len(available) < num_workers:
        shares: list[Cores] = [(available[worker % len(available)],) for worker in range(num_workers)]
    else:
        shares = _split(available, num_workers)
    capped = tuple(share[:max_per_worker] for share in shares)
    return CorePlan(capped[:num_prefill], capped[num_prefill:])


def _split(available: Sequence[int], num_shares: int) -> list[Cores]:
    """Neighbouring runs whose sizes differ by at most one, larger ones first."""
    size, num_larger = divmod(len(available), num_shares)
    shares: list[Cores] = []
    start = 0
    for share in range(num_shares):
        end = start + size + (share < num_larger)
        shares.append(tuple(available[start:end]))
        start = end
    return shares
