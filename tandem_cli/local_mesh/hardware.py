"""Shares out the CPU cores and the GPUs of this machine among services. Knows no processes, and asks no driver, which
would take seconds.

Prefill slows down decode steps that share its core. Every worker therefore gets its own cores while there are enough,
and lends them to its partner while it is idle (engine/cores.py). A worker of several ranks gets cores for each rank; it
neither lends nor borrows. The router needs little CPU time, but it needs that during decode steps: if there are more
cores than workers, the router does not use the cores of decode workers.

Devices are the names in the settings of workers.
"""

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from mesh.domain.host import Cores, format_cores

# With at least this many cores, a mesh without prefill workers leaves one core to the router.
_MANY_CORES = 4
_ANY = "auto"
_OTHER_ROLE = {"prefill": "decode", "decode": "prefill"}
_GPUS = Path("/proc/driver/nvidia/gpus")


def available_cores() -> Sequence[int]:
    """Cores that this process may use; all cores where the system has no affinity."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return range(os.cpu_count() or 1)


@dataclass(frozen=True, slots=True)
class CoreAssignment:
    """The cores of each prefill and decode worker, by worker number, and of the router. No cores means all cores.

    A worker runs as many threads as it has cores.
    """

    prefill: tuple[Cores, ...]
    decode: tuple[Cores, ...]
    router: Cores = ()
    other_models: Cores = ()
    """Cores of workers that serve other models."""
    prefill_ranks: tuple[int, ...] = ()
    """The number of ranks of each worker; empty if all workers have one."""
    decode_ranks: tuple[int, ...] = ()

    @property
    def is_exclusive(self) -> bool:
        """No two workers share a core."""
        shares = [core for share in (*self.prefill, *self.decode, self.other_models) for core in share]
        return len(shares) == len(set(shares))

    def split(self, counts: Sequence[tuple[int, int]]) -> list["CoreAssignment"]:
        """One assignment per model. `counts` has the numbers of prefill and decode workers per model, which add up to
        all workers.
        """
        assignments: list[CoreAssignment] = []
        first_prefill = first_decode = 0
        for num_prefill, num_decode in counts:
            of_prefill = slice(first_prefill, first_prefill + num_prefill)
            of_decode = slice(first_decode, first_decode + num_decode)
            prefill, decode = self.prefill[of_prefill], self.decode[of_decode]
            remaining = Counter(core for share in (*self.prefill, *self.decode) for core in share)
            remaining.subtract(core for share in (*prefill, *decode) for core in share)
            ranks = self.prefill_ranks[of_prefill], self.decode_ranks[of_decode]
            assignments.append(CoreAssignment(prefill, decode, self.router, tuple(sorted(+remaining)), *ranks))
            first_prefill, first_decode = of_prefill.stop, of_decode.stop
        return assignments

    def lent_to(self, role: str, number: int) -> Cores:
        """Cores that the worker may borrow: those of its partner, the worker of the other role with the same number.
        Without prefill workers, decode workers 0 and 1 are partners, 2 and 3, and so on.
        """
        partner, other_role = (number, _OTHER_ROLE[role]) if self.prefill else (number ^ 1, role)
        partners = self.prefill if other_role == "prefill" else self.decode
        have_ranks = self._num_ranks(role, number) > 1 or self._num_ranks(other_role, partner) > 1
        return partners[partner] if self.is_exclusive and partner < len(partners) and not have_ranks else ()

    def _num_ranks(self, role: str, number: int) -> int:
        ranks = self.prefill_ranks if role == "prefill" else self.decode_ranks
        return ranks[number] if number < len(ranks) else 1

    def describe(self, model: str = "") -> str:
        """The assignment and its reason, as one line."""
        workers = [
            f"{role}-{number} on {format_cores(share)}{self._ranks_text(role, number)}"
            for role, shares in (("prefill", self.prefill), ("decode", self.decode))
            for number, share in enumerate(shares)
        ]
        notes: list[str] = []
        if not self.is_exclusive:
            sharing = "ranks" if self.prefill_ranks or self.decode_ranks else "workers"
            notes.append(f"fewer cores than {sharing}: some are shared")
        elif self.prefill:
            notes.append("so prefill does not delay decode")
        if any(self.lent_to("decode", number) for number in range(len(self.decode))):
            notes.append("partners lend their cores while idle")
        reason = f" ({'; '.join(notes)})" if notes else ""
        of_model = f" of {model}" if model else ""
        return f"cores{of_model}: {', '.join(workers)}{reason}; router on {format_cores(self.router) or 'any'}"

    def _ranks_text(self, role: str, number: int) -> str:
        num_ranks = self._num_ranks(role, number)
        return f" ({num_ranks} ranks)" if num_ranks > 1 else ""


def assign_cores(
    available: Sequence[int],
    *,
    num_prefill: int,
    num_decode: int,
    ranks: Sequence[int] = (),
    max_per_worker: int | None = None,
) -> CoreAssignment:
    """Assign the cores in `available`, to prefill workers first. `ranks` are those of each worker, prefill first; by
    default 1.

    With enough cores each worker gets a run of neighbouring cores, equally many for each rank. Remaining cores go to
    prefill, which is bound by compute (decode is bound by memory). With fewer cores than ranks, each worker gets one
    core for each of its ranks, at most all cores, and workers share cores.
    """
    num_workers = num_prefill + num_decode
    ranks = list(ranks) or [1] * num_workers
    for_workers = available
    if num_prefill == 0 and len(available) >= max(_MANY_CORES, sum(ranks) + 1):
        for_workers = available[1:]
    shares = _split(for_workers, ranks) if len(available) >= sum(ranks) else _deal(available, ranks)
    capped = tuple(share[:max_per_worker] for share in shares)
    prefill, decode = capped[:num_prefill], capped[num_prefill:]
    router_cores = tuple(core for core in available if not any(core in share for share in decode))
    return CoreAssignment(
        prefill,
        decode,
        router=router_cores if len(available) > num_workers else (),
        prefill_ranks=tuple(ranks[:num_prefill]) if max(ranks) > 1 else (),
        decode_ranks=tuple(ranks[num_prefill:]) if max(ranks) > 1 else (),
    )


def _split(available: Sequence[int], ranks: Sequence[int]) -> list[Cores]:
    """Split into runs of neighbouring cores, one for each worker, as many cores for each of its ranks. Earlier workers
    get one more for each rank while cores remain.
    """
    per_rank, remaining = divmod(len(available), sum(ranks))
    shares: list[Cores] = []
    start = 0
    for num_ranks in ranks:
        num_extra = num_ranks if num_ranks <= remaining else 0
        remaining -= num_extra
        stop = start + num_ranks * per_rank + num_extra
        shares.append(tuple(available[start:stop]))
        start = stop
    return shares


def _deal(available: Sequence[int], ranks: Sequence[int]) -> list[Cores]:
    """One core for each rank, in turn."""
    shares: list[Cores] = []
    start = 0
    for num_ranks in ranks:
        numbers = {(start + rank) % len(available) for rank in range(num_ranks)}
        shares.append(tuple(available[number] for number in sorted(numbers)))
        start += num_ranks
    return shares


def num_gpus(environ: Mapping[str, str], gpus: Path = _GPUS) -> int:
    """The GPUs that CUDA shows to a process with these variables; 0 where the system does not list them."""
    if "CUDA_VISIBLE_DEVICES" in environ:  # CUDA ignores what follows a name that cannot be
        names = (name.strip() for name in environ["CUDA_VISIBLE_DEVICES"].split(","))
        return sum(1 for _ in takewhile(lambda name: name and not name.startswith("-"), names))
    try:
        return sum(1 for _ in gpus.iterdir())
    except OSError:
        return 0


def assign_gpus(workers: Mapping[str, tuple[str, int]], num_gpus: int) -> Mapping[str, str]:
    """The device of each worker that asks for `cuda` without a number, in turn, with its ranks side by side. `workers`:
    the device and the number of ranks of each, by name. A worker that needs more GPUs than there are is left out.
    """
    chosen, first = dict[str, str](), 0
    for name, (device, num_ranks) in workers.items():
        if device != "cuda" or num_ranks > num_gpus:
            continue
        if first + num_ranks > num_gpus:
            first = 0
        chosen[name] = f"cuda:{first}"
        first += num_ranks
    return chosen


def worker_devices(setting: str, num_ranks: int) -> Sequence[str]:
    """The devices of a worker's ranks on this machine, as engine.devices.rank_devices finds them; "auto" may be any."""
    listed = [name.strip() for name in setting.split(",")]
    kind, _, first = listed[0].partition(":")
    if len(listed) > 1 or kind != "cuda" or not (first or "0").isdecimal():
        return listed
    return [f"cuda:{int(first or 0) + rank}" for rank in range(num_ranks)]


def num_sharing(device: str, devices_of_workers: Iterable[Sequence[str]]) -> int:
    """The number of workers that may have a rank on a device."""
    return sum(device == _ANY or device in devices or _ANY in devices for devices in devices_of_workers)
