"""A GPU that is not there: torch's device "meta", whose tensors have shapes and dtypes, but no values.

Operations whose result the host would have to know fail on it. `no_waiting` refuses those that bring something to it:
on a GPU the host would wait.
"""

import weakref
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


class PeakBytes(TorchDispatchMode):
    """Counts the memory of tensors that operations make, as long as somebody holds them or a view of them. `peak`: the
    most at any time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._num_holders: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in (leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)):
            storage = tensor.untyped_storage()
            if storage._cdata in self._num_holders or storage._cdata not in given:
                self._hold(tensor, storage._cdata, storage.nbytes())
        return result

    def _hold(self, tensor: Tensor, storage: int, num_bytes: int) -> None:
        if storage not in self._num_holders:
            self._now += num_bytes
            self.peak = max(self.peak, self._now)
        self._num_holders[storage] = self._num_holders.get(storage, 0) + 1
        weakref.finalize(tensor, self._release, storage, num_bytes)

    def _release(self, storage: int, num_bytes: int) -> None:
        self._num_holders[storage] -= 1
        if not self._num_holders[storage]:
            del self._num_holders[storage]
            self._now -= num_bytes


class HostReads(TorchFunctionMode):
    """Lets the host read what it must know of that GPU, and counts it: flags are all true, rows are all there, numbers
    are 1.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.tolist, Tensor.item, Tensor.nonzero) and args[0].device == DEVICE:
            self.count += 1
            if func is Tensor.nonzero:
                return torch.zeros((len(args[0]), args[0].dim()), dtype=torch.int64, device=DEVICE)
            return torch.ones(args[0].shape, dtype=args[0].dtype).tolist()
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
