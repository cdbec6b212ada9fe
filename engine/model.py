"""The contract of a model: tokens and metadata in, hidden states and logits out. It knows no sequences or sampling.

A forward pass computes its layers in groups, each announced once its KV is written.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.backend import AttentionBackend, AttentionShape, ForwardMetadata
from engine.kv.cache import KVCache
from engine.kv.scales import NO_SCALES, KVScale
from engine.models.encoder_decoder.config import AnyConfig
from engine.sampling.row_math import Logits, RowMath
from mesh.domain.host import Cores
from mesh.domain.kv import Span


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """Iterates over ranges of layers `[first, stop)`. The caller writes the KV of a range before it requests the next.

    Without `announce` there is one group of all layers.
    """

    num_layers: int
    size: int
    announce: Callable[[Span], None] | None = None
    first: int = 0

    def within(self, layers: Span) -> "LayerGroups":
        """The groups of these layers."""
        return replace(self, num_layers=layers.count, first=layers.first)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        end, size = self.first + self.num_layers, self.size if self.announce is not None else self.num_layers
        for first in range(self.first, end, size):
            stop = min(first + size, end)
            yield first, stop
            if self.announce is not None:
                self.announce(Span(first, stop - first))


Finish = Callable[[], Tensor]
"""Waits for the end of a forward pass. Returns hidden states [num_tokens, hidden_size] before the final norm, which may
be a buffer of the model, valid until the next pass begins. Rows that are not in `ForwardMetadata.result_rows` may
hold the residual of an earlier layer. Passes are finished in the order in which they began.
"""


def finish_with(wait: Callable[[], None], hidden: Tensor) -> Finish:
    """The end of a pass whose result is in `hidden` once `wait` has returned."""

    def finish() -> Tensor:
        wait()
        return hidden

    return finish


class DecoderMemory(NamedTuple):
    """The KV cache; attention backends that read it, by the shape of a layer's heads; the scales of KV by layer, where
    they are not 1.
    """

    cache: KVCache
    attentions: Mapping[AttentionShape, AttentionBackend]
    scales: Mapping[int, KVScale] = NO_SCALES

    @property
    def attention(self) -> AttentionBackend:
        """The only backend, or that of the last shape."""
        return [*self.attentions.values()][-1]


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
    def row_math(self) -> RowMath:
        """The operations on rows of logits that fit where this model leaves them."""
        ...

    @property
    def phase_cycles(self) -> NDArray[np.int64] | None:
        """Total CPU cycles per phase (engine.kernels.cpu.threads.phases); None if the model does not count them."""
        ...

    @property
    def borrows_cores(self) -> bool:
        """True if forward passes use cores that `use_cores` has lent."""
        ...

    def use_cores(self, lent: Cores) -> None:
        """Lend cores to the next `begin`, as `Runner.use_cores` does."""
        ...

    def begin(self, token_ids: Tensor, metadata: ForwardMetadata, layer_groups: LayerGroups) -> "Finish":
        """Begin a forward pass, which writes the tokens' KV to the cache. Each pipeline stage may compute another pass;
        without stages the pass is complete when this returns.

        token_ids: [num_tokens] int64. The caller keeps `metadata` until the pass ends.
        """
        ...

    def logits(self, hidden: Tensor) -> Logits:
        """The logits for rows of a pass's result, valid until the next call."""
        ...
