"""GPTQ (Frantar et al. 2022): rounds a matrix column by column, and lets later columns compensate for its errors.

Columns with large activations come first, because their errors are the hardest to compensate for. Scales are those of
the groups in the order of the file, set before ("static groups"), so the file needs no order of inputs.
"""

import torch
from torch import Tensor

from engine.finite import is_finite
from engine.models.rounding import one_thread
from engine.quantized_formats.matrix import QuantizedMatrix
from engine.quantizer.grids import INT4_MAX, INT4_MIN
from mesh.domain.errors import ConfigurationError

_COLUMNS_AT_ONCE = 128
_INVERTED_AT_ONCE = 256
_DAMPINGS = (0.01, 0.1, 1.0)
"""Shares of the mean diagonal that are added to it, until the Gram matrix can be inverted."""


def round_by_errors(weight: Tensor, gram: Tensor, scales: Tensor) -> QuantizedMatrix:
    """Round `weight` [outputs, inputs] to int4 with the scales [outputs, groups] of its groups.

    gram: [inputs, inputs], the sum of x xᵀ over calibration tokens. Raises ConfigurationError if it is not finite.
    """
    order = gram.diagonal().argsort(descending=True, stable=True)
    by_input = scales.repeat_interleave(weight.shape[1] // scales.shape[1], 1)[:, order]
    remaining, factor = weight[:, order], inverse_factor(gram[order][:, order])
    values = torch.empty_like(remaining)
    for first in range(0, remaining.shape[1], _COLUMNS_AT_ONCE):
        columns = slice(first, first + _COLUMNS_AT_ONCE)
        # Column by column, so columns lie together here.
        some, scales_of = (numbers[:, columns].t().contiguous() for numbers in (remaining, by_input))
        with one_thread():
            rounded, errors = _round_columns(some, scales_of, factor[columns, columns])
        values[:, columns] = rounded.t()
        later_columns = slice(columns.stop, None)
        remaining[:, later_columns].addmm_(errors.t().contiguous(), factor[columns, later_columns], alpha=-1)
    in_file = torch.empty_like(values, dtype=torch.int8)
    in_file[:, order] = values.to(torch.int8)
    return QuantizedMatrix(in_file, scales)


def _round_columns(remaining: Tensor, scales: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Round some columns, each after the errors of those before; returns values and errors, [columns, outputs] as
    `remaining` and `scales`.
    """
    values, errors = torch.empty_like(remaining), torch.empty_like(remaining)
    for column, (number, scale) in enumerate(zip(remaining, scales, strict=True)):
        torch.round(number / scale, out=values[column]).clamp_(INT4_MIN, INT4_MAX)
        torch.div(number - values[column] * scale, factor[column, column], out=errors[column])
        remaining[column:].addr_(factor[column, column:], errors[column], alpha=-1)
    return values, errors


def inverse_factor(gram: Tensor) -> Tensor:
    """The upper Cholesky factor of the inverse of the Gram matrix. Inputs that were always 0 stand for themselves.

    With inputs in reverse order, that is the inverse of the lower factor of the Gram matrix itself.
    """
    diagonal = gram.diagonal()
    mean = float(diagonal.mean())
    for damping in _DAMPINGS:
        factor = gram.flip(0, 1)
        factor.diagonal().add_(torch.where(diagonal == 0, 1.0, torch.tensor(damping * mean)).flip(0))
        has_factor = _invert_factor(factor)
        if has_factor and is_finite(factor.diagonal()) and bool((factor.diagonal() > 0).all()):
            return factor.flip(0, 1)
    raise ConfigurationError("its inputs on the calibration prompts are NaN, infinite or too large: use other prompts")


def _invert_factor(matrix: Tensor) -> bool:
    """Replace a symmetric matrix by the inverse of its lower Cholesky factor. Only the half below the diagonal is read.
    Returns False, with any numbers in it, if it is not positive definite.

    Mostly products of halves: they take less time than LAPACK's way over the whole inverse, and have the same sums on
    any number of threads. LAPACK's factorisation does not have the same sums, so it gets small matrices only, in one
    thread.
    """
    if len(matrix) <= _INVERTED_AT_ONCE:
        with one_thread():
            lower, failed = torch.linalg.cholesky_ex(matrix)
            matrix.copy_(torch.linalg.solve_triangular(lower, torch.eye(len(lower)), upper=False))
        return not failed
    half = len(matrix) // 2
    first, second, between = matrix[:half, :half], matrix[half:, half:], matrix[half:, :half]
    if not _invert_factor(first):
        return False
    lower = between @ first.t()
    second.addmm_(lower, lower.t(), alpha=-1)
    if not _invert_factor(second):
        return False
    between.copy_(second @ lower @ first).neg_()
    matrix[:half, half:] = 0
    return True
