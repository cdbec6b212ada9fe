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
from engine.ranks.shared import Forward, SharedGroup, read_metadata
from mesh.domain.errors import WorkerLost

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


def gloo(store: "Store", rank: int, size: int, host: str = "127.0.0.1") -> "Backend":
    """Connect to the other ranks, at this machine's address `host`. Returns when all have called it, with stores of the
    same contents.

    Raises RuntimeError if one of them does not come.
    """
    options = distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = _TIMEOUT
    return distributed.ProcessGroupGloo(store, rank, size, options)


class SummingGroup:
    """One rank's view of a group whose ranks each compute a part of every sum. `shared` carries the steps.

    All ranks get equal bits from a sum. With more than two, the order of its terms depends on an element's place, so a
    row's result may depend on its batch in the last bit.
    """

    def __init__(self, shared: SharedGroup, backend: "Backend") -> None:
        self.rank = shared.rank
        self.size = shared.size
        self._shared = shared
        self._backend = backend

    def send_step(self, token_ids: Tensor, metadata: ForwardMetadata) -> None:
        """In rank 0: let the other ranks compute this step, too. In the others: nothing."""
        if self.rank == 0:
            self._token_ids(token_ids.shape[0]).copy_(token_ids)
            self._shared.begin_forward(metadata)

    def read_step(self, command: Forward) -> tuple[Tensor, ForwardMetadata]:
        """The step that rank 0 has sent: token ids and metadata, valid until the end of the step."""
        return self._token_ids(command.num_tokens), read_metadata(self._shared.buffers, command)

    def sum(self, part: Tensor) -> Tensor:
        """Replace `part`, a contiguous tensor of the same shape in all ranks, by the sum over ranks, and return it.

        Raises WorkerLost if another rank has ended.
        """
        try:
            self._backend.allreduce([part]).wait()  # type: ignore[attr-defined]
        except RuntimeError as error:
            raise WorkerLost(f"the ranks could not sum: {error}") from error
        return part

    def _token_ids(self, num_tokens: int) -> Tensor:
        return torch.from_numpy(self._shared.buffers.get("token_ids", num_tokens, np.int64)[:num_tokens])
