"""MXFP4: numbers of 4 bits (e2m1) in blocks of 32 inputs, which share a power of two (OCP Microscaling Formats 1.0,
2023).

gpt-oss is released with its experts in it: a tensor has the blocks of all experts, another their scales.
compressed-tensors, modelopt and Quark store any linear module in it, each with tensors of its own.
"""

import torch

from engine.quantized_formats.e2m1 import doubled
from engine.quantized_formats.matrix import Part, Parts, QuantizedMatrix, Shape, Tensors
from engine.quantized_formats.storage import MatrixStorage
from mesh.domain.errors import ConfigurationError

BLOCK = 32
_BIAS = 127
"""The bias of the scales' exponents."""


def parts(storage: MatrixStorage, shape: Shape) -> Parts:
    """Of one expert of gpt-oss."""
    num_outputs, num_blocks = shape[0], _count_blocks(shape)
    return {
        "blocks": Part(("U8",), ((num_outputs, num_blocks, BLOCK // 2),)),
        "scales": Part(("U8",), ((num_outputs, num_blocks),)),
    }


def read(storage: MatrixStorage, shape: Shape, tensors: Tensors) -> QuantizedMatrix:
    return _matrix(tensors["blocks"].flatten(1), tensors["scales"])


def parts_of_module(storage: MatrixStorage, shape: Shape) -> Parts:
    num_outputs, num_blocks = shape[0], _count_blocks(shape)
    return {
        _name(storage): Part(("U8",), ((num_outputs, num_blocks * BLOCK // 2),)),
        "weight_scale": Part(("U8", "F8_E8M0"), ((num_outputs, num_blocks),)),
    }


def read_module(storage: MatrixStorage, shape: Shape, tensors: Tensors) -> QuantizedMatrix:
    return _matrix(tensors[_name(storage)], tensors["weight_scale"].view(torch.uint8))


def _matrix(packed: torch.Tensor, exponents: torch.Tensor) -> QuantizedMatrix:
    # The numbers are doubled, and the scales halved.
    halved = exponents.int() - (_BIAS + 1)
    return QuantizedMatrix(doubled(packed), torch.ldexp(torch.ones(halved.shape), halved))


def _name(storage: MatrixStorage) -> str:
    return "weight_packed" if storage.format == "mxfp4-packed" else "weight"


def _count_blocks(shape: Shape) -> int:
    if shape[1] % BLOCK:
        raise ConfigurationError(f"blocks of {BLOCK} do not divide its {shape[1]} inputs")
    return shape[1] // BLOCK
