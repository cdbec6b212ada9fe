"""A GPU that is not there: torch's device "meta", whose tensors have shapes and dtypes, but no values.

Operations whose result the host would have to know fail on it. `no_waiting` refuses those that bring something to it:
on a GPU the host would wait.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.device_copies import Arrays, Tensors

DEVICE = torch.device("meta")


class MixesDevices(AssertionError):
    """An operation brings something from one device to another."""


class _OneDevice(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
        if len(devices := {tensor.device.type for tensor in tensors}) > 1:
            raise MixesDevices(f"{func._schema.name} on {devices}")
        return result


class _NoNumbers(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.tensor, torch.as_tensor) and (kwargs or {}).get("device") == DEVICE:
            raise MixesDevices(f"{func.__name__} makes a tensor of numbers of the host")
        return func(*args, **(kwargs or {}))


@contextmanager
def no_waiting() -> Iterator[None]:
    """Refuse operations with tensors on several devices, and tensors of numbers of the host."""
    with _NoNumbers(), _OneDevice():
        yield


class FakeCopies:
    """DeviceCopies of that GPU. What is read back is zeros. `read`: shapes of what was read, by call."""

    def __init__(self) -> None:
        self.num_sent = 0
        self.read: list[list[tuple[int, ...]]] = []

    def to_device(self, arrays: Arrays) -> Tensors:
        self.num_sent += 1
        dtypes = {name: torch.from_numpy(array).dtype for name, array in arrays.items()}
        return {name: torch.empty(array.shape, dtype=dtypes[name], device=DEVICE) for name, array in arrays.items()}

    def to_host(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        assert {tensor.device for tensor in tensors} == {DEVICE}
        self.read.append([tuple(tensor.shape) for tensor in tensors])
        return [torch.zeros(tuple(tensor.shape), dtype=tensor.dtype) for tensor in tensors]
