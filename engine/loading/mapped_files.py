"""Tensors of safetensors files, mapped into memory; errors name the file and the tensor."""

from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from checkpoint.tensors import StoredTensor
from engine.bus_errors import name_if_cut_off
from mesh.domain.errors import ConfigurationError


def open_mapped(path: Path) -> Any:
    """A file for `read_mapped`, as a context manager. Raises ConfigurationError."""
    name_if_cut_off([path])
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ConfigurationError(f"cannot read {path}: {error}") from error


def read_mapped(file: Any, name: str) -> Tensor:
    """A tensor of an open file, which is a view of it. Raises ConfigurationError."""
    try:
        tensor: Tensor = file.get_tensor(name)
    except (SafetensorError, RuntimeError) as error:
        raise ConfigurationError(f"cannot read tensor {name}: {error}") from error
    return tensor


def read_part(file: Any, name: str, stored: StoredTensor) -> Tensor:
    """As `read_mapped`, for a tensor that may be a part of another one."""
    if stored.whole is None:
        return read_mapped(file, name)
    numbers = read_mapped(file, stored.whole).view(-1)[stored.first :]
    if stored.column_step:
        return numbers.as_strided(stored.shape, (1, stored.column_step))
    return numbers[: prod(stored.shape)].view(stored.shape)


def read_stored(path: Path, name: str) -> Tensor:
    """One tensor of a file. Raises ConfigurationError."""
    with open_mapped(path) as file:
        return read_mapped(file, name)
