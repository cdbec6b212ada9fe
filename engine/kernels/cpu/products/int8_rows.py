"""Compiled loops over fp32 rows around the int8 products of the eager decoder.

It quantises rows for oneDNN's matrix products. A loop reads a row once; torch would make five passes. A quantised row
is `scale * (q - levels - 1)` with q in [1, 2 * levels + 1] as unsigned bytes, which oneDNN multiplies fastest.
Magnitudes are compared as integer bit patterns, because LLVM vectorises that comparison and not the comparison of
floats.
"""

import numpy as np

from engine.kernels.cpu.arguments import Bytes, Floats
from engine.kernels.cpu.compilation.compiler import entry, jit
from engine.kernels.cpu.compilation.emitter import TINY_BITS


@jit
def _quantise_row(row: Floats, levels: np.float32, q: Bytes) -> np.float32:
    """Quantise a row to q; returns the row's scale."""
    bits = row.view(np.int32)
    largest = np.int32(TINY_BITS)
    for i in range(len(row)):
        magnitude = bits[i] & np.int32(0x7FFFFFFF)
        largest = magnitude if magnitude > largest else largest
    bits_of_largest = np.empty(1, np.int32)
    bits_of_largest[0] = largest
    maximum = bits_of_largest.view(np.float32)[0]
    factor = levels / maximum
    for i in range(len(row)):
        q[i] = np.uint8(np.int32(row[i] * factor + levels + np.float32(1.5)))
    return maximum / levels


@entry
def quantise(x: Floats, levels: np.float32, q: Bytes, scales: Floats) -> None:
    """Quantise x [rows, width] to q [rows, width] with scales [rows]."""
    for r in range(x.shape[0]):
        scales[r] = _quantise_row(x[r], levels, q[r])


@entry
def norm_quantise(x: Floats, weight: Floats, eps: np.float32, levels: np.float32, out: tuple[Bytes, Floats]) -> None:
    """Root-mean-square norm of x [rows, width], quantised. out: q [rows, width] and scales [rows]."""
    q, scales = out
    width = x.shape[1]
    normed = np.empty(width, np.float32)
    for r in range(x.shape[0]):
        row = x[r]
        total = np.float32(0.0)
        for i in range(width):
            total += row[i] * row[i]
            normed[i] = row[i] * weight[i]
        scale = _quantise_row(normed, levels, q[r])
        scales[r] = scale / np.sqrt(total / np.float32(width) + eps)


@entry
def silu_gate_quantise(gate_up: Floats, levels: np.float32, q: Bytes, scales: Floats) -> None:
    """silu(gate) * up, quantised to q [rows, width]. gate_up: [rows, 2 * width], gates before ups."""
    width = gate_up.shape[1] // 2
    inner = np.empty(width, np.float32)
    power = np.empty(width, np.float32)
    power_bits = power.view(np.int32)
    for r in range(gate_up.shape[0]):
        gate, up = gate_up[r, :width], gate_up[r, width:]
        for i in range(width):  # e^-gate = 2^integer * 2^fraction, as in the attention kernel's softmax
            x = min(max(gate[i] * np.float32(-1.442695041), np.float32(-126.0)), np.float32(126.0))
            integer = np.floor(x + np.float32(0.5))
            x -= integer
            fraction = np.float32(1.5353362e-4)
            fraction = fraction * x + np.float32(1.3398874e-3)
            fraction = fraction * x + np.float32(9.6184370e-3)
            fraction = fraction * x + np.float32(5.5503324e-2)
            fraction = fraction * x + np.float32(2.4022648e-1)
            fraction = fraction * x + np.float32(6.9314720e-1)
            inner[i] = fraction * x + np.float32(1.0)
            power_bits[i] = (np.int32(integer) + np.int32(127)) << np.int32(23)
        for i in range(width):
            inner[i] = gate[i] * up[i] / (np.float32(1.0) + inner[i] * power[i])
        scales[r] = _quantise_row(inner, levels, q[r])


@entry
def scale_rows(x: Floats, scales: Floats) -> None:
    """x[r] *= scales[r], in place for every row of x [rows, width]."""
    for r in range(x.shape[0]):
        for i in range(x.shape[1]):
            x[r, i] *= scales[r]


@entry
def add_scaled_rows(residual: Floats, x: Floats, scales: Floats) -> None:
    """residual[r] += x[r] * scales[r]."""
    for r in range(x.shape[0]):
        for i in range(x.shape[1]):
            residual[r, i] += x[r, i] * scales[r]
