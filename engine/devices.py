"""Names of devices: which one a worker means, and which one each of its ranks takes."""

import torch

from mesh.domain.errors import ConfigurationError
from mesh.domain.kv import Degrees


def find_device(name: str) -> torch.device:
    """The device of a setting; "auto" is CUDA if there is any. Raises ConfigurationError."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigurationError(f"device {name!r} is not known: {error}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError(f"device {name!r} is not available: no CUDA device, or torch was built without CUDA")
    return device


def first_device(names: str) -> str:
    """The device of rank 0, of a setting that may list one for each rank."""
    return names.partition(",")[0].strip()


def num_devices(names: str) -> int:
    """GPUs for the ranks of one worker: those that are listed, or the one that is named and all after it. 0: none."""
    listed = names.split(",")
    first = find_device(listed[0].strip())
    if first.type == "cpu":
        return 0
    return len(listed) if len(listed) > 1 else max(0, torch.cuda.device_count() - (first.index or 0))


def rank_devices(names: str, degrees: Degrees) -> tuple[str, ...]:
    """The device of each rank of one machine: a list such as cuda:0,cuda:2 has one for each, `cuda:N` is that of rank 0
    and the next ranks take the next GPUs, and all ranks may have the CPU. Raises ConfigurationError.
    """
    size = degrees.num_ranks
    listed = [find_device(name.strip()) for name in names.split(",")]
    if len({device.type for device in listed}) > 1 or len(listed) not in (1, size) or len(set(listed)) < len(listed):
        raise ConfigurationError(f"device {names} does not name one GPU for each of {size} ranks ({degrees})")
    first = listed[0]
    if len(listed) == 1 and first.type != "cpu":
        if (num_left := num_devices(names)) < size:
            raise ConfigurationError(f"{_wanted(degrees)} needs {size} GPUs, one for each rank: {_fitting(num_left)}")
        listed = [torch.device(first.type, (first.index or 0) + rank) for rank in range(size)]
    return tuple(map(str, listed * (size // len(listed))))


def _wanted(degrees: Degrees) -> str:
    if degrees.pipeline == 1:
        return f"tensor_parallel {degrees.tensor}"
    return f"tensor_parallel {degrees.tensor} with pipeline_parallel {degrees.pipeline}"


def _fitting(num_devices: int) -> str:
    if num_devices < 2:
        return "there is one, so use 1" if num_devices else "there is none there"
    return f"there are {num_devices}, so use degrees whose product is {num_devices} or less"
