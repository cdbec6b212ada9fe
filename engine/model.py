"""The contract of a model: tokens and metadata in, hidden states and logits out. It knows no sequences or sampling.

A forward pass computes its layers in groups, each announced once its KV is written.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.backend import AttentionBackend, ForwardMetadata
from engine.kv_cache import KVCache
from engine.models.encoder_decoder.config import AnyConfig
from mesh.domain.host import Cores


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """Iterates over ranges of layers `[first, stop)`. The caller writes the KV of a range before it requests the next.

    Without `announce` there is one group of all layers.
    """

    num_layers: int
    size: int
    announce: Callable[[int, int], None] | None = None
    """`announce(first, count)`"""

    def __iter__(self) -> Iterator[tuple[int, int]]:
        size = self.size if self.announce is not None else self.num_layers
        for first in range(0, self.num_layers, size):
            stop = min(first + size, self.num_layers)
            yield first, stop
            if self.announce is not None:
                self.announce(first, stop - first)


class DecoderMemory(NamedTuple):
    """The KV cache, and the attention backend that reads it."""

    cache: KVCache
    attention: AttentionBackend


class Model(Protocol):
    """Plug point of ModelRunner: Decoder, CompiledDecoder, EncoderDecoder. One thread calls it."""

    @property
    def config(self) -> AnyConfig:
        """The configuration read from the checkpoint."""
        ...

    @property
    def attention_backend(self) -> str:
        """Name of the attention backend in use."""
        ...

    @property
    def num_torch_threads(self) -> int:
        """Threads for torch's operations in a step."""
        ...

    @property
    def phase_cycles(self) -> NDArray[np.int64] | None:
        """Total CPU cycles per phase (engine.kernels.cpu.step); None if the model does not count them."""
        ...

    @property
    def borrows_cores(self) -> bool:
        """Same contract as Runner.borrows_cores."""
        ...

    def use_cores(self, lent: Cores) -> None:
        """Same contract as Runner.use_cores."""
        ...

    def forward(self, token_ids: Tensor, metadata: ForwardMetadata, layer_groups: LayerGroups) -> Tensor:
        """Hidden states [num_tokens, hidden_size] before the final norm. Writes the tokens' KV to the cache.

        token_ids: [num_tokens] int64. The result may be a buffer of the model; it is valid until the next `forward`.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits [rows, vocab_size] for rows of `forward`'s result. The caller may change them; they are valid
        until the next call.
        """
        ...
