"""The transports by name. `base.py` has the interface; shm.py and grpc_bytes.py implement it."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from kvtransfer.settings import TransferSettings
from kvtransfer.transports import grpc_bytes, shm
from kvtransfer.transports.base import ReceiveTransport, SendTransport
from mesh.domain.errors import ConfigurationError

# (settings, size of the largest chunk) -> transport, or None if it cannot work in this process.
_SENDERS: Mapping[str, Callable[[TransferSettings, int], SendTransport | None]] = MappingProxyType(
    {
        shm.NAME: shm.open_sender,
        grpc_bytes.NAME: lambda settings, max_chunk_bytes: grpc_bytes.GrpcSendTransport(),
    }
)
_RECEIVERS: Mapping[str, Callable[[TransferSettings], ReceiveTransport]] = MappingProxyType(
    {
        shm.NAME: shm.ShmReceiveTransport,
        grpc_bytes.NAME: lambda settings: grpc_bytes.GrpcReceiveTransport(),
    }
)


def open_send_transports(settings: TransferSettings, max_chunk_bytes: int) -> tuple[SendTransport, ...]:
    """Open the configured transports that work on this machine, in order. Raises ConfigurationError if none does."""
    _require_known(settings.transports)
    opened = [_SENDERS[name](settings, max_chunk_bytes) for name in settings.transports]
    usable = tuple(transport for transport in opened if transport is not None)
    if not usable:
        raise ConfigurationError(f"none of the KV transports {', '.join(settings.transports)} works here; add grpc")
    return usable


def open_receive_transports(settings: TransferSettings) -> tuple[ReceiveTransport, ...]:
    """Open the configured transports. Raises ConfigurationError for an unknown name."""
    _require_known(settings.transports)
    return tuple(_RECEIVERS[name](settings) for name in settings.transports)


def _require_known(names: tuple[str, ...]) -> None:
    for name in names:
        if name not in _SENDERS:
            raise ConfigurationError(f"there is no KV transport {name!r}; choose from {', '.join(_SENDERS)}")
