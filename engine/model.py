"""The contract of a model: tokens and metadata in, hidden states and logits out. It knows no sequences or sampling."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.metadata import ForwardMetadata
from engine.layer_groups import LayerGroups
from engine.models.config import AnyConfig
from mesh.domain.cores import Cores


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
        """Threads for torch's operations, set by the thread that calls the model."""
        ...

    @property
    def phase_cycles(self) -> NDArray[np.int64] | None:
        """Total CPU cycles per phase (engine.kernels.cpu.phase_cycles); None if the model does not count them."""
        ...

    def use_cores(self, lent: Cores) -> None:
        """Same contract as Runner.use_cores."""
        ...

    def forward(self, token_ids: Tensor, metadata: ForwardMetadata, groups: LayerGroups) -> Tensor:
        """Hidden states [num_tokens, hidden_size] before the final norm. Writes the tokens' KV to the cache.

        token_ids: [num_tokens] int64. The result may be a buffer of the model; it is valid until the next `forward`.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits [rows, vocab_size] for rows of `forward`'s result. The caller may change them; they are valid
        until the next call.
        """
        ...
