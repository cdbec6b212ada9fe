"""torchao's matrices as version 0.15 and later store them in safetensors: numbers, scales and zeros of a weight are
tensors of their own.

int8, fp8, and integers of fewer bits in bytes are as in compressed-tensors, under other names. Int4Tensor has two
integers in a byte, the lower bits first, and in place of a zero a real number that is added after scaling.
"""

from dataclasses import replace

import torch

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
    require_no_zeros,
    scale_shapes,
)
from engine.quantized_formats.storage import MatrixStorage
from mesh.domain.errors import ConfigurationError

MATRIX = "_weight_qdata"
UNUSED_PARTS = ("_weight_act_quant_scale", "_weight_act_quant_zero_point")
_SCALES, _ZEROS, _FACTORS = "weight_scale", "weight_zero_point", "_weight_act_pre_scale"


def parts(storage: MatrixStorage, shape: Shape) -> Parts:
    num_outputs, num_inputs = shape
    if storage.has_real_zeros:
        if num_inputs % 2:
            raise ConfigurationError(f"its {num_inputs} inputs cannot be packed by 2, as torchao does")
        matrix = Part(("I8", "U8"), ((num_outputs, num_inputs // 2),))
        scales = zeros = Part(FLOATS, ((count_groups(storage, num_inputs), num_outputs),))
    else:
        shapes = scale_shapes(storage, shape)
        matrix, scales = Part(FP8 if storage.is_float else ("I8",), (shape,)), Part(FLOATS, shapes)
        zeros = Part(("I8",), shapes, is_optional=storage.is_symmetric)
    return {
        MATRIX: matrix,
        _SCALES: replace(scales, aliases=(f"_{_SCALES}",)),
        _ZEROS: replace(zeros, aliases=(f"_{_ZEROS}",)),
        _FACTORS: Part(FLOATS, ((num_inputs,), (1, num_inputs), (1,), ()), is_optional=True),
    }


def read(storage: MatrixStorage, shape: Shape, tensors: Tensors) -> QuantizedMatrix:
    if _FACTORS in tensors:
        raise ConfigurationError(
            "its inputs must be multiplied by act_pre_scale, which is not supported: serve a checkpoint without it"
        )
    if storage.has_real_zeros:
        octets = tensors[MATRIX].view(torch.uint8)
        numbers = torch.stack((octets & 15, octets >> 4), -1).flatten(1)
        values = (numbers ^ 8).to(torch.int8) - 8
        scales, added = (tensors[part].t().float() for part in (_SCALES, _ZEROS))
        return QuantizedMatrix(values, scales, minima=-added)
    zeros = None if storage.is_symmetric else by_output(tensors[_ZEROS], storage, shape)
    require_no_zeros(tensors.get(_ZEROS), storage)
    if not storage.is_float:
        _require_bits(storage, tensors[MATRIX])
    scales = by_output(tensors[_SCALES], storage, shape)
    return QuantizedMatrix(tensors[MATRIX], scales, zeros, groups_of_blocks(storage, shape))


def _require_bits(storage: MatrixStorage, values: torch.Tensor) -> None:
    least, most = int(values.min()), int(values.max())
    if least < -(2 ** (storage.num_bits - 1)) or most >= 2 ** (storage.num_bits - 1):
        raise ConfigurationError(
            f"its integers are from {least} to {most}, which {storage.num_bits} bits do not hold: config.json is from "
            "another checkpoint"
        )
