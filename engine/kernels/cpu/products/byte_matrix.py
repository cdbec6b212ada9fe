"""Products with a single matrix of bytes, for layers of the eager decoder on CPUs whose oneDNN is not exact."""

from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
from torch import Tensor

from engine.kernels.cpu.arguments import (
    DEPTH,
    Bytes,
    Floats,
    Operand,
    Part,
)
from engine.kernels.cpu.buffers import round_up
from engine.kernels.cpu.compilation.compiler import entry
from engine.kernels.cpu.machine import PANEL, QUAD, SHORTS_ORDER, TILE_ROWS, UNIT, ZERO_POINT
from engine.kernels.cpu.products.finish import STORE
from engine.kernels.cpu.products.matmul import Target, product, product_code
from engine.kernels.cpu.products.packing import MatrixShape, Packer, operand_dtypes

_product = entry(product)
_NO_AMX: Bytes = np.empty(0, np.uint8)
_MIN_PRODUCTS = 2**22
"""With fewer products of numbers, one thread is as fast as several."""


class ByteMatrix:
    """weight [outputs, inputs] of signed bytes with scales and bias [outputs], packed."""

    def __init__(self, weight: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        self._outputs, self._inputs = weight.shape
        packer = Packer([MatrixShape(self._outputs, self._inputs)], torch.int8)
        packer.put(0, weight, scales=scales, bias=bias)
        self._weights = packer.weights
        self._code = product_code(self._weights)

    def multiply(self, q: Bytes, factors: Floats) -> Floats:
        """factors[row] * (q[row] - ZERO_POINT) @ scaled weight + bias, for bytes [rows, inputs] -> [rows, outputs]."""
        rows, depth = len(q), int(self._weights.matrices[0, DEPTH])
        kind, _ = operand_dtypes(self._weights)
        a = np.empty((rows + TILE_ROWS, depth), kind)
        a[:rows, : self._inputs] = q
        if kind != np.uint8:
            a -= ZERO_POINT
            a = a.reshape(-1, QUAD)[:, SHORTS_ORDER].reshape(a.shape)
        padded = np.empty(rows + TILE_ROWS, np.float32)
        padded[:rows] = factors
        out = np.empty((rows, round_up(self._outputs, PANEL)), np.float32)
        num_parts = torch.get_num_threads() if rows * self._outputs * depth > _MIN_PRODUCTS else 1

        def compute(number: int) -> None:
            sums = np.empty((2 * TILE_ROWS, UNIT), np.int32)
            operand = Operand(a.reshape(-1), padded, sums, _NO_AMX, self._code)
            _product(operand, self._weights, 0, Target(out, STORE), Part(number, num_parts))

        if num_parts == 1:
            compute(0)
        else:
            list(_threads(num_parts).map(compute, range(num_parts)))
        return np.ascontiguousarray(out[:, : self._outputs])


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, "products")
