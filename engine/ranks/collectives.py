"""Sums over the ranks of a stage, and residuals from stage to stage, by torch.distributed, for the eager decoder.

Process groups are objects, passed as arguments; torch's global groups are not used. Ranks find each other through a
store that their processes or threads share, or that the leader keeps for ranks without shared memory. The device says
which backend connects them (`_CONNECT`). Gloo, for CPUs, has TCP connections of its own: on the loopback address, or
the one that reaches the other machines. On CPU a sum takes about 0.5 ms, several times that on busy cores: it is for
models that the compiled decoder cannot run. NCCL, for GPUs, has never been run yet: it needs two of them.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, distributed

from engine.attention.backend import ForwardMetadata
from engine.model import Finish, LayerGroups, finish_with
from engine.ranks.commands import Forward
from engine.ranks.shared import SharedGroup
from mesh.domain.errors import ConfigurationError, WorkerLost
from mesh.domain.host import is_loopback
from mesh.domain.kv import Degrees, Span

if TYPE_CHECKING:
    # torch.distributed exports them, but without types.
    from torch._C._distributed_c10d import Backend, Store, Work

_TIMEOUT = timedelta(minutes=5)
"""Limit on waiting for a rank that lives. One that has ended is noticed at once."""
LOOPBACK = "127.0.0.1"


def shared_store(fd: int) -> "Store":
    """A store in a file without a name, which several processes have open."""
    return distributed.FileStore(f"/proc/self/fd/{fd}", -1)  # type: ignore[attr-defined]


class NoteStore(distributed.Store):  # type: ignore[name-defined]
    """A store that keeps its notes elsewhere, with the methods that gloo and NCCL call. `get` returns once the note is
    there; its errors become RuntimeErrors of the backend.
    """

    def __init__(self, put: Callable[[str, bytes], None], get: Callable[[str], bytes]) -> None:
        super().__init__()
        self._put = put
        self._get = get

    def set(self, key: str, value: bytes) -> None:
        self._put(key, bytes(value))

    def get(self, key: str) -> bytes:
        return self._get(key)

    def wait(self, keys: Sequence[str], timeout: timedelta = _TIMEOUT) -> None:
        for key in keys:
            self._get(key)


def require_backend(device: torch.device) -> None:
    """Raise ConfigurationError if nothing connects ranks on devices of this type."""
    if device.type not in _CONNECT:
        raise ConfigurationError(f"ranks on {device} cannot be connected: use {' or '.join(_CONNECT)}, or one rank")


def _gloo(store: "Store", rank: int, size: int, device: torch.device, host: str) -> "Backend":
    options = distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = _TIMEOUT
    return distributed.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: "Store", rank: int, size: int, device: torch.device, host: str) -> "Backend":
    if is_loopback(host):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # else NCCL listens on the network, without a credential
    # Torch's own watch would abort the process without a reason; ours are the connection and the stall watch.
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = _TIMEOUT
    group: Backend = distributed.ProcessGroupNCCL(store, rank, size, options)
    group.eager_connect_single_device(device)
    return group


_CONNECT: "MappingProxyType[str, Callable[[Store, int, int, torch.device, str], Backend]]" = MappingProxyType(
    {"cpu": _gloo, "cuda": _nccl}
)
"""Connects the members of a group, by type of their devices. Returns when all have called it, with stores of the same
contents. Raises RuntimeError if one of them does not come.
"""


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's place among all: its device, and the address of its machine that reaches the others."""

    rank: int
    degrees: Degrees
    device: torch.device
    host: str = LOOPBACK

    @property
    def stage(self) -> int:
        return self.rank // self.degrees.tensor

    @property
    def sends_to(self) -> int | None:
        """The rank that takes this one's residual: of the next stage, or rank 0, from the last stage; None: no rank."""
        target = self.rank + self.degrees.tensor
        if target < self.degrees.num_ranks:
            return target
        return 0 if self.degrees.pipeline > 1 and self.rank % self.degrees.tensor == 0 else None

    @property
    def takes_from(self) -> int | None:
        """The rank whose residual comes here."""
        if self.degrees.pipeline == 1:
            return None
        if self.stage > 0:
            return self.rank - self.degrees.tensor
        return self.degrees.num_ranks - self.degrees.tensor if self.rank == 0 else None


def summing(store: "Store", place: Place) -> "Backend | None":
    """Connect the ranks of a stage; None if there is one. Returns when all have called it. Raises RuntimeError."""
    number, size = place.rank % place.degrees.tensor, place.degrees.tensor
    if size == 1:
        return None
    stage_store = distributed.PrefixStore(f"stage-{place.stage}", store)  # type: ignore[attr-defined]
    return _CONNECT[place.device.type](stage_store, number, size, place.device, place.host)


