"""A quantised matrix: integers or fp8 numbers with scales and zeros, whatever format it was stored in."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.finite import is_finite, why_not_finite
from engine.kernels.cpu.machine import EIGHT_BITS_ZERO, INT8_LEVELS, MAX_ZERO
from engine.kernels.cpu.products.nibble_numbers import NF4_ZERO
from engine.quantized_formats.storage import MatrixStorage
from mesh.domain.errors import ConfigurationError

FLOATS = ("F32", "BF16", "F16")
FP8 = ("F8_E4M3", "F8_E5M2")
_NAN_OF_E4M3 = 0x7F
"""The bits of NaN without its sign."""
_MAX_OF_E4M3 = 448.0
"""Integers of 8 bits are smaller."""
_ELEMENTS_AT_ONCE = 2**18  # a megabyte in fp32

Tensors = Mapping[str, Tensor]
Shape = tuple[int, int]
"""Outputs and inputs of a matrix."""


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor that a format stores for a matrix, with the dtypes and shapes that it may have; without `shapes`, its
    reader checks them. It is called as its key in `Parts`, or one of `aliases`.
    """

    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    is_optional: bool = False
    aliases: tuple[str, ...] = ()


Parts = Mapping[str, Part]


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedMatrix:
    """Number [output, input] of the matrix is (values[output, input] - zeros[output, g]) * scales[output, g] -
    minima[output, g], where g is groups[input]. Without `groups`, the inputs are divided into equal groups in their
    order.

    values: [outputs, inputs], integers or fp8; scales: [outputs, num_groups] fp32; zeros and minima: as scales, or None
    for 0; groups: int64 [inputs]. With `levels`, fp32 and of 16 numbers, `values` number the levels that count in their
    place. `factor` multiplies every number at last.
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    groups: Tensor | None = None
    levels: Tensor | None = None
    factor: float = 1.0
    minima: Tensor | None = None

    def select(self, outputs: slice | Tensor) -> "QuantizedMatrix":
        """The matrix with these outputs, in this order."""
        zeros, minima = (None if given is None else given[outputs] for given in (self.zeros, self.minima))
        return replace(self, values=self.values[outputs], scales=self.scales[outputs], zeros=zeros, minima=minima)

    def input_order(self) -> Tensor | None:
        """The inputs, int64 [inputs], group by group; None if the inputs of each group are neighbours already."""
        if self.groups is None or bool((self.groups.diff() >= 0).all()):
            return None
        return self.groups.argsort(stable=True)

    def in_int4(self, group: int, order: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Values from 0 to 15, scales and zeros as `round_to_int4` returns them, of integers of 4 bits, with the inputs
        in this order; `group` divides the matrix's own groups. Scales and zeros of NF4 are those of rounded levels.
        Raises ConfigurationError if groups are not equal, their inputs are not neighbours in this order, or a zero is
        larger than MAX_ZERO.
        """
        num_inputs, num_groups = self.values.shape[1], self.scales.shape[1]
        in_order = torch.arange(num_inputs) // -(-num_inputs // num_groups)
        groups, values = in_order if self.groups is None else self.groups, self.values
        if order is not None:
            groups, values = groups[order], values[:, order]
        if not torch.equal(groups, in_order):
            raise ConfigurationError(
                "its index makes groups of different sizes, or other groups than that of a matrix that is multiplied "
                "with it (queries, keys and values; gate and up): serve it with --dtype float32"
            )
        offset = 8 if values.dtype is torch.int8 else 0
        zeros = torch.zeros_like(self.scales) if self.zeros is None else self.zeros
        if bool((zeros < -offset).any()) or bool((zeros > MAX_ZERO - offset).any()):
            raise ConfigurationError(f"its zeros are not all from 0 to {MAX_ZERO}: serve it with --dtype float32")
        stored = in_order[::group]
        if self.levels is not None:
            scales = self.scales[:, stored] / INT8_LEVELS
            return values, scales, torch.full(scales.shape, NF4_ZERO, dtype=torch.uint8)
        return (
            (values.to(torch.int16) + offset).to(torch.uint8),
            self.scales[:, stored],
            (zeros[:, stored] + offset).to(torch.uint8),
        )

    def with_minima(self) -> "QuantizedMatrix":
        """The matrix with minima in place of its zeros."""
        taken = torch.zeros_like(self.scales) if self.minima is None else self.minima
        return replace(self, zeros=None, minima=taken if self.zeros is None else self.zeros * self.scales + taken)

    def in_int8_groups(self) -> Tensor:
        """Values from 0 to 255 as `round_to_int8_groups` returns them, of signed integers without zeros."""
        return (self.values.to(torch.int16) + EIGHT_BITS_ZERO).to(torch.uint8)

    def dequantized(self) -> Tensor:
        """The matrix in fp32. Products of integers and 16-bit scales are exact in it; with fp32 scales each is rounded
        once.
        """
        num_outputs, num_inputs = self.values.shape
        result = torch.empty(num_outputs, num_inputs)
        rows_at_once = max(1, _ELEMENTS_AT_ONCE // num_inputs)
        for first in range(0, num_outputs, rows_at_once):
            rows = self.select(slice(first, first + rows_at_once))
            out = result[first : first + rows_at_once]
            out.copy_(rows.values if self.levels is None else self.levels[rows.values.int()])
            if rows.zeros is not None:
                out.sub_(self._spread(rows.zeros))
            out.mul_(self._spread(rows.scales))
            if rows.minima is not None:
                out.sub_(self._spread(rows.minima))
            if self.factor != 1.0:
                out.mul_(self.factor)
        return result

    def require_finite(self, name: str) -> None:
        """Raise ConfigurationError if fp32 does not hold a number of the matrix, which is in integers or e4m3. The
        numbers are only computed if a scale or a NaN in fp8 makes that likely.
        """
        has_nan = self.values.dtype is torch.float8_e4m3fn and bool(
            (self.values.view(torch.uint8) & _NAN_OF_E4M3 == _NAN_OF_E4M3).any()
        )
        is_suspect = has_nan or not is_finite(self.scales * _MAX_OF_E4M3)
        is_suspect = is_suspect or (self.minima is not None and not is_finite(self.minima))
        if is_suspect and not is_finite(numbers := self.dequantized()):
            raise ConfigurationError(why_not_finite(numbers, name))

    def _spread(self, by_group: Tensor) -> Tensor:
        """Numbers [outputs, num_groups] for each input, or [outputs, 1] if there is one group."""
        num_inputs, num_groups = self.values.shape[1], by_group.shape[1]
        if num_groups == 1:
            return by_group
        if self.groups is not None:
            return by_group[:, self.groups]
        return by_group.repeat_interleave(num_inputs // num_groups, 1)


def unpack(packed: Tensor, num_bits: int) -> Tensor:
    """Integers of 2, 3, 4 or 8 bits without sign, the lowest bits first: int32 [rows, words] -> uint8 [rows, numbers].
    Integers of 3 bits may lie in two words.
    """
    octets = packed.reshape(-1).view(torch.uint8).view(packed.shape[0], -1)  # a row of one word may have any stride
    if num_bits == 8:
        return octets
    if num_bits == 3:
        eights = octets.view(packed.shape[0], -1, 3).int()
        bits = eights[..., 0] | eights[..., 1] << 8 | eights[..., 2] << 16
        return torch.stack([(bits >> first & 7).to(torch.uint8) for first in range(0, 24, 3)], -1).flatten(1)
    mask = 2**num_bits - 1
    return torch.stack([octets >> first & mask for first in range(0, 8, num_bits)], -1).flatten(1)


def count_groups(storage: MatrixStorage, num_inputs: int) -> int:
    """Groups of inputs that share a scale. Raises ConfigurationError unless they are equal."""
    size = storage.block_inputs or num_inputs
    if num_inputs % size:
        raise ConfigurationError(f"groups of {size} do not divide its {num_inputs} inputs: quantise it with others")
    return num_inputs // size


def read_groups(index: Tensor | None, num_groups: int) -> Tensor | None:
    """The group of each input as stored. Files of formats that always have an index may leave it at -1, which means
    groups in order. Raises ConfigurationError if it names a group that has no scale, or leaves one out.
    """
    if index is None or bool((index == -1).all()):
        return None
    if int(index.min()) < 0 or int(index.max()) >= num_groups:
        raise ConfigurationError(
            f"its index names groups {int(index.min())} to {int(index.max())}, and it has {num_groups}: it is broken"
        )
    if (num_named := int(torch.bincount(index).count_nonzero())) < num_groups:
        raise ConfigurationError(f"its index names {num_named} of its {num_groups} groups: it is broken")
    return index.to(torch.int64)


def scale_shapes(storage: MatrixStorage, shape: Shape) -> tuple[tuple[int, ...], ...]:
    """Shapes of scales: numbers that are one for all outputs, or for all inputs, may lack that dimension."""
    rows, columns = _num_scales(storage, shape)
    shapes: list[tuple[int, ...]] = [(rows, columns)]
    if columns == 1:
        shapes.append((rows,))
    if (rows, columns) == (1, 1):
        shapes.append(())
    if storage.block_rows > 1:
        shapes.append((rows, 1, columns, 1))  # of modelopt
    return tuple(shapes)


def _num_scales(storage: MatrixStorage, shape: Shape) -> Shape:
    num_outputs, num_inputs = shape
    if storage.block_rows == 1:
        return num_outputs, count_groups(storage, num_inputs)
    rows = -(-num_outputs // storage.block_rows) if storage.block_rows else 1
    return rows, -(-num_inputs // storage.block_inputs) if storage.block_inputs else 1


def by_output(numbers: Tensor, storage: MatrixStorage, shape: Shape) -> Tensor:
    """Scales or zeros as stored -> [outputs, num_groups]."""
    rows, columns = _num_scales(storage, shape)
    return numbers.float().reshape(rows, columns).repeat_interleave(storage.block_rows or shape[0], 0)[: shape[0]]


def require_no_zeros(zeros: Tensor | None, storage: MatrixStorage) -> None:
    """Raise ConfigurationError for zeros of a symmetric matrix, whose numbers may be multiplied as they are stored."""
    if storage.is_symmetric and zeros is not None and bool(zeros.float().any()):
        raise ConfigurationError(
            "its zero points are not all 0, and config.json says that it is symmetric: one of them is from another "
            "checkpoint"
        )


def groups_of_blocks(storage: MatrixStorage, shape: Shape) -> Tensor | None:
    """The group of each input of a matrix in blocks, the last of which may be narrower; None for other matrices."""
    is_in_blocks = storage.block_rows > 1 and storage.block_inputs
    return torch.arange(shape[1]) // storage.block_inputs if is_in_blocks else None
