"""HQQ as transformers stores it: integers without sign, scales, and zeros that are real numbers.

The matrix is reshaped to [groups, size] ("axis" 1: groups of inputs), or to [size, groups] (axis 0: a group has one
input of outputs that lie num_outputs / size apart). The rows of that are cut in equal parts, one for each place of a
word; the first part has the highest bits.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from engine.quantized_formats.matrix import FLOATS, Part, Parts, QuantizedMatrix, Shape, Tensors, count_groups
from engine.quantized_formats.storage import MatrixStorage
from mesh.domain.errors import ConfigurationError

UNUSED_PARTS = (
    *("compute_dtype", "encoded_state_dict", "offload_meta", "optimize", "packing", "round_zero"),
    *("stores_quant_config", "unpack_view_dtype"),
)
"""Tensors that say how a matrix was made, or repeat config.json."""
_PER_WORD = {8: 1, 4: 2, 3: 10, 2: 4, 1: 8}
"""Integers in a word by their bits. A word is a byte; one of 3 bits has 32."""


class _Reshaped(NamedTuple):
    """The matrix as it is grouped; `size` is that of a group."""

    rows: int
    columns: int
    size: int
    axis: int


def parts(storage: MatrixStorage, shape: Shape) -> Parts:
    grouped = _reshape(storage, shape)
    num_words = -(-grouped.rows // (per_word := _PER_WORD[storage.num_bits]))
    if grouped.rows % per_word and storage.num_bits != 3:
        raise ConfigurationError(f"its {grouped.rows} rows of groups cannot be packed by {per_word}, as HQQ does")
    dtype, num_bytes = ("I32", 4 * grouped.columns) if storage.num_bits == 3 else ("U8", grouped.columns)
    as_floats = tuple((num_words, num_bytes // itemsize) for itemsize in (2, 4))  # view_as_float
    by_group = Part(FLOATS, ((grouped.rows, 1) if grouped.axis else (1, grouped.columns),))
    number, truth = Part(("I32", "I64"), ((),), is_optional=True), Part(("U8",), ((),), is_optional=True)
    return {
        "W_q": Part((dtype, *FLOATS), ((num_words, grouped.columns), *as_floats)),
        "scale": by_group,
        "zero": by_group,
        "shape": Part(("I64", "I32"), ((2,),), is_optional=True),
        **dict.fromkeys(("nbits", "axis", "group_size"), number),
        **dict.fromkeys(("channel_wise", "quant_scale", "quant_zero", "view_as_float"), truth),
    }


def read(storage: MatrixStorage, shape: Shape, tensors: Tensors) -> QuantizedMatrix:
    grouped = _reshape(storage, shape)
    _require_stated(storage, shape, grouped, tensors)
    words = tensors["W_q"].contiguous().view(torch.int32 if storage.num_bits == 3 else torch.uint8)
    if words.shape[1] != grouped.columns:
        raise ConfigurationError(
            f"its W_q has {words.shape[1]} columns of {words.dtype}, config.json implies {grouped.columns}: one of "
            "them is from another checkpoint"
        )
    values = _unpack(words, storage.num_bits)[: grouped.rows].reshape(shape)
    scales, zeros = tensors["scale"].float(), tensors["zero"].float()
    if grouped.axis == 1:
        return QuantizedMatrix(values, scales.view(shape[0], -1), zeros.view(shape[0], -1))
    scales, zeros = (numbers.view(-1, shape[1]).repeat(grouped.size, 1) for numbers in (scales, zeros))
    return QuantizedMatrix(values, scales, zeros)


def _reshape(storage: MatrixStorage, shape: Shape) -> _Reshaped:
    num_outputs, num_inputs = shape
    if storage.block_rows == 1:
        count = num_outputs * count_groups(storage, num_inputs)
        return _Reshaped(count, num_outputs * num_inputs // count, storage.block_inputs or num_inputs, 1)
    size = storage.block_rows or num_outputs
    if num_outputs % size:
        raise ConfigurationError(f"groups of {size} do not divide its {num_outputs} outputs: quantise it with others")
    return _Reshaped(size, num_outputs // size * num_inputs, size, 0)


def _require_stated(storage: MatrixStorage, shape: Shape, grouped: _Reshaped, tensors: Tensors) -> None:
    """Raise ConfigurationError if the numbers beside a matrix are not those of config.json."""
    expected = {"nbits": storage.num_bits, "axis": grouped.axis, "group_size": grouped.size, "shape": list(shape)}
    expected |= {"channel_wise": 1, "quant_scale": 0, "quant_zero": 0}
    for name, value in expected.items():
        if name in tensors and (stated := tensors[name].tolist()) != value:
            raise ConfigurationError(
                f"its {name} is {stated}, config.json implies {value}: one of them is from another checkpoint"
            )


def _unpack(words: Tensor, num_bits: int) -> Tensor:
    """Integers [rows, columns] of words [rows / integers in a word, columns]."""
    mask, places = 2**num_bits - 1, range(_PER_WORD[num_bits] - 1, -1, -1)
    return torch.cat([(words >> num_bits * place & mask).to(torch.uint8) for place in places])
