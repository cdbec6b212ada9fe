"""Int8 on CPU: weights scaled per output channel, activations per row, integer products by oneDNN.

Integers add up exactly, so a row's result does not depend on its batch. Activations are quantised by the compiled loop
that also normalises or gates them, and their scales are applied to the product afterwards.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.models.layers import Activation, Norm
from engine.models.row_kernels import (
    ZERO_POINT,
    add_scaled_rows,
    norm_quantise,
    quantise,
    scale_rows,
    silu_gate_quantise,
)
from mesh.domain.errors import ConfigurationError

_WEIGHT_LEVELS = 127
# oneDNN lays weights out for so many rows; it is fast for 1 to 512.
_PACKED_FOR_ROWS = 32


class QuantisedRows(NamedTuple):
    """scales[row] * (q - 128): q [rows, width] bytes, scales [rows] fp32."""

    q: Tensor
    scales: Tensor


class Int8Linear:
    """QuantisedRows times weight [outputs, inputs] transposed, plus bias -> fp32 [rows, outputs]."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._bias = bias
        self._scales = weight.abs().amax(1).to(torch.float32).clamp_(min=1e-20).div_(_WEIGHT_LEVELS)
        rounded = torch.round(weight / self._scales[:, None]).to(torch.int8)
        self._packed = torch.ops.onednn.qlinear_prepack(rounded, [_PACKED_FOR_ROWS, weight.shape[1]])
        self._zero_points = torch.zeros(weight.shape[0], dtype=torch.int64)

    def __call__(self, rows: QuantisedRows) -> Tensor:
        """Apply to rows."""
        product = self._multiply(rows)
        scale_rows(product.numpy(), rows.scales.numpy())
        return product if self._bias is None else product.add_(self._bias)

    def add_to(self, residual: Tensor, rows: QuantisedRows) -> Tensor:
        """`residual` plus the product; may write into `residual`."""
        add_scaled_rows(residual.numpy(), self._multiply(rows).numpy(), rows.scales.numpy())
        return residual if self._bias is None else residual.add_(self._bias)

    def _multiply(self, rows: QuantisedRows) -> Tensor:
        """Without the rows' scales."""
        product: Tensor = torch.ops.onednn.qlinear_pointwise(
            *(rows.q, 1.0, ZERO_POINT),
            *(self._packed, self._scales, self._zero_points, None),
            *(1.0, 0, torch.float32, "none", [], ""),
        )
        return product


class Int8Ops:
    """Ops of a decoder on QuantisedRows; see engine.models.ops. ConfigurationError where this torch cannot do it."""

    def __init__(self) -> None:
        if not hasattr(torch.ops.onednn, "qlinear_prepack"):
            raise ConfigurationError("quantize=int8 needs a torch with oneDNN")
        # Without VNNI, pairs of products are added in 16 bits, which full bytes would overflow.
        self._levels = np.float32(127 if torch.cpu._is_vnni_supported() else 63)

    def linear(self, weight: Tensor, bias: Tensor | None) -> Int8Linear:
        """A linear layer."""
        return Int8Linear(weight, bias)

    def rows(self, x: Tensor) -> QuantisedRows:
        """x [rows, width] as linear layers take it."""
        out = _empty(x.shape[0], x.shape[1])
        quantise(x.contiguous().numpy(), self._levels, out.q.numpy(), out.scales.numpy())
        return out

    def values(self, rows: QuantisedRows) -> Tensor:
        """The reverse of `rows`, in fp32."""
        return (rows.q.to(torch.float32) - ZERO_POINT) * rows.scales[:, None]

    def norm(self, x: Tensor, norm: Norm) -> QuantisedRows:
        """The norm of x [rows, width]."""
        if norm.centred:
            return self.rows(norm(x))
        out = _empty(x.shape[0], x.shape[1])
        arrays = (out.q.numpy(), out.scales.numpy())
        norm_quantise(x.contiguous().numpy(), norm.weight.numpy(), np.float32(norm.eps), self._levels, arrays)
        return out

    def activated(self, activation: Activation, x: Tensor) -> QuantisedRows:
        """activation(x)."""
        return self.rows(activation(x))

    def gated(self, activation: Activation, gate_up: Tensor) -> QuantisedRows:
        """activation(gate) * up of [rows, 2 * width]."""
        width = gate_up.shape[1] // 2
        if activation is not torch.nn.functional.silu:
            return self.rows(activation(gate_up[:, :width]) * gate_up[:, width:])
        out = _empty(gate_up.shape[0], width)
        silu_gate_quantise(gate_up.numpy(), self._levels, out.q.numpy(), out.scales.numpy())
        return out


def _empty(rows: int, width: int) -> QuantisedRows:
    return QuantisedRows(torch.empty((rows, width), dtype=torch.uint8), torch.empty(rows))
