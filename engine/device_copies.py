"""Copies between host and device: one for all arrays of a step, not one for each.

A copy from ordinary memory makes the host wait for the device, so arrays go through pinned memory that is reused. On
CPU nothing is copied.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 16
_FIRST_BYTES = 1 << 16

Arrays = Mapping[str, NDArray[Any]]
Tensors = Mapping[str, Tensor]


class DeviceCopies(Protocol):
    """Plug point: NoCopies, PackedCopies. One thread uses it."""

    def to_device(self, arrays: Arrays) -> Tensors:
        """The arrays as tensors of the same shapes and dtypes, valid until the second next call. The host does not
        wait for the device.
        """
        ...

    def to_host(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The tensors on the host, once the device has computed them. Integers must be below 2**53."""
        ...


class NoCopies:
    """DeviceCopies of the CPU: tensors share the memory of the arrays."""

    def to_device(self, arrays: Arrays) -> Tensors:
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def to_host(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return tensors


class Staging:
    """A buffer on the host, pinned for CUDA, and one of the same size on the device. Neither ever moves."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._pinned = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=is_cuda)
        self.host: NDArray[np.uint8] = self._pinned.numpy()
        self.device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._sent = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Wait until the last copy has left the host's buffer. Call it before the buffer is filled again."""
        if self._sent is not None:
            self._sent.synchronize()

    def send(self, num_bytes: int) -> None:
        """Copy the first bytes to the device, after what the device's current stream does now."""
        self.device[:num_bytes].copy_(self._pinned[:num_bytes], non_blocking=True)
        if self._sent is not None:
            # By default, it would be that of the thread's current device: cuda:0, whatever the worker has.
            self._sent.record(torch.cuda.current_stream(self.device.device))


class PackedCopies:
    """DeviceCopies of other devices: arrays side by side in one buffer, results in one tensor of float64. Two buffers
    take turns.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._next, self._last = Staging(_FIRST_BYTES, device), Staging(_FIRST_BYTES, device)

    def to_device(self, arrays: Arrays) -> Tensors:
        offsets, num_bytes = [], 0
        for array in arrays.values():
            offsets.append(num_bytes)
            num_bytes += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        staging = self._turn(num_bytes)
        for array, offset in zip(arrays.values(), offsets, strict=True):
            staging.host[offset : offset + array.nbytes] = array.reshape(-1).view(np.uint8)
        staging.send(num_bytes)
        return {
            name: part(staging.device, offset, array)
            for (name, array), offset in zip(arrays.items(), offsets, strict=True)
        }

    def to_host(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        flat = torch.cat([tensor.reshape(-1).to(torch.float64) for tensor in tensors]).cpu()
        parts = torch.split(flat, [tensor.numel() for tensor in tensors])
        return [values.to(tensor.dtype).view(tensor.shape) for values, tensor in zip(parts, tensors, strict=True)]

    def _turn(self, num_bytes: int) -> Staging:
        """The buffer that was not used last, of at least this size, free to be filled."""
        self._next, self._last = self._last, self._next
        if num_bytes > len(self._last.host):
            self._last = Staging(2 * num_bytes, self._device)
        self._last.wait()
        return self._last


def part(buffer: Tensor, offset: int, like: NDArray[Any]) -> Tensor:
    """The part of a buffer of bytes that begins at `offset`, with the shape and dtype of an array."""
    return buffer[offset : offset + like.nbytes].view(torch.from_numpy(like).dtype).view(like.shape)


def copies_for(device: torch.device) -> DeviceCopies:
    return NoCopies() if device.type == "cpu" else PackedCopies(device)
