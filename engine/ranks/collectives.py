"""Sums over the ranks of a group by torch.distributed, for the eager decoder.

The process group is an object of its own, passed as an argument; torch's global groups are not used. Ranks find each
other through a store that their processes or threads share, or that the leader keeps for ranks on other machines.
Gloo's own connections are TCP: on the loopback address, or the one that reaches the other machines. On CPU a sum takes
about 0.5 ms, several times that on busy cores: it is for models that the compiled decoder cannot run.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, distributed

from engine.attention.backend import ForwardMetadata
from engine.model import Finish, LayerGroups, finish_with
from engine.ranks.shared import Forward, SharedGroup
from mesh.domain.errors import WorkerLost
from mesh.domain.kv import Degrees, Span

if TYPE_CHECKING:
    # torch.distributed exports them, but without types.
    from torch._C._distributed_c10d import Backend, Store

_TIMEOUT = timedelta(minutes=5)
"""Limit on waiting for a rank that lives. One that has ended is noticed at once."""


def shared_store(fd: int) -> "Store":
    """A store in a file without a name, which several processes have open."""
    return distributed.FileStore(f"/proc/self/fd/{fd}", -1)  # type: ignore[attr-defined]


class NoteStore(distributed.Store):  # type: ignore[name-defined]
    """A store that keeps its notes elsewhere. It has what gloo calls. `get` returns once the note is there; its errors
    become RuntimeErrors of gloo.
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


def gloo(store: "Store", rank: int, degrees: Degrees, host: str = "127.0.0.1") -> "Backend | None":
    """Connect to the other ranks of the stage, at this machine's address `host`; None if there are none. Returns when
    all have called it, with stores of the same contents.

    Raises RuntimeError if one of them does not come.
    """
    stage, tensor_rank = divmod(rank, degrees.tensor)
    if degrees.tensor == 1:
        return None
    store = distributed.PrefixStore(f"stage-{stage}", store)  # type: ignore[attr-defined]
    options = distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = _TIMEOUT
    return distributed.ProcessGroupGloo(store, tensor_rank, degrees.tensor, options)


class GlooGroup:
    """One rank's view of a group for the eager decoder. Implements SummingGroup. `shared` carries the steps; stages
    hand over the residual in its memory.

    All ranks of a stage get equal bits from a sum. With more than two, the order of its terms depends on an element's
    place, so a row's result may depend on its batch in the last bit.
    """

    def __init__(self, shared: SharedGroup, backend: "Backend | None") -> None:
        self.rank = shared.rank
        self.degrees = shared.degrees
        self.sums = backend is not None
        self._shared = shared
        self._backend = backend

    def send_step(self, token_ids: Tensor, metadata: ForwardMetadata, layer_groups: LayerGroups) -> None:
        self._token_ids(token_ids.shape[0]).copy_(token_ids)
        self._shared.begin_forward(metadata, layer_groups)

    def read_step(self, command: Forward, layers: Span) -> tuple[Tensor, ForwardMetadata, LayerGroups]:
        """In other ranks: the token ids of the step that rank 0 has sent, and the rest of `SharedGroup.read_step`."""
        metadata, layer_groups = self._shared.read_step(command, layers)
        return self._token_ids(command.num_tokens), metadata, layer_groups

    def residual(self, like: Tensor, num_tokens: int) -> Tensor:
        width = like.shape[-1]
        num_floats = -(-num_tokens * width * like.element_size() // 4)
        shared = torch.from_numpy(self._shared.buffers.get("residual", num_floats)[:num_floats])
        return shared.view(like.dtype)[: num_tokens * width].view(num_tokens, width)

    def end_forward(self, residual: Tensor, layer_groups: LayerGroups) -> Finish:
        if self.degrees.pipeline == 1:
            return lambda: residual
        handed_over = self.residual(residual, len(residual)).copy_(residual)
        return finish_with(self._shared.end_forward(layer_groups), handed_over)

    def end_stage(self, residual: Tensor) -> None:
        """In other ranks: the stage has computed its layers."""
        if self._shared.stage > 0 and self._shared.tensor_rank == 0:
            self.residual(residual, len(residual)).copy_(residual)
        self._shared.end_stage()

    def sum(self, part: Tensor) -> Tensor:
        assert self._backend is not None
        try:
            self._backend.allreduce([part]).wait()  # type: ignore[attr-defined]
        except RuntimeError as error:
            raise WorkerLost(f"the ranks could not sum: {error}") from error
        return part

    def _token_ids(self, num_tokens: int) -> Tensor:
        return torch.from_numpy(self._shared.buffers.get("token_ids", num_tokens, np.int64)[:num_tokens])
