"""Linear layers: how each encoding multiplies with a matrix, and the norms and activations that feed it.

A LinearLayer multiplies with a matrix; the Ops of its encoding (`engine/models/encodings.py`) make its input rows, so
that a norm or an activation needs no separate pass over memory. On CPU the encoding "int8" has weights scaled per
output, activations scaled per row, and integer products by oneDNN. Integer sums are exact, so a row's result does not
depend on its batch.

CONTRIBUTING.md has the recipe for a new encoding.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.kernels.cpu.machine import cpu_flags, why_no_loops
from engine.kernels.cpu.products.byte_matrix import ByteMatrix
from engine.kernels.cpu.products.int8_rows import (
    add_scaled_rows,
    norm_quantise,
    quantise,
    scale_rows,
    silu_gate_quantise,
)
from engine.models.activations import Activation
from engine.models.encodings import LinearParameters
from engine.models.norms import Norm, is_cpu_fp32
from mesh.domain.errors import ConfigurationError

# oneDNN's weight layout is optimised for this number of rows; measured, it is as fast as any other for 1 to 512.
_PACKED_FOR_ROWS = 64
# Smaller weights are not packed: a oneDNN call costs 40 microseconds.
_MIN_PACKED_ELEMENTS = 2**19


def _can_pack() -> bool:
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


@dataclass(frozen=True, slots=True)
class FloatOps:
    """Ops of floating-point linear layers; rows are tensors of the matrix's dtype."""

    dtype: torch.dtype

    def rows(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)

    def values(self, x: Tensor) -> Tensor:
        return x

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        return norm(x).to(self.dtype)

    def activated(self, activation: Activation, x: Tensor) -> Tensor:
        return activation(x.to(self.dtype))

    def gated(self, activation: Activation, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.to(self.dtype).chunk(2, -1)
        return activation(gate) * up


@cache
def _ops_of(dtype: torch.dtype) -> FloatOps:
    return FloatOps(dtype)


class Linear:
    """x [rows, inputs] times weight [outputs, inputs] transposed, plus bias -> [rows, outputs].

    On CPU in fp32 a large weight is stored in oneDNN's blocked layout only, which makes products of 4 to 64 rows up to
    2.5 times as fast as torch's.
    """

    def __init__(self, parameters: LinearParameters) -> None:
        weight = parameters.weight
        self.ops = _ops_of(weight.dtype)
        self._bias = parameters.bias
        self._packed = weight.numel() >= _MIN_PACKED_ELEMENTS and is_cpu_fp32(weight) and _can_pack()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS) if self._packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed:
            product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return product
        return F.linear(x, self._weight, self._bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return residual + self(x)


Rows = Any


class LinearLayer(Protocol):
    """Plug point of an encoding: Linear, Int8Linear, VectorInt8Linear; and AdaptedLinear, around any of them."""

    @property
    def ops(self) -> "Ops":
        """Operations that produce this layer's input rows."""
        ...

    def __call__(self, rows: Rows, /) -> Tensor:
        """Multiply, and add the bias: [rows, inputs] -> [rows, outputs]."""
        ...

    def add_to(self, residual: Tensor, rows: Rows, /) -> Tensor:
        """`residual` [rows, outputs] plus the product; may write into `residual`."""
        ...


class Ops(Protocol):
    """Plug point of an encoding: FloatOps, Int8Ops."""

    def rows(self, x: Tensor) -> Rows:
        """Convert x [rows, width] to input rows."""
        ...

    def values(self, rows: Rows) -> Tensor:
        """Convert input rows back to a tensor [rows, width]: the reverse of `rows`."""
        ...

    def norm(self, x: Tensor, norm: Norm) -> Rows:
        """Input rows of the norm of x [rows, width]."""
        ...

    def activated(self, activation: Activation, x: Tensor) -> Rows:
        """Input rows of activation(x), for x [rows, width]."""
        ...

    def gated(self, activation: Activation, gate_up: Tensor) -> Rows:
        """Input rows of activation(gate) * up; `gate_up` [rows, 2 * width] holds gate and up side by side."""
        ...


# oneDNN's weight layout is optimised for this number of rows; it is fast for 1 to 512.
_INT8_PACKED_FOR_ROWS = 32


class QuantisedRows(NamedTuple):
    """scales[row] * (q - Int8Ops.zero_point): q [rows, width] bytes, scales [rows] fp32."""

    q: Tensor
    scales: Tensor


class Int8Ops:
    """Ops of int8 linear layers; rows are QuantisedRows. Raises ConfigurationError if torch has no oneDNN."""

    def __init__(self) -> None:
        if not hasattr(torch.ops.onednn, "qlinear_prepack"):
            raise ConfigurationError("quantize=int8 needs a torch with oneDNN")
        # Without VNNI, oneDNN adds pairs of products in 16 bits, which bytes above 128 would overflow.
        levels = 127 if "avx512_vnni" in cpu_flags() or why_no_loops() is None else 63
        self._levels, self.zero_point = np.float32(levels), levels + 1

    def rows(self, x: Tensor) -> QuantisedRows:
        out = _empty(x.shape[0], x.shape[1])
        quantise(x.contiguous().numpy(), self._levels, out.q.numpy(), out.scales.numpy())
        return out

    def values(self, rows: QuantisedRows) -> Tensor:
        return (rows.q.to(torch.float32) - self.zero_point) * rows.scales[:, None]

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
        self._packed = torch.ops.onednn.qlinear_prepack(weight, [_INT8_PACKED_FOR_ROWS, weight.shape[1]])
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
            *(rows.q, 1.0, self.ops.zero_point),
            *(self._packed, self._scales, self._zero_points, None),
            *(1.0, 0, torch.float32, "none", [], ""),
        )
        return product


class VectorInt8Linear:
    """As Int8Linear, by the compiled products, for CPUs whose oneDNN would need coarser levels."""

    def __init__(self, parameters: LinearParameters) -> None:
        assert parameters.scales is not None
        self.ops = _shared_ops()
        self._matrix = ByteMatrix(parameters.weight, parameters.scales, parameters.bias)

    def __call__(self, rows: QuantisedRows) -> Tensor:
        return torch.from_numpy(self._matrix.multiply(rows.q.numpy(), rows.scales.numpy()))

    def add_to(self, residual: Tensor, rows: QuantisedRows) -> Tensor:
        return residual.add_(self(rows))


def _int8_linear(parameters: LinearParameters) -> LinearLayer:
    if "avx512_vnni" in cpu_flags() or why_no_loops() is not None:
        return Int8Linear(parameters)
    return VectorInt8Linear(parameters)


@cache
def _shared_ops() -> Int8Ops:
    return Int8Ops()


def _empty(rows: int, width: int) -> QuantisedRows:
    return QuantisedRows(torch.empty((rows, width), dtype=torch.uint8), torch.empty(rows))


_LAYERS: Mapping[str, Callable[[LinearParameters], LinearLayer]] = {"float": Linear, "int8": _int8_linear}


def make_linear(parameters: LinearParameters) -> LinearLayer:
    """Build the linear layer for the encoding of `parameters`."""
    return _LAYERS[parameters.encoding](parameters)
