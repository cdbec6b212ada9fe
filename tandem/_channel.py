"""gRPC channels to routers: plaintext, or TLS."""

from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import grpc

from tandem.exceptions import InvalidRequest

ChannelFactory = Callable[[str], grpc.aio.Channel]
"""Makes the channel to one address."""

_LOOPBACK = ("127.", "localhost:", "[::1]:")
_OPTIONS = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Log-probs of a long prompt come in one message.
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # How long a connection may take to come up: with several routers, the next one is waiting.
    ("grpc.min_reconnect_backoff_ms", 5000),
    # Retries are decided in one place: _retry.py.
    ("grpc.enable_retries", 0),
)


@dataclass(frozen=True, slots=True)
class Tls:
    """How to know a router by its certificate.

    `ca` is a PEM file with the CA's certificate, or with the router's own; without it, the CAs that gRPC brings along
    count. `name` is looked for in the certificate instead of the address, for a router that is reached through a
    tunnel or by a bare IP address.
    """

    ca: str | PathLike[str] | None = None
    name: str | None = None


def insecure_channel(address: str) -> grpc.aio.Channel:
    """A plaintext channel."""
    return grpc.aio.insecure_channel(address, options=_options(address))


def channels_over(tls: Tls) -> ChannelFactory:
    """Makes TLS channels. Raises InvalidRequest if the CA's file cannot be read."""
    try:
        roots = None if tls.ca is None else Path(tls.ca).read_bytes()
    except OSError as error:
        raise InvalidRequest(f"cannot read the CA's file {tls.ca}: {error.strerror}") from error
    credentials = grpc.ssl_channel_credentials(roots)
    name = [("grpc.ssl_target_name_override", tls.name)] if tls.name else []

    def secure_channel(address: str) -> grpc.aio.Channel:
        return grpc.aio.secure_channel(address, credentials, options=[*_options(address), *name])

    return secure_channel


def _options(address: str) -> list[tuple[str, int]]:
    """An HTTP proxy of the environment is not used for this machine's own addresses."""
    own = (("grpc.enable_http_proxy", 0),) if address.startswith(_LOOPBACK) else ()
    return [*_OPTIONS, *own]
