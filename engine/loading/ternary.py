"""Checkpoints with ternary matrices (BitNet), which int8 holds exactly, and so do 4 bits in steps of int8.

The model rounds the inputs of these matrices to int8, with a scale for each token, as it did in training. So do the
encodings int8 and "int4 in int8": in them the products are those of training. Nothing is rounded that training did not
round: the output matrix stays as it is stored, and KV is in fp16. The encoding is 4 bits where the CPU multiplies bytes
(VNNI): a step reads 0.56 bytes a weight. It is int8 on other CPUs, in the eager decoder, and if some matrices of layers
are in floating point, which 4 bits would round too much.
"""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from engine.models.encodings import IN_STEPS, OUTPUT, LinearParameters
from engine.models.parameters import ParameterSpec, Source
from engine.models.rounding import INT4_GROUP, round_to_int4, round_to_steps
from engine.quantized_formats.matrix import QuantizedMatrix
from engine.quantized_formats.modules import QuantizedModule

Modules = Mapping[str, QuantizedModule]


def are_ternary(modules: Modules) -> bool:
    """True if some matrices are ternary."""
    return any(module.storage.is_ternary for module in modules.values())


def all_ternary(specs: Iterable[ParameterSpec], modules: Modules) -> bool:
    """True if all matrices of layers are ternary."""
    layers = [spec for spec in specs if spec.is_matrix and spec.name != OUTPUT]
    return all(_ternary_parts(spec, modules) == len(spec.sources) for spec in layers)


def holds_ternary(spec: ParameterSpec, modules: Modules) -> bool:
    """True if a part of the matrix is ternary, and is used as it is."""
    return not spec.unit_rows and not spec.offset and _ternary_parts(spec, modules) > 0


def _ternary_parts(spec: ParameterSpec, modules: Modules) -> int:
    found = (modules.get(source.name) for source in spec.sources)
    return sum(module is not None and module.storage.is_ternary for module in found)


def in_four_bits(
    spec: ParameterSpec, encoding: str, read: Callable[[Source], QuantizedMatrix | Tensor]
) -> LinearParameters:
    """A matrix in steps of int8, or in int4. `read` returns the matrix of a source if that is ternary, else its numbers
    in fp32, which are rounded.
    """
    kinds: list[tuple[Tensor, ...]] = []
    for source in spec.held_sources():
        part = read(source)
        if isinstance(part, QuantizedMatrix):
            kinds.append(_exact(part, encoding))
        else:
            kinds.append(round_to_steps(part) if encoding == IN_STEPS else round_to_int4(part))
    joined = [torch.cat(parts) for parts in zip(*kinds, strict=True)]
    if encoding == IN_STEPS:
        weight, scales, steps, lows = joined
        return LinearParameters(weight, encoding, scales.mul_(spec.factor), steps=steps, lows=lows)
    weight, scales, zeros = joined
    return LinearParameters(weight, encoding, scales.mul_(spec.factor), zeros)


def _exact(matrix: QuantizedMatrix, encoding: str) -> tuple[Tensor, ...]:
    """As `round_to_steps` and `round_to_int4` return what they round."""
    levels, scales = (matrix.values + 1).to(torch.uint8), matrix.scales[:, 0].clone()
    num_outputs, num_inputs = levels.shape
    ones = torch.ones(num_outputs, -(-num_inputs // INT4_GROUP), dtype=torch.uint8)
    if encoding == IN_STEPS:
        return levels, scales, ones, -ones.to(torch.int8)
    return levels, scales[:, None].repeat(1, ones.shape[1]), ones
