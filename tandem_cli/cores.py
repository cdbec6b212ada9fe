"""Assigns CPU cores to services. Pure: knows no processes.

Prefill slows down decode steps that share its core. Every worker therefore gets its own cores while there are enough,
and lends them to its partner while it is idle (engine/cores.py). The router needs little CPU time, but it needs that
during decode steps: if there are more cores than workers, the router does not use the cores of decode workers.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from mesh.domain.host import Cores

# With at least this many cores, a mesh without prefill workers leaves one core to the router.
_MANY_CORES = 4


@dataclass(frozen=True, slots=True)
class CorePlan:
    """The cores of each prefill and decode worker, by worker number, and of the router. No cores means all cores.

    A worker runs as many threads as it has cores.
    """

    prefill: tuple[Cores, ...]
    decode: tuple[Cores, ...]
    router: Cores = ()
    other_models: Cores = ()
    """Cores of workers that serve other models."""

    @property
    def is_exclusive(self) -> bool:
        """No two workers share a core."""
        shares = [core for share in (*self.prefill, *self.decode, self.other_models) for core in share]
        return len(shares) == len(set(shares))

    def split(self, counts: Sequence[tuple[int, int]]) -> list["CorePlan"]:
        """One plan per model. `counts` has the numbers of prefill and decode workers per model, which add up to all
        workers.
        """
        plans: list[CorePlan] = []
        first_prefill = first_decode = 0
        for num_prefill, num_decode in counts:
            prefill = self.prefill[first_prefill : first_prefill + num_prefill]
            decode = self.decode[first_decode : first_decode + num_decode]
            remaining = Counter(core for share in (*self.prefill, *self.decode) for core in share)
            remaining.subtract(core for share in (*prefill, *decode) for core in share)
            plans.append(CorePlan(prefill, decode, self.router, other_models=tuple(sorted(+remaining))))
            first_prefill, first_decode = first_prefill + num_prefill, first_decode + num_decode
        return plans

    def lent_to(self, role: str, number: int) -> Cores:
        """Cores that the worker may borrow: those of its partner, the worker of the other role with the same number."""
        partners = self.decode if role == "prefill" else self.prefill
        return partners[number] if self.is_exclusive and number < len(partners) else ()

    def describe(self, model: str = "") -> str:
        """The assignment and its reason, as one line."""
        workers = [
            f"{role}-{number} on {format_cores(share)}"
            for role, shares in (("prefill", self.prefill), ("decode", self.decode))
            for number, share in enumerate(shares)
        ]
        reason = (
            "so prefill does not delay decode" if self.is_exclusive else "fewer cores than workers: some are shared"
        )
        lending = "; partners lend their cores while idle" if self.prefill and self.is_exclusive else ""
        of_model = f" of {model}" if model else ""
        return (
            f"cores{of_model}: {', '.join(workers)} ({reason}{lending}); router on {format_cores(self.router) or 'any'}"
        )


def assign_cores(
    available: Sequence[int], *, num_prefill: int, num_decode: int, max_per_worker: int | None = None
) -> CorePlan:
    """Assign the cores in `available`, to prefill workers first.

    With enough cores each worker gets a run of neighbouring cores. Remaining cores go to prefill, which is bound by
    compute (decode is bound by memory). With fewer cores than workers, several workers share a core.
    """
    num_workers = num_prefill + num_decode
    for_workers = available
    if num_prefill == 0 and len(available) >= max(_MANY_CORES, num_decode + 1):
        for_workers = available[1:]
    if len(available) < num_workers:
        shares: list[Cores] = [(available[worker % len(available)],) for worker in range(num_workers)]
    else:
        shares = _split(for_workers, num_workers)
    capped = tuple(share[:max_per_worker] for share in shares)
    prefill, decode = capped[:num_prefill], capped[num_prefill:]
    router_cores = tuple(core for core in available if not any(core in share for share in decode))
    return CorePlan(prefill, decode, router=router_cores if len(available) > num_workers else ())


def _split(available: Sequence[int], num_shares: int) -> list[Cores]:
    """Split into runs of neighbouring cores. Sizes differ by at most one; larger runs come first."""
    size, num_larger = divmod(len(available), num_shares)
    shares: list[Cores] = []
    start = 0
    for share in range(num_shares):
        stop = start + size + (share < num_larger)
        shares.append(tuple(available[start:stop]))
        start = stop
    return shares


def format_cores(cores: Cores) -> str:
    """The cores as a list with commas, as the setting `cpu_list` takes them."""
    return ",".join(map(str, cores))
