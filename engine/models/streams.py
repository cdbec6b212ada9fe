"""Several residuals side by side, as in Gemma 3n: a layer reads and changes the first stream, and the others follow it
(AltUp, Baykal et al. 2023). The residual of a token is that of all streams, one after the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.models.encodings import Parameters
from engine.models.model_config import ModelConfig
from engine.models.norms import Norm

if TYPE_CHECKING:
    from engine.models.layer import LinearLayers
    from engine.models.linear import LinearLayer

_LEAST_SQUARE = 1e-5


@dataclass(frozen=True, slots=True)
class Streams:
    """The streams of a layer, [num_tokens, num_streams, hidden_size]. `scale`: of the first one, as it opens the gate
    of the layer's input. `left`, `right`: two narrow matrices beside attention (LAuReL, Menghani et al. 2024).
    """

    router_norm: Norm
    router: Tensor  # [num_streams, hidden_size]
    prediction: Tensor  # [num_streams * num_streams, num_streams]
    correction: Tensor  # [num_streams, num_streams]
    scale: Tensor  # [hidden_size]
    left: "LinearLayer"
    right: "LinearLayer"
    right_norm: Norm

    def predict(self, streams: Tensor) -> Tensor:
        """Add a mixture of all streams to each; the layer begins with these."""
        count = streams.shape[1]
        weights = F.linear(self._route(streams[:, 0]), self.prediction).view(-1, count, count)
        return streams + weights @ streams

    def correct(self, predicted: Tensor, first: Tensor) -> Tensor:
        """The streams after the layer, which has made `first` [num_tokens, hidden_size] of the first one."""
        shares = F.linear(self._route(first), self.correction) + 1.0
        return predicted + shares[:, :, None] * (first - predicted[:, 0])[:, None]

    def beside_attention(self, normed: Tensor) -> Tensor:
        """normed: attention's input [num_tokens, hidden_size] -> the same shape."""
        narrow = self.left(self.left.ops.rows(normed))
        return normed + self.right_norm(self.right(self.right.ops.rows(narrow)))

    def _route(self, first: Tensor) -> Tensor:
        return torch.tanh(F.linear(self.router_norm(first), self.router).float()).to(first.dtype)


def take_streams(parameters: Parameters, prefix: str, config: ModelConfig, linears: "LinearLayers") -> Streams:
    """Take the parameters of a layer."""
    names = (f"{prefix}laurel_left", f"{prefix}laurel_right")
    left, right = (linears.make_linear(name, parameters.take_linear(name)) for name in names)
    router_norm = parameters.take(f"{prefix}streams_norm") / config.hidden_size
    return Streams(
        router_norm=Norm(router_norm, None, config.norm_eps),
        router=parameters.take(f"{prefix}streams_router"),
        prediction=parameters.take(f"{prefix}prediction"),
        correction=parameters.take(f"{prefix}correction"),
        scale=parameters.take(f"{prefix}streams_scale"),
        left=left,
        right=right,
        right_norm=Norm(parameters.take(f"{prefix}laurel_norm"), None, config.norm_eps),
    )


class SplitStreams:
    """The streams before the first layer: embedded tokens, and projections of them, of equal length."""

    def __init__(self, projections: Sequence["LinearLayer"]) -> None:
        self._projections = projections

    def __call__(self, embedded: Tensor) -> Tensor:
        """[num_tokens, hidden_size] -> [num_tokens, num_streams * hidden_size]."""
        length = embedded.square().mean(-1, keepdim=True).sqrt()
        projected = (linear(linear.ops.rows(embedded)) for linear in self._projections)
        return torch.cat([embedded, *(_of_length(rows, length) for rows in projected)], 1)


class JoinStreams:
    """The residual after the last layer: the mean of the first stream and of projections of the others, of equal
    length.
    """

    def __init__(self, projections: Sequence["LinearLayer"]) -> None:
        self._projections = projections

    def __call__(self, residual: Tensor) -> Tensor:
        """[num_rows, num_streams * hidden_size] -> [num_rows, hidden_size]."""
        first, *others = residual.chunk(len(self._projections) + 1, 1)
        length = first.square().mean(-1, keepdim=True).sqrt()
        projected = (linear(linear.ops.rows(x)) for linear, x in zip(self._projections, others, strict=True))
        return torch.stack([first, *(_of_length(rows, length) for rows in projected)]).mean(0)


def _of_length(rows: Tensor, length: Tensor) -> Tensor:
    own = rows.square().mean(-1, keepdim=True).clamp(min=_LEAST_SQUARE).sqrt()
    return rows * length / own
