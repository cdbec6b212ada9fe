"""Which devices workers get and share, by the names in their settings. Asks no driver, which would take seconds."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path

_ANY = "auto"
_GPUS = Path("/proc/driver/nvidia/gpus")


def num_gpus(environ: Mapping[str, str], gpus: Path = _GPUS) -> int:
    """The GPUs that CUDA shows to a process with these variables; 0 where the system does not list them."""
    if "CUDA_VISIBLE_DEVICES" in environ:  # CUDA ignores what follows a name that cannot be
        names = (name.strip() for name in environ["CUDA_VISIBLE_DEVICES"].split(","))
        return sum(1 for _ in takewhile(lambda name: name and not name.startswith("-"), names))
    try:
        return sum(1 for _ in gpus.iterdir())
    except OSError:
        return 0


def spread(workers: Mapping[str, tuple[str, int]], num_gpus: int) -> Mapping[str, str]:
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
