"""Matrices that a checkpoint has in other groups than those of int4 with whole zeros, for a model in int4: MXFP4, and
4 bits with minima or 8 bits of GGUF.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from engine.kernels.cpu.machine import EIGHT_BITS_ZERO
from engine.kernels.cpu.products.nibble_numbers import E2M1_ZERO
from engine.models.encodings import LinearParameters, StoredMatrices
from engine.models.parameters import ParameterSpec
from engine.quantized_formats.e2m1 import levels_of
from engine.quantized_formats.matrix import QuantizedMatrix
from engine.quantized_formats.modules import QuantizedModule

Conversion = Callable[[Sequence[QuantizedMatrix]], LinearParameters]
"""Of all parts of a matrix, whose outputs follow each other."""


def conversion_of(
    spec: ParameterSpec, modules: Mapping[str, QuantizedModule], kept: StoredMatrices | None
) -> Conversion | None:
    """How a matrix is taken as the checkpoint stores it; None if it is not. `modules`: by the names of their sources;
    `kept`: see int4_of.
    """
    storages = [modules[source.name].storage for source in spec.sources if source.name in modules]
    if not storages or len(storages) < len(spec.sources) or spec.unit_rows or spec.offset:
        return None
    if all(storage.is_mxfp4 for storage in storages):
        return _in_mxfp4
    if kept is not None and spec.name in kept.with_minima:
        return partial(_with_minima, group=kept.group)
    if kept is None or spec.name not in kept.in_int8:
        return None
    fits = all(storage.fits_int8_groups and storage.block_inputs == kept.group for storage in storages)
    return _in_int8_groups if fits else None


def _in_mxfp4(matrices: Sequence[QuantizedMatrix]) -> LinearParameters:
    weight = torch.cat([levels_of(matrix.values) for matrix in matrices])
    scales = torch.cat([matrix.scales for matrix in matrices])
    zeros = torch.full(scales.shape, E2M1_ZERO, dtype=torch.uint8)
    return LinearParameters(weight, "int4", scales, zeros, is_mxfp4=True)


def _with_minima(matrices: Sequence[QuantizedMatrix], group: int) -> LinearParameters:
    """Zeros become minima. `group` divides the groups of the parts."""
    weights, all_scales, all_minima = [], [], []
    for matrix in matrices:
        taken = matrix.with_minima()
        assert taken.minima is not None
        weight, scales, zeros = taken.in_int4(group)
        weights.append(weight)
        all_scales.append(scales)
        all_minima.append(zeros * scales + taken.minima.repeat_interleave(scales.shape[1] // taken.minima.shape[1], 1))
    return LinearParameters(torch.cat(weights), "int4", torch.cat(all_scales), minima=torch.cat(all_minima))


def _in_int8_groups(matrices: Sequence[QuantizedMatrix]) -> LinearParameters:
    weight = torch.cat([matrix.in_int8_groups() for matrix in matrices])
    scales = torch.cat([matrix.scales for matrix in matrices])
    zeros = torch.full(scales.shape, EIGHT_BITS_ZERO, dtype=torch.uint8)
    return LinearParameters(weight, "int8 in groups", scales, zeros)
