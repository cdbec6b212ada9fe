"""The transports by name. `base.py` has the interface; shm.py, grpc_bytes.py, torch_distributed.py and memory_reads.py
implement it.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TypeVar

from kvtransfer.settings import TransferSettings
from kvtransfer.transports import grpc_bytes, shm
from kvtransfer.transports.base import ReceiveTransport, SendTransport
from mesh.domain.errors import ConfigurationError

T = TypeVar("T")


def _pair_sender(name: str, settings: TransferSettings, max_chunk_bytes: int) -> SendTransport | None:
    from kvtransfer.transports import torch_distributed  # torch takes seconds to import

    return torch_distributed.open_sender(name, settings, max_chunk_bytes)


def _pair_receiver(name: str, settings: TransferSettings) -> ReceiveTransport | None:
    from kvtransfer.transports import torch_distributed

    return torch_distributed.open_receiver(name, settings)


def _read_sender(name: str, settings: TransferSettings, max_chunk_bytes: int) -> SendTransport | None:
    from kvtransfer.transports import memory_reads

    return memory_reads.open_sender(name, settings, max_chunk_bytes)


def _read_receiver(name: str, settings: TransferSettings) -> ReceiveTransport | None:
    from kvtransfer.transports import memory_reads

    return memory_reads.open_receiver(name, settings)


# (settings, size of the largest chunk) -> transport, or None if it cannot work in this process.
_SENDERS: Mapping[str, Callable[[TransferSettings, int], SendTransport | None]] = MappingProxyType(
    {
        shm.NAME: shm.open_sender,
        grpc_bytes.NAME: lambda settings, max_chunk_bytes: grpc_bytes.GrpcSendTransport(),
        "gloo": partial(_pair_sender, "gloo"),
        "nccl": partial(_pair_sender, "nccl"),
        "nixl": partial(_read_sender, "nixl"),
        "mooncake": partial(_read_sender, "mooncake"),
    }
)
_RECEIVERS: Mapping[str, Callable[[TransferSettings], ReceiveTransport | None]] = MappingProxyType(
    {
        shm.NAME: shm.ShmReceiveTransport,
        grpc_bytes.NAME: lambda settings: grpc_bytes.GrpcReceiveTransport(),
        "gloo": partial(_pair_receiver, "gloo"),
        "nccl": partial(_pair_receiver, "nccl"),
        "nixl": partial(_read_receiver, "nixl"),
        "mooncake": partial(_read_receiver, "mooncake"),
    }
)


def open_send_transports(settings: TransferSettings, max_chunk_bytes: int) -> tuple[SendTransport, ...]:
    """Open the configured transports that work on this machine, in order. Raises ConfigurationError if none does."""
    _require_known(settings.transports)
    opened = [_SENDERS[name](settings, max_chunk_bytes) for name in settings.transports]
    return _usable(opened, settings)


def open_receive_transports(settings: TransferSettings) -> tuple[ReceiveTransport, ...]:
    """Open those of a receiver. Raises ConfigurationError if none works here."""
    _require_known(settings.transports)
    return _usable([_RECEIVERS[name](settings) for name in settings.transports], settings)


def _usable(opened: Sequence[T | None], settings: TransferSettings) -> tuple[T, ...]:
    usable = tuple(transport for transport in opened if transport is not None)
    if not usable:
        raise ConfigurationError(f"none of the KV transports {', '.join(settings.transports)} works here; add grpc")
    return usable


def _require_known(names: tuple[str, ...]) -> None:
    for name in names:
        if name not in _SENDERS:
            raise ConfigurationError(f"there is no KV transport {name!r}; choose from {', '.join(_SENDERS)}")
