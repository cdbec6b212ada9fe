"""Creates gRPC channels to routers, in plaintext or with TLS."""

from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import grpc

from tandem.exceptions import InvalidRequest

ChannelFactory = Callable[[str], grpc.aio.Channel]
"""Creates the channel to one address."""

_LOOPBACK = ("127.", "localhost:", "[::1]:")
_OPTIONS = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Tokenize returns the text and tokens of a long prompt in one message.
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # Limit on the time to connect: a client with several routers then tries the next one.
    ("grpc.min_reconnect_backoff_ms", 5000),
    # Retries are decided in _retry.py only.
    ("grpc.enable_retries", 0),
)


@dataclass(frozen=True, slots=True)
class Tls:
    """How to verify the certificate of a router.

    `ca` is a PEM file with the certificate of the CA or of the router itself; the default are the CAs that gRPC ships.
    `name` replaces the address as the name that the certificate must have, for a router behind a tunnel or a bare IP
    address.
    """

    ca: str | PathLike[str] | None = None
    name: str | None = None


def insecure_channel(address: str) -> grpc.aio.Channel:
    """A plaintext channel to `address`; the ChannelFactory without TLS."""
    return grpc.aio.insecure_channel(address, options=_options(address))


def channels_over(tls: Tls) -> ChannelFactory:
    """A factory of TLS channels. Raises InvalidRequest if the CA file cannot be read."""
    try:
        roots = None if tls.ca is None else Path(tls.ca).read_bytes()
    except OSError as error:
        raise InvalidRequest(f"cannot read the CA file {tls.ca}: {error.strerror}") from error
    credentials = grpc.ssl_channel_credentials(roots)
    name = [("grpc.ssl_target_name_override", tls.name)] if tls.name else []

    def secure_channel(address: str) -> grpc.aio.Channel:
        return grpc.aio.secure_channel(address, credentials, options=[*_options(address), *name])

    return secure_channel


def _options(address: str) -> list[tuple[str, int]]:
    """Channel options. Connections to loopback addresses ignore the HTTP proxy of the environment."""
    loopback_options = (("grpc.enable_http_proxy", 0),) if address.startswith(_LOOPBACK) else ()
    return [*_OPTIONS, *loopback_options]
