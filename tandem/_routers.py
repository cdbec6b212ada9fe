"""The routers a client may ask, in the order in which it asks them.

All serve the same models. One is preferred: the first that was given, until a call finds it gone, stopping or without
workers; then the next, and so on around. There is no going back without a reason, so that a router which has
just been restarted does not get everybody's calls at once.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from tandem._channel import ChannelFactory
from tandem._status import error_from_rpc
from tandem.exceptions import Cancelled, InvalidRequest
from tandem.v1 import generation_pb2_grpc, worker_pb2_grpc


@dataclass(frozen=True, slots=True)
class Stubs:
    """The services of one router."""

    channel: grpc.aio.Channel
    generation: Any
    mesh: Any


class Router:
    """One address. The channel opens with the first call, inside the event loop that makes it."""

    def __init__(self, address: str, open_channel: ChannelFactory) -> None:
        self.address = address
        self._open_channel = open_channel
        self._opened: Stubs | None = None
        self._closed = False

    @property
    def stubs(self) -> Stubs:
        """The services. Raises RuntimeError once closed."""
        if self._closed:
            raise RuntimeError("this client is closed")
        if self._opened is None:
            channel = self._open_channel(self.address)
            self._opened = Stubs(
                channel,
                generation_pb2_grpc.GenerationStub(channel),
                worker_pb2_grpc.MeshStub(channel),
            )
        return self._opened

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Errors of calls to this router leave the block as TandemError."""
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, self.address) from error
        except asyncio.CancelledError:
            # grpc.aio raises this also where the server, and not this task, has ended the call.
            task = asyncio.current_task()
            if self._closed or task is None or task.cancelling():
                raise
            raise Cancelled(f"{self.address} ended the call as cancelled") from None

    async def close(self) -> None:
        """Close the channel; running calls are cancelled. May be called twice."""
        self._closed = True
        opened, self._opened = self._opened, None
        if opened is not None:
            await opened.channel.close()


class Routers:
    """All of them. `addresses` are separated by commas. Raises InvalidRequest."""

    def __init__(self, addresses: str, open_channel: ChannelFactory) -> None:
        names = [address.strip() for address in addresses.split(",")]
        if not all(names):
            raise InvalidRequest('the address must be like "127.0.0.1:50051", or several of them with commas between')
        self._all = [Router(address, open_channel) for address in dict.fromkeys(names)]

    def __iter__(self) -> Iterator[Router]:
        """Each once, the preferred one first."""
        return iter(list(self._all))

    def prefer(self, router: Router) -> None:
        """Ask this one first."""
        place = self._all.index(router)
        self._all = self._all[place:] + self._all[:place]

    def avoid(self, router: Router) -> None:
        """Ask the one behind it first; nothing changes if another one is preferred already."""
        if self._all[0] is router:
            self._all = [*self._all[1:], router]
