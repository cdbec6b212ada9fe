"""The scheme "int8" on CPU: weights scaled per output, activations per row, integer products by oneDNN.

Integer sums are exact, so a row's result does not depend on its batch. The compiled loop that norms or gates
activations also quantises them; their scales are applied to the product.
"""

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.kernels.cpu.row_kernels import (
    ZERO_POINT,
    add_scaled_rows,
    norm_quantise,
    quantise,
    scale_rows,
    silu_gate_quantise,
)
from engine.models.layers import Activation, Norm
from engine.models.linear_parameters import LinearParameters
from mesh.domain.errors import ConfigurationError

# oneDNN's weight layout is optimised for this number of rows; it is fast for 1 to 512.
_PACKED_FOR_ROWS = 32


class QuantisedRows(NamedTuple):
    """scales[row] * (q - 128): q [rows, width] bytes, scales [rows] fp32."""

    q: Tensor
    scales: Tensor


class Int8Ops:
    """Ops of int8 linear layers; rows are QuantisedRows. Raises ConfigurationError if torch has no oneDNN."""

    def __init__(self) -> None:
        if not hasattr(torch.ops.onednn, "qlinear_prepack"):
            raise ConfigurationError("quantize=int8 needs a torch with oneDNN")
        # Without VNNI, pairs of products are added in 16 bits, which 8-bit activations would overflow.
        self._levels = np.float32(127 if torch.cpu._is_vnni_supported() else 63)

    def rows(self, x: Tensor) -> QuantisedRows:
        out = _empty(x.shape[0], x.shape[1])
        quantise(x.contiguous().numpy(), self._levels, out.q.numpy(), out.scales.numpy())
        return out

    def values(self, rows: QuantisedRows) -> Tensor:
        return (rows.q.to(torch.float32) - ZERO_POINT) * rows.scales[:, None]

    def norm(self, x: Tensor, norm: Norm) -> QuantisedRows:
        if norm.centred:
            return self.rows(norm(x))
        out = _empty(x.shape[0], x.shape[1])
        arrays = (out.q.numpy(), out.scales.numpy())
        norm_quantise(x.contiguous().numpy(), norm.weight.numpy(), np.float32(norm.eps), self._levels, arrays)
        return out

    def activated(self, activation: Activation, x: Tensor) -> QuantisedRows:
        return self.rows(activation(x))

    def gated(self, activation: Activation, gate_up: Tensor) -> QuantisedRows:
        width = gate_up.shape[1] // 2
        if activation is not torch.nn.functional.silu:
            return self.rows(activation(gate_up[:, :width]) * gate_up[:, width:])
        out = _empty(gate_up.shape[0], width)
        silu_gate_quantise(gate_up.numpy(), self._levels, out.q.numpy(), out.scales.numpy())
        return out


class Int8Linear:
    """QuantisedRows times weight [outputs, inputs] transposed, plus bias -> fp32 [rows, outputs]."""

    def __init__(self, parameters: LinearParameters) -> None:
        assert parameters.scales is not None
        weight = parameters.weight
        self.ops = _shared_ops()
        self._bias, self._scales = parameters.bias, parameters.scales
        self._packed = torch.ops.onednn.qlinear_prepack(weight, [_PACKED_FOR_ROWS, weight.shape[1]])
        self._zero_points = torch.zeros(weight.shape[0], dtype=torch.int64)

    def __call__(self, rows: QuantisedRows) -> Tensor:
        product = self._multiply(rows)
        scale_rows(product.numpy(), rows.scales.numpy())
        return product if self._bias is None else product.add_(self._bias)

    def add_to(self, residual: Tensor, rows: QuantisedRows) -> Tensor:
        add_scaled_rows(residual.numpy(), self._multiply(rows).numpy(), rows.scales.numpy())
        return residual if self._bias is None else residual.add_(self._bias)

    def _multiply(self, rows: QuantisedRows) -> Tensor:
        """The product without the rows' scales."""
        product: Tensor = torch.ops.onednn.qlinear_pointwise(
            *(rows.q, 1.0, ZERO_POINT),
            *(self._packed, self._scales, self._zero_points, None),
            *(1.0, 0, torch.float32, "none", [], ""),
        )
        return product


@cache
def _shared_ops() -> Int8Ops:
    return Int8Ops()


def _empty(rows: int, width: int) -> QuantisedRows:
    return QuantisedRows(torch.empty((rows, width), dtype=torch.uint8), torch.empty(rows))
