"""Parameters: the loaded parameters of a model: plain tensors by name, and matrices as LinearParameters.

A scheme defines the encoding of a matrix: float or int8. Every memory layout of a matrix, oneDNN's or that of the
compiled loops, is built from LinearParameters, so each scheme is implemented once.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

INT8_LEVELS = 127
_TINY = 1e-20  # minimum scale, for rows of zeros


@dataclass(frozen=True, slots=True, eq=False)
class LinearParameters:
    """A matrix [outputs, inputs] and its bias [outputs].

    Scheme "float": `weight` is the matrix. Scheme "int8": row `output` of the matrix is `scales[output] *
    weight[output]`, with `weight` in [-127, 127] and fp32 scales. Tensor-parallel ranks split the matrix along
    `shard_axis`: 0 for outputs, 1 for inputs.
    """

    weight: Tensor
    scheme: str = "float"
    scales: Tensor | None = None
    bias: Tensor | None = None
    shard_axis: int = 0

    @property
    def num_outputs(self) -> int:
        return self.weight.shape[0]


def _keep(weight: Tensor) -> LinearParameters:
    return LinearParameters(weight)


def _round_to_int8(weight: Tensor) -> LinearParameters:
    """Round to int8 with one scale per output."""
    scales = weight.abs().amax(1).to(torch.float32).clamp_(min=_TINY).div_(INT8_LEVELS)
    return LinearParameters(torch.round(weight / scales[:, None]).to(torch.int8), "int8", scales)


SCHEMES: Mapping[str, Callable[[Tensor], LinearParameters]] = {"float": _keep, "int8": _round_to_int8}
"""Conversions of floating-point weights [outputs, inputs] to each scheme."""


class Parameters:
    """The parameters of a model by name, with all matrices in one scheme.

    A model takes each parameter once. A taken parameter is removed here, so that its memory can be freed as soon as the
    model has copied it to its own layout.
    """

    def __init__(self, scheme: str = "float") -> None:
        self.scheme = scheme
        self._tensors: dict[str, Tensor] = {}
        self._linears: dict[str, LinearParameters] = {}

    def put(self, name: str, values: Tensor, shard_axis: int | None) -> None:
        """Add a parameter. It is a matrix, and converted to the scheme, if `shard_axis` is not None."""
        if shard_axis is None:
            self._tensors[name] = values
        else:
            self._linears[name] = replace(SCHEMES[self.scheme](values), shard_axis=shard_axis)

    def take(self, name: str) -> Tensor:
        """Remove and return a parameter that is not a matrix. Raises KeyError if it does not exist."""
        return self._tensors.pop(name)

    def take_optional(self, name: str) -> Tensor | None:
        """As `take`, but returns None if the parameter does not exist."""
        return self._tensors.pop(name, None)

    def take_linear(self, name: str) -> LinearParameters:
        """Remove and return a matrix with its bias, `{name}_bias`, if any. Raises KeyError if it does not exist."""
        return replace(self._linears.pop(name), bias=self.take_optional(f"{name}_bias"))

    def take_output(self, embedding: Tensor) -> LinearParameters:
        """Remove and return the output matrix "lm_head"; if absent, it is `embedding` [vocab_size, hidden_size]."""
        if "lm_head" not in self._linears:
            self.put("lm_head", embedding, shard_axis=0)
        return self.take_linear("lm_head")
