"""The transports by name.

base.py                the interface of a transport, at both ends
shm.py                 "shm": arena.py is the shared memory, link.py the conversation without gRPC
grpc_bytes.py          "grpc"
torch_distributed.py   "gloo" and "nccl"; pair.py is the process group of a sender and a receiver
memory_reads.py        "nixl" and "mooncake"; read_engines.py has the libraries that read the sender's memory
slots.py               memory for payloads on their way
resource_pool.py       resources that are kept for a peer between transfers
"""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from kvtransfer.settings import TransferSettings
from kvtransfer.transports import grpc_bytes, shm
from kvtransfer.transports.base import ReceiveTransport, SendTransport
from mesh.domain.errors import ConfigurationError

T = TypeVar("T")


class _Sides(NamedTuple):
    """Functions that open a transport at either end; they return None if it cannot work in this process. The sender's
    also takes `max_chunk_bytes`.
    """

    sender: Callable[[TransferSettings, int], SendTransport | None]
    receiver: Callable[[TransferSettings], ReceiveTransport | None]


def _imported_late(module: str, name: str) -> _Sides:
    """Both sides of a transport whose module is imported when one of them is opened: it imports torch, which takes
    seconds.
    """
    path = f"{__name__}.{module}"
    return _Sides(
        lambda settings, max_chunk_bytes: import_module(path).open_sender(name, settings, max_chunk_bytes),
        lambda settings: import_module(path).open_receiver(name, settings),
    )


_TRANSPORTS: Mapping[str, _Sides] = MappingProxyType(
    {
        shm.NAME: _Sides(shm.open_sender, shm.ShmReceiveTransport),
        grpc_bytes.NAME: _Sides(
            lambda settings, max_chunk_bytes: grpc_bytes.GrpcSendTransport(),
            lambda settings: grpc_bytes.GrpcReceiveTransport(),
        ),
        **{name: _imported_late("torch_distributed", name) for name in ("gloo", "nccl")},
        **{name: _imported_late("memory_reads", name) for name in ("nixl", "mooncake")},
    }
)


def open_send_transports(settings: TransferSettings, max_chunk_bytes: int) -> tuple[SendTransport, ...]:
    """Open the configured transports that work on this machine, in order. Raises ConfigurationError if none does."""
    return _usable([sides.sender(settings, max_chunk_bytes) for sides in _configured(settings)], settings)


def open_receive_transports(settings: TransferSettings) -> tuple[ReceiveTransport, ...]:
    """Open those of a receiver. Raises ConfigurationError if none works here."""
    return _usable([sides.receiver(settings) for sides in _configured(settings)], settings)


def _configured(settings: TransferSettings) -> list[_Sides]:
    for name in settings.transports:
        if name not in _TRANSPORTS:
            raise ConfigurationError(f"there is no KV transport {name!r}; choose from {', '.join(_TRANSPORTS)}")
    return [_TRANSPORTS[name] for name in settings.transports]


def _usable(opened: Sequence[T | None], settings: TransferSettings) -> tuple[T, ...]:
    usable = tuple(transport for transport in opened if transport is not None)
    if not usable:
        raise ConfigurationError(
            f"none of the KV transports {', '.join(settings.transports)} works here (the log says why): add grpc to "
            "kv_transports"
        )
    return usable