class Hops:
    """Hands residuals from stage to stage where stages share no memory. A connection has one direction: with both on
    one, NCCL would wait for ever, since it executes a connection's operations in their order on both sides.
    """

    def __init__(self, store: "Store", place: Place) -> None:
        self._incoming: Backend | None = None
        self._outgoing: Backend | None = None
        self._sending: tuple[Work, Tensor] | None = None
        # All ranks connect in the order of the senders, so that no two wait for each other.
        sources = [source for source in (place.takes_from, place.rank) if source is not None]
        for source in sorted(sources):
            hop_store = distributed.PrefixStore(f"hop-{source}", store)  # type: ignore[attr-defined]
            is_target = source != place.rank
            if not is_target and place.sends_to is None:
                continue
            hop = _CONNECT[place.device.type](hop_store, int(is_target), 2, place.device, place.host)
            if is_target:
                self._incoming = hop
            else:
                self._outgoing = hop

    def send(self, residual: Tensor) -> None:
        """Send to the rank that takes it, if there is one. Returns before it has arrived."""
        if self._outgoing is None:
            return
        if self._sending is not None:
            _waited(self._sending[0])
        contiguous = residual.contiguous()
        self._sending = self._outgoing.send([contiguous], 1, 0), contiguous  # type: ignore[attr-defined]

    def receive(self, like: Tensor, num_tokens: int) -> Tensor:
        """The residual of the stage before, [num_tokens, width of `like`]. Raises WorkerLost."""
        assert self._incoming is not None
        residual = torch.empty(num_tokens, like.shape[-1], dtype=like.dtype, device=like.device)
        _waited(self._incoming.recv([residual], 0, 0))  # type: ignore[attr-defined]
        return residual


class CollectiveGroup:
    """One rank's view of a group for the eager decoder. Implements SummingGroup. `shared` carries the steps. Stages
    hand over the residual in its memory, or by `hops`; then rank 0 announces the KV of the stages after `own_layers`,
    which report nothing, once a step is complete.

    All ranks of a stage get equal bits from a sum. With more than two, the order of its terms depends on an element's
    place, so a row's result may depend on its batch in the last bit.
    """

    def __init__(
        self,
        shared: SharedGroup,
        backend: "Backend | None",
        device: torch.device,
        own_layers: Span,
        hops: Hops | None,
    ) -> None:
        self.rank = shared.rank
        self.degrees = shared.degrees
        self.sums = backend is not None
        self._shared = shared
        self._backend = backend
        self._device = device
        self._own_layers = own_layers
        self._hops = hops
        self._is_alone = False

    @property
    def steps(self) -> SharedGroup:
        """The group in whose memory steps and commands are handed to the ranks."""
        return self._shared

    @contextmanager
    def without_sums(self) -> Iterator[None]:
        """Leave sums out, so that this rank waits for no other, and its results are of no use."""
        self._is_alone = True
        try:
            yield
        finally:
            self._is_alone = False

    def send_step(self, token_ids: Tensor, metadata: ForwardMetadata, layer_groups: LayerGroups) -> None:
        self._token_ids(token_ids.shape[0]).copy_(token_ids)
        self._shared.begin_forward(metadata, layer_groups)

    def read_step(self, command: Forward, layers: Span) -> tuple[Tensor, ForwardMetadata, LayerGroups]:
        """In other ranks: the token ids of the step that rank 0 has sent, and the rest of `SharedGroup.read_step`."""
        metadata, layer_groups = self._shared.read_step(command, layers)
        token_ids = self._token_ids(command.num_tokens).to(self._device)
        return token_ids, _metadata_on(self._device, metadata), layer_groups

    def residual(self, like: Tensor, num_tokens: int) -> Tensor:
        if self._hops is not None:
            return self._hops.receive(like, num_tokens)
        return self._shared_residual(like, num_tokens)

    def end_forward(self, residual: Tensor, layer_groups: LayerGroups) -> Finish:
        if self.degrees.pipeline == 1:
            return lambda: residual
        if self._hops is not None:
            self._hops.send(residual)
            return lambda: self._returned(residual, layer_groups)
        handed_over = self._shared_residual(residual, len(residual)).copy_(residual)
        return finish_with(self._shared.end_forward(layer_groups), handed_over)

    def end_stage(self, residual: Tensor) -> None:
        """In other ranks: the stage has computed its layers."""
        if self._hops is not None:
            self._hops.send(residual)
            return
        if self._shared.stage > 0 and self._shared.tensor_rank == 0:
            self._shared_residual(residual, len(residual)).copy_(residual)
        self._shared.end_stage()

    def sum(self, part: Tensor) -> Tensor:
        assert self._backend is not None
        if self._is_alone:
            return part
        try:
            self._backend.allreduce([part]).wait()  # type: ignore[attr-defined]
        except RuntimeError as error:
            raise WorkerLost(f"the ranks could not sum: {error}") from error
        return part

    def _returned(self, like: Tensor, layer_groups: LayerGroups) -> Tensor:
        assert self._hops is not None
        residual = self._hops.receive(like, len(like))
        if layer_groups.announce is not None:
            first = self._own_layers.end
            layer_groups.announce(Span(first, layer_groups.num_layers - first))
        return residual

    def _shared_residual(self, like: Tensor, num_tokens: int) -> Tensor:
        width = like.shape[-1]
        num_floats = -(-num_tokens * width * like.element_size() // 4)
        shared = torch.from_numpy(self._shared.buffers.get("residual", num_floats)[:num_floats])
        return shared.view(like.dtype)[: num_tokens * width].view(num_tokens, width)

    def _token_ids(self, num_tokens: int) -> Tensor:
        return torch.from_numpy(self._shared.buffers.get("token_ids", num_tokens, np.int64)[:num_tokens])


def _metadata_on(device: torch.device, metadata: ForwardMetadata) -> ForwardMetadata:
    if device.type == "cpu":
        return metadata
    values = {f.name: getattr(metadata, f.name) for f in fields(metadata)}
    moved: dict[str, Any] = {name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)}
    return replace(metadata, **moved)


def _waited(work: "Work") -> None:
    """On a GPU what is computed next waits, not this thread. Raises WorkerLost."""
    try:
        work.wait()
    except RuntimeError as error:
        raise WorkerLost(f"the stages could not hand over a step: {error}") from error
