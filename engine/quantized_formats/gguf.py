"""Blocks of GGUF, the format of llama.cpp, as its ggml-quants.c reads them: a matrix is a tensor of bytes [outputs,
bytes of a row], whose blocks follow each other along inputs.

Blocks of 32 inputs (Q4_0 ... Q8_0) hold a scale in fp16, and Q4_1 and Q5_1 what is added to its multiples. Blocks of
256 ("K") hold a scale of scales in fp16, and small integers for groups of 16 or 32 inputs. Numbers are exact in fp32
but for one rounding where something is taken from the product.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from engine.quantized_formats.gguf_config import GGUF_TYPES
from engine.quantized_formats.matrix import Part, Parts, QuantizedMatrix, Shape, Tensors
from engine.quantized_formats.storage import MatrixStorage
from mesh.domain.errors import ConfigurationError

_NIBBLES, _PAIRS, _BITS = (0, 4), (0, 2, 4, 6), tuple(range(8))
"""Where numbers of 4, 2 and 1 bits begin in a byte."""


def parts(storage: MatrixStorage, shape: Shape) -> Parts:
    (num_outputs, num_inputs), facts = shape, GGUF_TYPES[storage.format]
    if num_inputs % facts.block_inputs:
        raise ConfigurationError(f"blocks of {facts.block_inputs} do not divide its {num_inputs} inputs")
    num_bytes = num_inputs // facts.block_inputs * facts.block_bytes
    return {"weight": Part(("U8",), ((num_outputs, num_bytes),))}


def read(storage: MatrixStorage, shape: Shape, tensors: Tensors) -> QuantizedMatrix:
    blocks = tensors["weight"].view(-1, GGUF_TYPES[storage.format].block_bytes)
    values, scales, minima = _READERS[storage.format](blocks)
    return QuantizedMatrix(
        values.view(shape), scales.view(shape[0], -1), minima=None if minima is None else minima.view(shape[0], -1)
    )


_Numbers = tuple[Tensor, Tensor, Tensor | None]
"""Of blocks: integers [blocks, inputs], scales and minima [blocks, groups]."""


def _q4_0(blocks: Tensor) -> _Numbers:
    return _shifted(_spread(blocks[:, 2:], 16, _NIBBLES), 8), _halves(blocks, 0), None


def _q4_1(blocks: Tensor) -> _Numbers:
    return _spread(blocks[:, 4:], 16, _NIBBLES), _halves(blocks, 0), -_halves(blocks, 2)


def _q5_0(blocks: Tensor) -> _Numbers:
    return _shifted(_fives(blocks[:, 2:]), 16), _halves(blocks, 0), None


def _q5_1(blocks: Tensor) -> _Numbers:
    return _fives(blocks[:, 4:]), _halves(blocks, 0), -_halves(blocks, 2)


def _fives(octets: Tensor) -> Tensor:
    """Numbers whose fifth bits lie in four bytes before their low ones."""
    return _spread(octets[:, 4:], 16, _NIBBLES) | _spread(octets[:, :4], 1, _BITS) << 4


def _q8_0(blocks: Tensor) -> _Numbers:
    return blocks[:, 2:].contiguous().view(torch.int8), _halves(blocks, 0), None


def _q2_k(blocks: Tensor) -> _Numbers:
    scales = _spread(blocks[:, :16].contiguous(), 16, _NIBBLES).view(-1, 2, 16)
    values = _spread(blocks[:, 16:80], 32, _PAIRS)
    return values, _halves(blocks, 80) * scales[:, 0], _halves(blocks, 82) * scales[:, 1]


def _q3_k(blocks: Tensor) -> _Numbers:
    values = _spread(blocks[:, 32:96], 32, _PAIRS) | _spread(blocks[:, :32], 32, _BITS) << 2
    scales = _spread(blocks[:, 96:104], 8, _NIBBLES) | _spread(blocks[:, 104:108], 4, _PAIRS) << 4
    return _shifted(values, 4), _halves(blocks, 108) * _shifted(scales, 32), None


def _q4_k(blocks: Tensor) -> _Numbers:
    return _spread(blocks[:, 16:], 32, _NIBBLES), *_scales_and_minima(blocks)


def _q5_k(blocks: Tensor) -> _Numbers:
    values = _spread(blocks[:, 48:], 32, _NIBBLES) | _spread(blocks[:, 16:48], 32, _BITS) << 4
    return values, *_scales_and_minima(blocks)


def _q6_k(blocks: Tensor) -> _Numbers:
    values = _spread(blocks[:, :128], 64, _NIBBLES) | _spread(blocks[:, 128:192], 32, _PAIRS) << 4
    return _shifted(values, 32), _halves(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8), None


_READERS: Mapping[str, Callable[[Tensor], _Numbers]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Of Q4_K and Q5_K: 6 bits each for 8 groups, the upper two bits of the last four beside the first four."""
    first, second, both = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((first & 63, both & 15 | first >> 2 & 48), 1)
    minima = torch.cat((second & 63, both >> 4 | second >> 2 & 48), 1)
    return _halves(blocks, 0) * scales, _halves(blocks, 2) * minima


def _halves(blocks: Tensor, at: int) -> Tensor:
    """The number in fp16 at this byte of each block, fp32 [blocks, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _spread(octets: Tensor, width: int, shifts: tuple[int, ...]) -> Tensor:
    """uint8 [blocks, bytes] -> [blocks, numbers]. Of `width` bytes that follow each other, first the numbers at the
    first shift, then those at the next.
    """
    bits, places = 8 // len(shifts), torch.tensor(shifts, dtype=torch.uint8)[:, None]
    return (octets.reshape(len(octets), -1, 1, width) >> places & (1 << bits) - 1).flatten(1)


def _shifted(values: Tensor, middle: int) -> Tensor:
    """uint8 below 128 -> int8, `middle` less."""
    return values.view(torch.int8) - middle
