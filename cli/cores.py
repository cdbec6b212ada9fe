"""Which CPU cores each service gets. Pure: knows no processes.

Prefill would slow decode steps down if they shared a core, so every worker gets its own as long as there are enough,
and lends them to its partner while it has nothing to compute (mesh/cores.py). The router needs little, but it would
need it in the middle of decode steps: if there are more cores than workers, it stays off those of decode workers.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from mesh.cores import Cores

# From so many cores on, decode workers without prefill workers leave one to the router.
_MANY_CORES = 4


@dataclass(frozen=True, slots=True)
class CorePlan:
    """Cores of each prefill and decode worker, by number, and the router's: none are all.

    A worker runs as many threads as it has cores.
    """

    prefill: tuple[Cores, ...]
    decode: tuple[Cores, ...]
    router: Cores = ()
    others: Cores = ()
    """Of workers of other models."""

    @property
    def is_exclusive(self) -> bool:
        """No two workers share a core."""
        shares = [core for share in (*self.prefill, *self.decode, self.others) for core in share]
        return len(shares) == len(set(shares))

    def split(self, counts: Sequence[tuple[int, int]]) -> list["CorePlan"]:
        """A plan for each model, given the numbers of their prefill and decode workers, which add up to all."""
        plans: list[CorePlan] = []
        first_prefill = first_decode = 0
        for num_prefill, num_decode in counts:
            prefill = self.prefill[first_prefill : first_prefill + num_prefill]
            decode = self.decode[first_decode : first_decode + num_decode]
            rest = Counter(core for share in (*self.prefill, *self.decode) for core in share)
            rest.subtract(core for share in (*prefill, *decode) for core in share)
            plans.append(CorePlan(prefill, decode, self.router, others=tuple(sorted(+rest))))
            first_prefill, first_decode = first_prefill + num_prefill, first_decode + num_decode
        return plans

    def lent_to(self, role: str, number: int) -> Cores:
        """Cores of the worker's partner, the one of the other role with the same number; none without a partner."""
        partners = self.decode if role == "prefill" else self.prefill
        return partners[number] if self.is_exclusive and number < len(partners) else ()

    def describe(self, model: str = "") -> str:
        """Who runs where, and why, in one line."""
        workers = [
            f"{role}-{number} on {_listed(share)}"
            for role, shares in (("prefill", self.prefill), ("decode", self.decode))
            for number, share in enumerate(shares)
        ]
        reason = "so prompts delay no stream" if self.is_exclusive else "fewer cores than workers: some share"
        lending = "; partners lend theirs while they rest" if self.prefill and self.is_exclusive else ""
        of_model = f" of {model}" if model else ""
        return f"cores{of_model}: {', '.join(workers)} ({reason}{lending}); router on {_listed(self.router) or 'any'}"


def assign_cores(
    available: Sequence[int], *, num_prefill: int, num_decode: int, max_per_worker: int | None = None
) -> CorePlan:
    """Share `available` out, prefill workers first.

    With enough cores each worker gets a run of neighbours; what does not divide evenly goes to prefill, which is bound
    by compute (decode is bound by memory). With fewer cores than workers, workers take turns and share.
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
    quiet = tuple(core for core in available if not any(core in share for share in decode))
    return CorePlan(prefill, decode, router=quiet if len(available) > num_workers else ())


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


def _listed(cores: Cores) -> str:
    return ",".join(map(str, cores))
