"""Kinds of numbers of 4 and 8 bits, their levels, and bytes of their panels: see nibbles.py."""

from typing import Any

from numba import extending, types
from numba.core.datamodel import models

from engine.kernels.cpu.machine import (
    CACHE_LINE_BYTES,
    EIGHT_BITS,
    FOUR_BITS,
    HALF_BYTES,
    MXFP4,
    NF4,
    PANEL,
    WITH_MINIMA,
)

_Type: Any = types.Type  # numba does not annotate them
_extending: Any = extending
_OpaqueModel: Any = models.OpaqueModel
KINDS_IN_GROUPS = FOUR_BITS, MXFP4, EIGHT_BITS, NF4, WITH_MINIMA
"""The kinds of numbers whose products nibbles.py writes."""
E2M1_ZERO = 12
E2M1_LEVELS = (12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0)
"""Twice the numbers of e2m1, by their four bits, plus 12."""
NF4_ZERO = 128
NF4_LEVELS = (1, 40, 61, 78, 92, 105, 116, 128, 138, 148, 159, 171, 184, 199, 220, 255)
"""127 times the numbers of NF4, rounded, plus 128."""


class Numbers(_Type):
    """The type of a matrix's numbers for compiled code: a product contains the code of one kind. A model compiles those
    of its matrices.
    """

    def __init__(self, numbers: int) -> None:
        self.numbers = numbers
        super().__init__(f"Numbers.{numbers}")


_extending.register_model(Numbers)(_OpaqueModel)


def bytes_per_input(numbers: int) -> int:
    """Bytes of a panel's weights for one input."""
    return PANEL if numbers == EIGHT_BITS else PANEL // 2


def scales_bytes(numbers: int) -> int:
    """Bytes of the scales and zeros, or minima, of a panel's group."""
    return PANEL * 2 * HALF_BYTES if numbers == WITH_MINIMA else PANEL * (HALF_BYTES + 1)


def panel_bytes(num_groups: int, group_bytes: int, group_scales_bytes: int) -> int:
    """Bytes of a panel, by those of a group's weights, and of its scales."""
    lines = (num_groups * group_scales_bytes + CACHE_LINE_BYTES - 1) // CACHE_LINE_BYTES
    return lines * CACHE_LINE_BYTES + num_groups * group_bytes
