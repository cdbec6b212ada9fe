"""AWQ as AutoAWQ's version "gemm" stores it: 4 bits, zeros, matrices [inputs, outputs] packed along outputs.

Word w of a row holds outputs 8w to 8w + 7, the lowest bits first in the order 0 2 4 6 1 3 5 7.
"""

import torch
from torch import Tensor

from engine.quantized_formats.matrix import FLOATS, Part, Parts, QuantizedMatrix, Shape, Tensors, count_groups, unpack
from engine.quantized_formats.storage import MatrixStorage
from mesh.domain.errors import ConfigurationError

_PER_WORD = 8
_PLACES = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
"""Where output i of a word lies in it."""


def parts(storage: MatrixStorage, shape: Shape) -> Parts:
    num_outputs, num_inputs = shape
    if num_outputs % _PER_WORD:
        raise ConfigurationError(f"its {num_outputs} outputs cannot be packed by {_PER_WORD}, as AWQ does")
    num_words, num_groups = num_outputs // _PER_WORD, count_groups(storage, num_inputs)
    return {
        "qweight": Part(("I32",), ((num_inputs, num_words),)),
        "qzeros": Part(("I32",), ((num_groups, num_words),)),
        "scales": Part(FLOATS, ((num_groups, num_outputs),)),
    }


def read(storage: MatrixStorage, shape: Shape, tensors: Tensors) -> QuantizedMatrix:
    values, zeros = _unpack(tensors["qweight"]), _unpack(tensors["qzeros"])
    return QuantizedMatrix(values, tensors["scales"].t().float(), zeros)


def _unpack(packed: Tensor) -> Tensor:
    """int32 [rows, words] -> uint8 [words * 8, rows]."""
    in_order = unpack(packed, 4).view(packed.shape[0], -1, _PER_WORD)[:, :, _PLACES]
    return in_order.flatten(1).t().contiguous()
