"""The contracts between a model and the ranks that compute its steps together: RankGroup of the compiled decoder,
SummingGroup of the eager one, whose parts of layers are Summed.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from engine.attention.backend import ForwardMetadata
from engine.kernels.cpu.arguments import Int64s
from engine.kernels.cpu.buffers import Buffers
from engine.model import Finish, LayerGroups
from mesh.domain.kv import Degrees

if TYPE_CHECKING:
    from engine.models.layer import Mlp
    from engine.models.linear import LinearLayer, Rows


class SharedBuffers(Protocol):
    """Named memory that all ranks of a stage see."""

    @property
    def version(self) -> int:
        """Changes whenever an array moves."""
        ...

    def get(self, name: str, size: int, dtype: DTypeLike = np.float32) -> NDArray[Any]:
        """An array of at least `size` elements. Its contents are those of the last use."""
        ...


class _Member(Protocol):
    @property
    def rank(self) -> int:
        """This rank's number. Rank 0, the leader, embeds and samples."""
        ...

    @property
    def degrees(self) -> Degrees:
        """Number of ranks in each stage, and number of stages."""
        ...


class RankGroup(_Member, Protocol):
    """Plug point: Alone, and `engine.ranks.shared.SharedGroup`."""

    @property
    def counter(self) -> Int64s:
        """The counter of the barrier of all threads of the stage: [1], see engine.kernels.cpu.threads.barrier."""
        ...

    @property
    def buffers(self) -> SharedBuffers:
        """Memory for activations of the stage's current step."""
        ...

    def begin_forward(self, metadata: ForwardMetadata, layer_groups: LayerGroups) -> None:
        """In rank 0: let the stage's other ranks compute this step, whose embedded tokens are in the buffers."""
        ...

    def end_forward(self, layer_groups: LayerGroups) -> Callable[[], None]:
        """In rank 0: let the next stages compute this step, which the stage has computed. The result waits for
        them, and announces their layers. From now on the buffers are those of another step.
        """
        ...

    def begin_logits(self, num_rows: int) -> None:
        """In rank 0: let the stage's other ranks compute logits of the rows in the buffers."""
        ...


class Alone:
    """A group of one rank."""

    rank = 0
    degrees = Degrees()

    def __init__(self) -> None:
        self.counter: Int64s = np.zeros(1, np.int64)
        self.buffers: SharedBuffers = Buffers()

    def begin_forward(self, metadata: ForwardMetadata, layer_groups: LayerGroups) -> None:
        pass

    def end_forward(self, layer_groups: LayerGroups) -> Callable[[], None]:
        return lambda: None

    def begin_logits(self, num_rows: int) -> None:
        pass


class SummingGroup(_Member, Protocol):
    """Plug point: `engine.ranks.collectives.CollectiveGroup`. The ranks of a stage each compute a part of every sum."""

    @property
    def sums(self) -> bool:
        """False if the rank has its stage to itself."""
        ...

    def send_step(self, token_ids: Tensor, metadata: ForwardMetadata, layer_groups: LayerGroups) -> None:
        """In rank 0: let the stage's other ranks compute this step, too."""
        ...

    def residual(self, like: Tensor, num_tokens: int) -> Tensor:
        """The residual that the stage before has handed over, [num_tokens, width of `like`]."""
        ...

    def end_forward(self, residual: Tensor, layer_groups: LayerGroups) -> Finish:
        """In rank 0: let the next stages compute the step that this stage has computed."""
        ...

    def sum(self, part: Tensor) -> Tensor:
        """Replace `part`, a contiguous tensor of the same shape in all ranks of the stage, by its sum over them, and
        return it. Raises WorkerLost if another rank has ended.
        """
        ...


class Summed:
    """A projection or an MLP that the ranks of a stage compute in parts: the sum of these."""

    def __init__(self, part: "LinearLayer | Mlp", ranks: SummingGroup) -> None:
        self.ops = part.ops
        self._part = part
        self._ranks = ranks

    def __call__(self, x: "Rows") -> Tensor:
        return self._ranks.sum(self._part(x))

    def add_to(self, residual: Tensor, x: "Rows") -> Tensor:
        return residual + self(x)
