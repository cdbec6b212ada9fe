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
    by_output,
    count_groups,
    groups_of_blocks,
    read_groups,
    require_no_zeros,
    scale_shapes,
    unpack,
)
from engine.quantized_formats.storage import MatrixStorage
from mesh.domain.errors import ConfigurationError


def packed_parts(storage: MatrixStorage, shape: Shape) -> Parts:
    num_outputs, num_inputs = shape
    scales, packed_zeros = scale_shapes(storage, shape), _packed_zeros(storage, shape)
    return {
        "weight_packed": Part(("I32",), ((num_outputs, _num_words(num_inputs, storage.num_bits)),)),
        "weight_scale": Part(FLOATS, scales),
        "weight_shape": Part(("I64", "I32"), ((2,),), is_optional=True),
        "weight_zero_point": Part(("I32", "I8"), (packed_zeros, *scales), is_optional=storage.is_symmetric),
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
    scales, zeros = by_output(tensors["weight_scale"], storage, shape), tensors.get("weight_zero_point")
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
        None if zeros is None else by_output(zeros, storage, shape),
        read_groups(tensors.get("weight_g_idx"), scales.shape[1]),
    )


def _packed_zeros(storage: MatrixStorage, shape: Shape) -> Shape:
    return _num_words(shape[0], storage.num_bits), count_groups(storage, shape[1])


def plain_parts(storage: MatrixStorage, shape: Shape) -> Parts:
    dtypes, scales = FP8 if storage.is_float else ("I8",), scale_shapes(storage, shape)
    return {
        "weight": Part(dtypes, (shape,)),
        "weight_scale": Part(FLOATS, scales, aliases=("weight_scale_inv",)),
        "weight_zero_point": Part(("I8", *FP8), scales, is_optional=storage.is_symmetric),
        "weight_g_idx": Part(("I32",), (shape[1:],), is_optional=not storage.has_group_index),
    }


def read_plain(storage: MatrixStorage, shape: Shape, tensors: Tensors) -> QuantizedMatrix:
    scales, zeros = by_output(tensors["weight_scale"], storage, shape), tensors.get("weight_zero_point")
    require_no_zeros(zeros, storage)
    in_blocks = groups_of_blocks(storage, shape)
    groups = read_groups(tensors.get("weight_g_idx"), scales.shape[1]) if in_blocks is None else in_blocks
    return QuantizedMatrix(
        tensors["weight"], scales, None if zeros is None else by_output(zeros, storage, shape), groups
    )


def _signed(packed: Tensor, num_bits: int) -> Tensor:
    """Integers from which 2^(bits - 1) is taken again: int32 [rows, words] -> int8 [rows, words * 32 / bits]."""
    return (unpack(packed, num_bits).to(torch.int16) - 2 ** (num_bits - 1)).to(torch.int8)


def _num_words(count: int, num_bits: int) -> int:
    return -(-count * num_bits // 32)
