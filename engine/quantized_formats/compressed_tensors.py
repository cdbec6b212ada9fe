"""compressed-tensors, which llm-compressor writes, and fp8 as transformers stores it.

"pack-quantized": integers of 4 or 8 bits packed along inputs, 2^(bits - 1) added to each; zeros likewise along outputs.
The other formats hold int8 or fp8 matrices as they are.
"""

import torch
from torch import Tensor

from engine.quantized_formats.matrix import (
    FLOATS,
    FP8,
    Part,
    Parts,
    QuantizedMatrix,
    Shape,
    Tensors,
    count_groups,
    read_groups,
    unpack,
)
from engine.quantized_formats.storage import MatrixStorage
from mesh.domain.errors import ConfigurationError


def packed_parts(storage: MatrixStorage, shape: Shape) -> Parts:
    num_outputs, num_inputs = shape
    scale_shapes, packed_zeros = _scale_shapes(storage, shape), _packed_zeros(storage, shape)
    return {
        "weight_packed": Part(("I32",), ((num_outputs, _num_words(num_inputs, storage.num_bits)),)),
        "weight_scale": Part(FLOATS, scale_shapes),
        "weight_shape": Part(("I64", "I32"), ((2,),), is_optional=True),
        "weight_zero_point": Part(("I32", "I8"), (packed_zeros, *scale_shapes), is_optional=storage.is_symmetric),
        "weight_g_idx": Part(("I32",), ((num_inputs,),), is_optional=not storage.has_group_index),
    }


def read_packed(storage: MatrixStorage, shape: Shape, tensors: Tensors) -> QuantizedMatrix:
    num_outputs, num_inputs = shape
    stored_shape = tensors.get("weight_shape")
    if stored_shape is not None and stored_shape.tolist() != [num_outputs, num_inputs]:
        raise ConfigurationError(
            f"its weight_shape says {stored_shape.tolist()}, config.json implies {[num_outputs, num_inputs]}: "
            "one of them is from another checkpoint"
        )
    scales, zeros = _by_output(tensors["weight_scale"], storage, shape), tensors.get("weight_zero_point")
    if zeros is not None and (zeros.dtype is torch.int32) != (zeros.shape == _packed_zeros(storage, shape)):
        raise ConfigurationError(
            f"its weight_zero_point has shape {list(zeros.shape)}, which is that of zeros "
            f"{'in int8' if zeros.dtype is torch.int32 else 'packed in int32'}: download the checkpoint again"
        )
    if zeros is not None and zeros.dtype is torch.int32:
        zeros = _signed(zeros.t(), storage.num_bits)[:, :num_outputs].t()
    return QuantizedMatrix(
        _signed(tensors["weight_packed"], storage.num_bits)[:, :num_inputs],
        scales,
        None if zeros is None else _by_output(zeros, storage, shape),
        read_groups(tensors.get("weight_g_idx"), scales.shape[1]),
    )


def _packed_zeros(storage: MatrixStorage, shape: Shape) -> Shape:
    return _num_words(shape[0], storage.num_bits), count_groups(storage, shape[1])


def plain_parts(storage: MatrixStorage, shape: Shape) -> Parts:
    dtypes, scale_shapes = FP8 if storage.is_float else ("I8",), _scale_shapes(storage, shape)
    return {
        "weight": Part(dtypes, (shape,)),
        "weight_scale": Part(FLOATS, scale_shapes, aliases=("weight_scale_inv",)),
        "weight_zero_point": Part(("I8", *FP8), scale_shapes, is_optional=storage.is_symmetric),
        "weight_g_idx": Part(("I32",), (shape[1:],), is_optional=not storage.has_group_index),
    }


def read_plain(storage: MatrixStorage, shape: Shape, tensors: Tensors) -> QuantizedMatrix:
    scales, zeros = _by_output(tensors["weight_scale"], storage, shape), tensors.get("weight_zero_point")
    groups = read_groups(tensors.get("weight_g_idx"), scales.shape[1])
    if storage.block_rows > 1 and storage.block_inputs:  # the last block may be narrower
        groups = torch.arange(shape[1]) // storage.block_inputs
    return QuantizedMatrix(
        tensors["weight"], scales, None if zeros is None else _by_output(zeros, storage, shape), groups
    )


def _scale_shapes(storage: MatrixStorage, shape: Shape) -> tuple[tuple[int, ...], ...]:
    """Shapes of scales: numbers that are one for all outputs, or for all inputs, may lack that dimension."""
    rows, columns = _num_scales(storage, shape)
    shapes: list[tuple[int, ...]] = [(rows, columns)]
    if columns == 1:
        shapes.append((rows,))
    if (rows, columns) == (1, 1):
        shapes.append(())
    return tuple(shapes)


def _num_scales(storage: MatrixStorage, shape: Shape) -> Shape:
    num_outputs, num_inputs = shape
    if storage.block_rows == 1:
        return num_outputs, count_groups(storage, num_inputs)
    rows = -(-num_outputs // storage.block_rows) if storage.block_rows else 1
    return rows, -(-num_inputs // storage.block_inputs) if storage.block_inputs else 1


def _by_output(numbers: Tensor, storage: MatrixStorage, shape: Shape) -> Tensor:
    """Scales or zeros as stored -> [outputs, num_groups]."""
    rows, columns = _num_scales(storage, shape)
    return numbers.float().reshape(rows, columns).repeat_interleave(storage.block_rows or shape[0], 0)[: shape[0]]


def _signed(packed: Tensor, num_bits: int) -> Tensor:
    """Integers from which 2^(bits - 1) is taken again: int32 [rows, words] -> int8 [rows, words * 32 / bits]."""
    return (unpack(packed, num_bits).to(torch.int16) - 2 ** (num_bits - 1)).to(torch.int8)


def _num_words(count: int, num_bits: int) -> int:
    return -(-count * num_bits // 32)
