"""Compiled loops over fp32 rows around int8 matrix products: each reads a row once where torch would make five passes.

A quantised row is `scale * (q - 128)`, with q in [128 - levels, 128 + levels] as unsigned bytes, which is what oneDNN
multiplies fastest. The largest magnitude of a row is found by comparing bit patterns as integers, because compilers use
vectors for that and not for floats.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.cpu.jit import jit

ZERO_POINT = 128
_TINY_BITS = int(np.float32(1e-20).view(np.int32))
_Floats = NDArray[np.float32]
_Bytes = NDArray[np.uint8]


@jit
def _quantise_row(row: Any, levels: Any, q: Any) -> Any:
    """Write a row's bytes; returns its scale."""
    bits = row.view(np.int32)
    largest = np.int32(_TINY_BITS)
    for i in range(len(row)):
        magnitude = bits[i] & np.int32(0x7FFFFFFF)
        largest = magnitude if magnitude > largest else largest
    found = np.empty(1, np.int32)
    found[0] = largest
    maximum = found.view(np.float32)[0]
    factor = levels / maximum
    for i in range(len(row)):
        q[i] = np.uint8(np.int32(row[i] * factor + np.float32(ZERO_POINT + 0.5)))
    return maximum / levels


@jit
def quantise(x: _Floats, levels: np.float32, q: _Bytes, scales: _Floats) -> None:
    """x [rows, width] -> q [rows, width], scales [rows]."""
    for r in range(x.shape[0]):
        scales[r] = _quantise_row(x[r], levels, q[r])


@jit
def norm_quantise(
    x: _Floats, weight: _Floats, eps: np.float32, levels: np.float32, out: tuple[_Bytes, _Floats]
) -> None:
    """Root-mean-square norm of the rows of x, quantised to `out`: q [rows, width] and scales [rows]."""
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


@jit
def silu_gate_quantise(gate_up: _Floats, levels: np.float32, q: _Bytes, scales: _Floats) -> None:
    """silu(gate) * up of rows that hold both side by side, quantised: gate_up [rows, 2 * width] -> q [rows, width]."""
    width = gate_up.shape[1] // 2
    inner = np.empty(width, np.float32)
    power = np.empty(width, np.float32)
    power_bits = power.view(np.int32)
    for r in range(gate_up.shape[0]):
        gate, up = gate_up[r, :width], gate_up[r, width:]
        for i in range(width):  # e^-gate = 2^whole * 2^part, as in the attention kernel's softmax
            x = min(max(gate[i] * np.float32(-1.442695041), np.float32(-126.0)), np.float32(126.0))
            whole = np.floor(x + np.float32(0.5))
            x -= whole
            part = np.float32(1.5353362e-4)
            part = part * x + np.float32(1.3398874e-3)
            part = part * x + np.float32(9.6184370e-3)
            part = part * x + np.float32(5.5503324e-2)
            part = part * x + np.float32(2.4022648e-1)
            part = part * x + np.float32(6.9314720e-1)
            inner[i] = part * x + np.float32(1.0)
            power_bits[i] = (np.int32(whole) + np.int32(127)) << np.int32(23)
        for i in range(width):
            inner[i] = gate[i] * up[i] / (np.float32(1.0) + inner[i] * power[i])
        scales[r] = _quantise_row(inner, levels, q[r])


@jit
def scale_rows(x: _Floats, scales: _Floats) -> None:
    """x[r] *= scales[r]."""
    for r in range(x.shape[0]):
        for i in range(x.shape[1]):
            x[r, i] *= scales[r]


@jit
def add_scaled_rows(residual: _Floats, x: _Floats, scales: _Floats) -> None:
    """residual[r] += x[r] * scales[r]."""
    for r in range(x.shape[0]):
        for i in range(x.shape[1]):
            residual[r, i] += x[r, i] * scales[r]
