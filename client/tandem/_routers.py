"""The routers of a client, in order of preference, and the channels to them, in plaintext or with TLS.

All routers serve the same models. The first address is preferred until a call finds that router unreachable, stopping
or without workers. Then the next router is preferred, and so on in a circle. The client does not return to an earlier
router without such a failure, so that a restarted router does not receive the calls of all clients at once.
"""

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import grpc

from tandem._fields import wrong_value
from tandem._retries import error_from_rpc
from tandem.exceptions import Cancelled, ConnectionFailed, InvalidRequest
from tandem.v1 import generation_pb2_grpc, mesh_pb2_grpc

ChannelFactory = Callable[[str], grpc.aio.Channel]
"""Creates the channel to one address."""

FORK_ADVICE = "gRPC does not survive a fork, so start processes with spawn, or fork before the first call of any client"
_SCHEMES = ("http://", "https://")
_PEM_END = b"-----END "
_MAX_CONTENTS = 8
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
    # Retries are decided in _connection.py only.
    ("grpc.enable_retries", 0),
)


@dataclass(frozen=True, slots=True)
class Tls:
    """The verification of a router's certificate.

    `ca` is a PEM file with the certificate of the CA or of the router itself; the default are the CAs that gRPC ships.
    `name` replaces the address as the name that the certificate must have, for a router behind a tunnel or a bare IP
    address.
    """

    ca: str | PathLike[str] | None = None
    name: str | None = None


def insecure_channel(address: str) -> grpc.aio.Channel:
    """A plaintext channel to `address`; the ChannelFactory without TLS."""
    return grpc.aio.insecure_channel(address, options=_options(address))


class Channels:
    """Opens the channels of a client."""

    def __init__(self, open_channel: ChannelFactory) -> None:
        self._open_channel = open_channel

    def open(self, address: str) -> grpc.aio.Channel:
        return self._open_channel(address)

    def roots(self) -> bytes | None:
        """The certificates that a channel opened now would trust; None for gRPC's own, which never change."""
        return None


class SecureChannels(Channels):
    """Channels with TLS. Raises InvalidRequest if the CA file cannot be read.

    The file is read again when it has been replaced, because it may hold the router's own certificate, which is
    renewed. Its former contents stay trusted, because the router may still show them, also after several replacements
    that it could not use.
    """

    def __init__(self, tls: Tls) -> None:
        super().__init__(self._secure_channel)
        self._tls = tls
        self._version: tuple[int, int, int] | None = None
        self._contents: tuple[bytes, ...] = ()
        """What the file has held, the newest first."""
        self._roots: bytes | None = None
        if tls.ca is not None:
            try:
                self._read(tls.ca)
            except OSError as error:
                raise InvalidRequest(f"cannot read the CA file {tls.ca}: {error.strerror}") from error

    def _secure_channel(self, address: str) -> grpc.aio.Channel:
        name = [("grpc.ssl_target_name_override", self._tls.name)] if self._tls.name else []
        credentials = grpc.ssl_channel_credentials(self._roots)
        return grpc.aio.secure_channel(address, credentials, options=[*_options(address), *name])

    def roots(self) -> bytes | None:
        if self._tls.ca is not None:
            with suppress(OSError):  # the file is being replaced
                self._read(self._tls.ca)
        return self._roots

    def _read(self, ca: str | PathLike[str]) -> None:
        status = os.stat(ca)
        version = (status.st_mtime_ns, status.st_size, status.st_ino)
        if version != self._version:
            content = Path(ca).read_bytes()
            if self._contents and _PEM_END not in content:
                return  # it is being written
            self._version = version
            former = (kept for kept in self._contents if kept != content)
            self._contents = (content, *former)[:_MAX_CONTENTS]
            self._roots = b"\n".join(self._contents)


def _options(address: str) -> list[tuple[str, int]]:
    """Channel options. Connections to loopback addresses ignore the HTTP proxy of the environment."""
    loopback_options = (("grpc.enable_http_proxy", 0),) if address.startswith(_LOOPBACK) else ()
    return [*_OPTIONS, *loopback_options]


