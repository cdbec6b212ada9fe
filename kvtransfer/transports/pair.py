"""A process group of torch.distributed with two members: rank 0 sends KV, rank 1 receives it.

The group is an object of its own; torch's global groups are not used. The members find each other through a store that
never leaves their processes: what one side's group puts into its store goes to the other side in the transfer's gRPC
conversation, which is authenticated. So no store listens on a port. The data of gloo and NCCL, however, is neither
authenticated nor encrypted.
"""

import asyncio
import re
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent import futures
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch import Tensor, distributed

from mesh.domain.errors import TransferFailed
from mesh.domain.host import is_loopback

if TYPE_CHECKING:
    # torch.distributed exports them, but without types.
    from torch._C._distributed_c10d import Backend, Store, Work
else:
    Store = distributed.Store

_SENDER, _RECEIVER = 0, 1
_NUM_THREADS = 2  # so the next payload is asked for while one arrives: gloo is more than twice as fast

_LOOP_CHECK_S = 1.0
_MAX_RENDEZVOUS_BYTES = 64 << 10
"""Names and values of one side; gloo's have 200 bytes."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A backend of torch.distributed. `connect(store, rank, host, timeout)` returns once both members have called it.

    Without tags, operations match in the order in which they are called, so a pair takes one transfer at a time. If
    there is a `device`, payloads must lie there. `is_mutual`: each member puts values into its store, then waits for
    those of the other; otherwise the sender puts one value, which the receiver gets.
    """

    name: str
    connect: "Callable[[Store, int, str, timedelta], Backend]"
    has_tags: bool
    is_mutual: bool
    device: str | None = None


def _gloo(store: Store, rank: int, host: str, timeout: timedelta) -> "Backend":
    options = distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timeout
    options._threads = 1
    return distributed.ProcessGroupGloo(store, rank, 2, options)


def _nccl(store: Store, rank: int, host: str, timeout: timedelta) -> "Backend":
    """Nobody has run this yet: it needs two GPUs. NCCL chooses its network interface by itself (NCCL_SOCKET_IFNAME)."""
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.config.max_ctas = 2  # KV must not take the GPU from the model
    group: Backend = distributed.ProcessGroupNCCL(store, rank, 2, options)
    group.eager_connect_single_device(torch.device("cuda", torch.cuda.current_device()))
    return group


GLOO = Kind("gloo", _gloo, has_tags=True, is_mutual=True)
NCCL = Kind("nccl", _nccl, has_tags=False, is_mutual=False, device="cuda")


class _RendezvousStore(Store):
    """One side's store, made on the event loop. `rendezvous`: all that this side's group puts into it for the other.

    The group calls the store's methods, on the thread that makes the group.
    """

    def __init__(self, theirs: Mapping[str, bytes], *, is_mutual: bool) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._is_mutual = is_mutual
        self.rendezvous: futures.Future[dict[str, bytes]] = futures.Future()
        self._ours: dict[str, bytes] = {}
        self._theirs: dict[str, bytes] = {}
        self._is_complete = False
        self._changed = threading.Condition()
        self._end: TransferFailed | None = None
        if theirs:
            self.add_theirs(theirs)

    def add_theirs(self, values: Mapping[str, bytes]) -> None:
        """Add all that the other side tells. If that is too much, all waits fail."""
        num_bytes = sum(len(key.encode()) + len(value) for key, value in values.items())
        if num_bytes > _MAX_RENDEZVOUS_BYTES:
            self.end(TransferFailed(f"the other side has told {num_bytes} bytes; the limit is {_MAX_RENDEZVOUS_BYTES}"))
            return
        with self._changed:
            self._theirs.update(values)
            self._is_complete = True
            self._changed.notify_all()

    def end(self, error: TransferFailed) -> None:
        """Let all waits fail, now and later; idempotent."""
        with self._changed:
            self._end = self._end or error
            if not self.rendezvous.done():
                self.rendezvous.set_exception(self._end)
            self._changed.notify_all()

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        with self._changed:
            self._ours[key] = bytes(value)
            self._tell(is_all=not self._is_mutual)

    def get(self, key: str) -> bytes:
        with self._changed:
            self._tell(is_all=not self._is_mutual)
            while not (self._end or self._is_complete or key in self._ours):
                self._changed.wait(_LOOP_CHECK_S)
                if self._loop.is_closed():  # nobody will end the wait: it must not keep the process
                    raise TransferFailed("the process is stopping")
            if self._end:
                raise self._end
            value = self._ours.get(key) or self._theirs.get(key)
            if not value:  # gloo would crash on an empty one
                raise TransferFailed(f"the other side has not told {key}")
            return value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """However long it takes: an offer may lie for a while before a receiver takes it up."""
        with self._changed:
            self._tell(is_all=True)
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        with self._changed:
            return all(key in self._ours or key in self._theirs for key in keys)

    def _tell(self, *, is_all: bool) -> None:
        if is_all and not self.rendezvous.done():
            self.rendezvous.set_result(dict(self._ours))


