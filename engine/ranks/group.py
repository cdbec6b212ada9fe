"""The contract between a model and the ranks that compute its steps together."""

from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from engine.attention.backend import ForwardMetadata
from engine.kernels.cpu.arguments import Int64s
from engine.kernels.cpu.buffers import Buffers


class SharedBuffers(Protocol):
    """Named memory that all ranks of a group see."""

    def get(self, name: str, size: int, dtype: DTypeLike = np.float32) -> NDArray[Any]:
        """An array of at least `size` elements. Its contents are those of the last use."""
        ...


class RankGroup(Protocol):
    """Plug point: Alone, and `engine.ranks.shared.SharedGroup`."""

    @property
    def rank(self) -> int:
        """This rank's number. Rank 0, the leader, embeds and samples."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    @property
    def counter(self) -> Int64s:
        """The counter of the barrier of all ranks' threads: [1], see engine.kernels.cpu.barrier."""
        ...

    @property
    def buffers(self) -> SharedBuffers:
        """Memory for activations."""
        ...

    def begin_forward(self, metadata: ForwardMetadata) -> None:
        """In rank 0: let the other ranks compute this step, whose embedded tokens are in the buffers."""
        ...

    def begin_logits(self, num_rows: int) -> None:
        """In rank 0: let the other ranks compute logits of the rows in the buffers."""
        ...


class Alone:
    """A group of one rank."""

    rank = 0
    size = 1

    def __init__(self) -> None:
        self.counter: Int64s = np.zeros(1, np.int64)
        self.buffers: SharedBuffers = Buffers()

    def begin_forward(self, metadata: ForwardMetadata) -> None:
        pass

    def begin_logits(self, num_rows: int) -> None:
        pass
