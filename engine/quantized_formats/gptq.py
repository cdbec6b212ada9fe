"""GPTQ as AutoGPTQ and GPTQModel store it: matrices [inputs, outputs] packed along inputs, zeros along outputs.

Version 1 stores zeros minus 1, version 2 ("gptq_v2") as they are. 32 integers of 3 bits take 3 words. With desc_act,
`g_idx` has the group of each input: the inputs of a group are not neighbours, so the matrix is never cut by groups.
"""

from math import gcd

from torch import Tensor

from engine.quantized_formats.matrix import (
    FLOATS,
    Part,
    Parts,
    QuantizedMatrix,
    Shape,
    Tensors,
    count_groups,
    read_groups,
    unpack,
)
from engine.quantized_formats.storage import MatrixStorage
from mesh.domain.errors import ConfigurationError


def parts(storage: MatrixStorage, shape: Shape) -> Parts:
    num_outputs, num_inputs = shape
    num_bits, num_groups = storage.num_bits, count_groups(storage, num_inputs)
    together = 32 // gcd(32, num_bits)  # so many end where a word ends
    if num_inputs % together or num_outputs % together:
        raise ConfigurationError(
            f"its {num_inputs} inputs and {num_outputs} outputs cannot be packed by {together}, as GPTQ does"
        )
    return {
        "qweight": Part(("I32",), ((num_inputs * num_bits // 32, num_outputs),)),
        "qzeros": Part(("I32",), ((num_groups, num_outputs * num_bits // 32),)),
        "scales": Part(FLOATS, ((num_groups, num_outputs),)),
        "g_idx": Part(("I32",), ((num_inputs,),), is_optional=not storage.has_group_index),
    }


def read(storage: MatrixStorage, shape: Shape, tensors: Tensors) -> QuantizedMatrix:
    packed_zeros, is_whole = tensors["qzeros"], storage.num_bits != 3
    if storage.zeros_minus_one and is_whole:
        # GPTQModel takes 1 from all numbers of a word by one subtraction, whose borrows this addition undoes.
        packed_zeros = packed_zeros + 0xFFFFFFFF // (2**storage.num_bits - 1)
    values = unpack(tensors["qweight"].t(), storage.num_bits)
    zeros = unpack(packed_zeros, storage.num_bits).t()
    if storage.zeros_minus_one and not is_whole:
        zeros = zeros + 1 & 7  # each by itself, as some lie in two words
    if storage.is_symmetric:
        _require_version(storage, zeros)
    scales = tensors["scales"].t().float()
    return QuantizedMatrix(values, scales, zeros, read_groups(tensors.get("g_idx"), scales.shape[1]))


def _require_version(storage: MatrixStorage, zeros: Tensor) -> None:
    """Raise ConfigurationError if all zeros are next to the middle, where those of a symmetric matrix are: then they
    are stored as in the other version.
    """
    middle = 2 ** (storage.num_bits - 1)
    if (other := int(zeros[0, 0])) in (middle - 1, middle + 1) and bool((zeros == other).all()):
        version = "gptq_v2" if storage.zeros_minus_one else "gptq"
        raise ConfigurationError(
            f"its zeros are {other}, where config.json implies {middle} (sym): the checkpoint is in the other version "
            f'of the format; set checkpoint_format to "{version}"'
        )
