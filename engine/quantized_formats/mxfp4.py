"""MXFP4, in which gpt-oss stores its experts: numbers of 4 bits (e2m1) in blocks of 32 inputs, which share a power of
two (OCP Microscaling Formats 1.0, 2023). A tensor has the blocks of all experts, another their scales.
"""

import torch

from engine.kernels.cpu.products.nibbles import E2M1_LEVELS, E2M1_ZERO
from engine.quantized_formats.matrix import Part, Parts, QuantizedMatrix, Shape, Tensors
from engine.quantized_formats.storage import MatrixStorage
from mesh.domain.errors import ConfigurationError

BLOCK = 32
_DOUBLED = torch.tensor(E2M1_LEVELS, dtype=torch.int8) - E2M1_ZERO
_NUMBERS = torch.zeros(2 * E2M1_ZERO + 1, dtype=torch.uint8)
_NUMBERS[list(E2M1_LEVELS)] = torch.arange(len(E2M1_LEVELS), dtype=torch.uint8)
_BIAS = 127
"""The bias of the scales' exponents."""


def parts(storage: MatrixStorage, shape: Shape) -> Parts:
    """Of one expert."""
    num_outputs, num_inputs = shape
    if num_inputs % BLOCK:
        raise ConfigurationError(f"blocks of {BLOCK} do not divide its {num_inputs} inputs")
    num_blocks = num_inputs // BLOCK
    return {
        "blocks": Part(("U8",), ((num_outputs, num_blocks, BLOCK // 2),)),
        "scales": Part(("U8",), ((num_outputs, num_blocks),)),
    }


def read(storage: MatrixStorage, shape: Shape, tensors: Tensors) -> QuantizedMatrix:
    """The values are doubled, which makes them integers, and the scales halved."""
    blocks = tensors["blocks"].flatten(1)
    values = torch.empty(shape, dtype=torch.int8)
    values[:, 0::2], values[:, 1::2] = _DOUBLED[(blocks & 15).int()], _DOUBLED[(blocks >> 4).int()]
    exponents = tensors["scales"].int() - (_BIAS + 1)
    return QuantizedMatrix(values, torch.ldexp(torch.ones(exponents.shape), exponents))


def levels_of(values: torch.Tensor) -> torch.Tensor:
    """The numbers of their levels, uint8, of values that `read` has made."""
    return _NUMBERS[values.int() + E2M1_ZERO]