@dataclass(frozen=True, slots=True)
class Stubs:
    """The channel and the gRPC stubs of one router."""

    channel: grpc.aio.Channel
    generation: Any
    mesh: Any


class _UserOfGrpc:
    """The process that has first used gRPC. In its forks, calls of grpc.aio would hang and ignore their timeouts."""

    def __init__(self) -> None:
        self._process: int | None = None

    def require_same(self) -> None:
        """Raise RuntimeError in a fork of that process."""
        process = os.getpid()
        if self._process is None:
            self._process = process
        if self._process != process:
            raise RuntimeError(f"this process was forked from one whose clients have made calls: {FORK_ADVICE}")


_USER_OF_GRPC = _UserOfGrpc()


class Router:
    """One router. Its channel opens with the first call, inside the event loop of that call, and opens again in the
    next one if that loop has ended: each `asyncio.run` of a program has a loop of its own.
    """

    def __init__(self, address: str, channels: Channels) -> None:
        self.address = address
        self._channels = channels
        self._opened: Stubs | None = None
        self._roots: bytes | None = None  # that the opened channel trusts
        self._outdated: list[grpc.aio.Channel] = []  # with calls that still run
        self._loop: asyncio.AbstractEventLoop | None = None
        self.is_closed = False

    @property
    def stubs(self) -> Stubs:
        """The stubs of this router. Raises Cancelled after `close()`; RuntimeError in a fork of a process that has used
        some router, and in another event loop than the one in use."""
        if self.is_closed:
            raise Cancelled("the client was closed")
        _USER_OF_GRPC.require_same()
        loop = asyncio.get_running_loop()
        if self._loop is not None and self._loop.is_closed():
            self._opened = None  # nothing could close this channel any more
            self._outdated.clear()
        roots = self._channels.roots()
        if self._opened is not None and self._loop is loop and roots is not self._roots:
            self._outdated.append(self._opened.channel)
            self._opened = None
        if self._opened is None:
            self._loop, self._roots = loop, roots
            channel = self._channels.open(self.address)
            self._opened = Stubs(
                channel,
                generation_pb2_grpc.GenerationStub(channel),
                mesh_pb2_grpc.MeshStub(channel),
            )
        if self._loop is not loop:
            raise RuntimeError("this client is in use in another event loop: make one in each, or use tandem.Client")
        return self._opened

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Convert gRPC errors of calls inside the block to TandemError."""
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, self.address) from error
        except asyncio.CancelledError:
            # grpc.aio raises CancelledError also if the server or `close`, and not this task, cancelled the call.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            if self.is_closed:
                raise Cancelled("the client was closed") from None
            raise ConnectionFailed(f"{self.address} ended the call as cancelled", broke=True) from None

    async def close(self) -> None:
        """Close the channel, which ends running calls with Cancelled. May be called twice."""
        self.is_closed = True
        opened, self._opened = self._opened, None
        if opened is not None and self._loop is asyncio.get_running_loop():
            for channel in (opened.channel, *self._outdated):
                await channel.close()


class Routers:
    """All routers of a client. `addresses` are separated by commas. Raises InvalidRequest for an empty address
    and for a URL.
    """

    def __init__(self, addresses: str, channels: Channels) -> None:
        if not isinstance(addresses, str):
            raise wrong_value("address", 'a text like "127.0.0.1:50051"', addresses)
        names = [address.strip() for address in addresses.split(",")]
        if not all(names):
            raise InvalidRequest('the address must be like "127.0.0.1:50051", or several, separated by commas')
        if urls := [name for name in names if name.startswith(_SCHEMES)]:
            raise InvalidRequest(f"{urls[0]} is a URL: the address of a router is HOST:PORT, without a scheme")
        self._all = [Router(address, channels) for address in dict.fromkeys(names)]

    def __iter__(self) -> Iterator[Router]:
        """All routers, the preferred one first."""
        return iter(list(self._all))

    def prefer(self, router: Router) -> None:
        """Make `router` the preferred one."""
        index = self._all.index(router)
        self._all = self._all[index:] + self._all[:index]

    def avoid(self, router: Router) -> None:
        """If `router` is the preferred one, prefer the next router instead."""
        if self._all[0] is router:
            self._all = [*self._all[1:], router]
