"""Which devices workers share, by the names in their settings. Pure: looks at no device."""

from collections.abc import Iterable, Sequence

_ANY = "auto"


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
