"""BitNet b1.58 (Ma et al. 2024) as transformers stores and computes it: weights are -1, 0 or 1 times one number for the
whole matrix, and inputs are rounded to int8 with a scale for each token.

Four rows of a matrix lie in one of bytes [outputs / 4, inputs]: bits 2k and 2k + 1 of row r are row r + k * outputs / 4
of the matrix, plus 1. BitLinear divides by `weight_scale`, AutoBitLinear multiplies by it. Checkpoints of AutoBitLinear
may also have weights in floating point, which are ternary already, or, in the mode online, are rounded to that by the
mean of their magnitudes.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from engine.quantized_formats.matrix import FLOATS, Part, Parts, QuantizedMatrix, Shape, Tensors
from engine.quantized_formats.storage import MatrixStorage
from mesh.domain.errors import ConfigurationError

_PER_BYTE = 4
_LEAST_MEAN = 1e-5
_ELEMENTS_AT_ONCE = 2**20


def parts(storage: MatrixStorage, shape: Shape) -> Parts:
    num_outputs, num_inputs = shape
    if storage.format == "bitnet-online":
        return {"weight": Part(FLOATS, (shape,))}
    if num_outputs % _PER_BYTE:
        raise ConfigurationError(f"its {num_outputs} outputs cannot be packed by {_PER_BYTE}, as BitNet does")
    packed = Part(("U8",), ((num_outputs // _PER_BYTE, num_inputs),))
    may_be_floats = storage.format == "autobitlinear"
    weight = Part((*packed.dtypes, *FLOATS), (*packed.shapes, shape)) if may_be_floats else packed
    return {"weight": weight, "weight_scale": Part(FLOATS, ((1,), (), (1, 1)))}


def read(storage: MatrixStorage, shape: Shape, tensors: Tensors) -> QuantizedMatrix:
    """The values are int8, and every output has the scale of all. Raises ConfigurationError if one is not ternary."""
    weight = tensors["weight"]
    if storage.format == "bitnet-online":
        factor = 1 / weight.abs().mean(dtype=torch.float32).clamp(min=_LEAST_MEAN)
        return _matrix(_in_parts(weight, lambda rows: (rows.float() * factor).round_().clamp_(-1, 1)), 1 / factor)
    if weight.dtype is torch.uint8:
        if tuple(weight.shape) == shape:
            raise ConfigurationError(f"its tensor has bytes {list(shape)}, and those of packed rows are a quarter")
        values = _unpacked(weight)
    elif tuple(weight.shape) != shape:
        raise ConfigurationError(f"its tensor has floats {list(weight.shape)}, config.json implies {list(shape)}")
    else:
        values = _in_parts(weight, lambda rows: rows.round().clamp_(-1, 1))
        if not torch.equal(values.to(weight.dtype), weight):
            raise ConfigurationError(
                "its numbers are not all -1, 0 or 1, though config.json says that they are ternary (quantization_mode "
                "offline): master weights need quantization_mode online"
            )
    scale = tensors["weight_scale"].to(torch.float32, copy=True).reshape(())
    return _matrix(values, scale if storage.format == "autobitlinear" else 1 / scale)


def _matrix(values: Tensor, scale: Tensor) -> QuantizedMatrix:
    return QuantizedMatrix(values, scale.expand(len(values), 1))


def _in_parts(weight: Tensor, convert: Callable[[Tensor], Tensor]) -> Tensor:
    """`convert` of some rows at a time, which would take much memory in fp32, as int8."""
    values = torch.empty(weight.shape, dtype=torch.int8)
    rows_at_once = max(1, _ELEMENTS_AT_ONCE // weight.shape[1])
    for first in range(0, len(weight), rows_at_once):
        rows = slice(first, first + rows_at_once)
        values[rows] = convert(weight[rows])
    return values


def _unpacked(packed: Tensor) -> Tensor:
    """uint8 [rows, inputs] -> int8 [4 * rows, inputs]."""
    rows = len(packed)
    values = torch.empty((_PER_BYTE * rows, packed.shape[1]), dtype=torch.int8)
    for place in range(_PER_BYTE):
        part = values[place * rows : (place + 1) * rows]
        part.copy_(packed >> (2 * place) & 3).sub_(1)
    if int(values.max()) > 1:
        raise ConfigurationError("it has a number that is not -1, 0 or 1: the file is broken; download it again")
    return values
