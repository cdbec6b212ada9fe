"""Scalar functions that LLVM turns into vectors inside loops."""

from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic

from engine.cpu.ir import FLOAT

LOG2_E = np.float32(1.4426950408889634)


@intrinsic
def float_of_bits(typing: Any, bits: Any) -> Any:
    """The fp32 number with these 32 bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], FLOAT)

    return types.float32(types.int32), generate
