"""Scalar functions that LLVM turns into vectors inside loops."""

from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic

from engine.cpu.ir import FLOAT, INT32
from engine.cpu.jit import jit

LOG2_E = np.float32(1.4426950408889634)


@intrinsic
def float_of_bits(typing: Any, bits: Any) -> Any:
    """The fp32 number with these 32 bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], FLOAT)

    return types.float32(types.int32), generate


@intrinsic
def _times_power(typing: Any, value: Any, power: Any) -> Any:
    """value * 2^power for an integral power: added to the exponent's bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.bitcast(args[0], INT32)
        shifted = builder.shl(builder.fptosi(args[1], INT32), INT32(23))
        return builder.bitcast(builder.add(bits, shifted), FLOAT)

    return types.float32(types.float32, types.float32), generate


@jit
def power_of_two(x: Any) -> Any:
    """2^x in fp32, for x up to 126; below -126 it stays at 2^-126. A polynomial for the part in [-0.5, 0.5]."""
    x = min(max(x, np.float32(-126.0)), np.float32(126.0))
    whole = np.floor(x + np.float32(0.5))
    x -= whole
    power = np.float32(1.5353362e-4)
    power = power * x + np.float32(1.3398874e-3)
    power = power * x + np.float32(9.6184370e-3)
    power = power * x + np.float32(5.5503324e-2)
    power = power * x + np.float32(2.4022648e-1)
    power = power * x + np.float32(6.9314720e-1)
    return _times_power(power * x + np.float32(1.0), whole)


@jit
def silu(x: Any) -> Any:
    """x * sigmoid(x)."""
    return x / (np.float32(1.0) + power_of_two(-x * LOG2_E))