class Pair:
    """One side of a pair. The constructor starts to connect it, on a thread.

    `locate` returns this side's address; it is called on that thread and may raise TransferFailed or OSError.
    """

    def __init__(
        self, kind: Kind, name: str, locate: Callable[[], str], connect_s: float, offered: Mapping[str, bytes]
    ) -> None:
        self.kind = kind
        self.name = name
        self.host = ""
        self.is_broken = False
        self.is_joined = False
        """The other side has joined, as far as this side knows."""
        self._rank = _RECEIVER if offered else _SENDER
        self._locate = locate
        self._connect_timeout = timedelta(seconds=connect_s)
        self._store = _RendezvousStore(offered, is_mutual=kind.is_mutual)
        self._group: Backend | None = None
        self._next_tag = 0
        self._abandoned: list[Work] = []
        num_threads = _NUM_THREADS if kind.has_tags else 1  # one keeps the order
        self._threads = futures.ThreadPoolExecutor(num_threads, thread_name_prefix=f"kv-{kind.name}")
        self.connected: futures.Future[None] = self._threads.submit(self._connect)

    @property
    def rendezvous(self) -> futures.Future[dict[str, bytes]]:
        """The values that the other side needs. `host` is set once they are there. Raises TransferFailed."""
        return self._store.rendezvous

    @property
    def num_abandoned(self) -> int:
        """The number of payloads that have been sent to a receiver that may never take them."""
        return len(self._abandoned)

    def join(self, rendezvous: Mapping[str, bytes]) -> None:
        """Go on connecting, with the values of the other side."""
        self._store.add_theirs(rendezvous)

    def next_tag(self) -> int:
        """Return a tag that this pair has not used. On the event loop only."""
        self._next_tag += 1
        return self._next_tag

    def send(self, payload: Tensor, tag: int) -> "Work":
        """Begin to send, and return at once. `payload` must stay as it is while the result exists, until it is
        received. Raises TransferFailed."""
        group = self._group
        if self.is_broken or group is None:
            raise TransferFailed(f"the {self.kind.name} pair with the receiver is broken")
        try:
            data = payload if self.kind.device is None else payload.to(self.kind.device)
            return group.send([data], _RECEIVER, tag)  # type: ignore[attr-defined]
        except RuntimeError as error:
            raise self._broken(error) from error

    def receive(self, payload: Tensor, tag: int, timeout_s: float) -> futures.Future[None]:
        """Fill `payload` on a thread of this pair. The result raises TransferFailed; the pair is broken then."""
        return self._threads.submit(self._receive, payload, tag, timedelta(seconds=timeout_s))

    def abandon(self, work: "Work") -> None:
        """Keep a payload that nobody will take until the pair is closed: gloo may read its memory."""
        self._abandoned.append(work)

    def close(self) -> None:
        """Free the group, on a thread. Nobody uses it any more."""
        self._store.end(TransferFailed(f"the {self.kind.name} pair was closed"))
        self._threads.submit(self._free)
        self._threads.shutdown(wait=False)

    def _connect(self) -> None:
        try:
            self.host = self._locate()
            self._group = self.kind.connect(self._store, self._rank, self.host, self._connect_timeout)
        except Exception as error:
            failed = error if isinstance(error, TransferFailed) else self._broken(error)
            self.is_broken = True
            self._store.end(failed)
            raise failed from error

    def _receive(self, payload: Tensor, tag: int, timeout: timedelta) -> None:
        group = self._group
        if self.is_broken or group is None:
            raise TransferFailed(f"the {self.kind.name} pair with the sender is broken")
        try:
            target = payload if self.kind.device is None else torch.empty_like(payload, device=self.kind.device)
            group.recv([target], _SENDER, tag).wait(timeout)  # type: ignore[attr-defined]
            if target is not payload:
                payload.copy_(target)
        except RuntimeError as error:
            raise self._broken(error) from error

    def _broken(self, error: Exception) -> TransferFailed:
        """After an error or a timeout a group is of no use: gloo has closed its connection."""
        self.is_broken = True
        reason = re.sub(r"^\[[^]]*\] ", "", str(error)).partition(". ")[0]  # without gloo's source line and advice
        return TransferFailed(f"{self.kind.name}: {reason}")

    def _free(self) -> None:
        futures.wait([self.connected])
        self._abandoned.clear()
        group, self._group = self._group, None
        if group is not None and self.kind.device is not None:
            group.abort()


def pair_name(sender: str, number: int) -> str:
    """Return the name of a sender's pair. Later pairs of a sender have higher numbers."""
    return f"{sender}-{number}"


def parse_pair_name(name: str) -> tuple[str, int] | None:
    """Return sender and number, None if `name` is no name of a pair."""
    sender, _, number = name.rpartition("-")
    return (sender, int(number)) if sender and number.isdecimal() and len(number) < 20 else None


def new_sender_name() -> str:
    """Return a name that no other sender has."""
    return secrets.token_hex(8)


def address_towards(host: str, port: int, *, trust_fabric: bool) -> str:
    """Return the IP address of this machine from which it reaches `host`. Raises OSError if it does not, and
    TransferFailed if the way leaves the machine and the network is not trusted."""
    family, _, _, _, remote = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(remote)  # sends nothing
        address: str = probe.getsockname()[0]
    if not trust_fabric and not is_loopback(address):
        raise TransferFailed(
            f"{host} is reached over the network, where this transport is neither authenticated nor encrypted; "
            "if nobody else can use that network, set --trust-fabric on both workers"
        )
    return address
