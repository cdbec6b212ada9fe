"""Numbers of 4 bits (e2m1), two in a byte, the first in its lower bits. Twice such a number is an integer."""

import torch

from engine.kernels.cpu.products.nibble_numbers import E2M1_LEVELS, E2M1_ZERO

_DOUBLED = torch.tensor(E2M1_LEVELS, dtype=torch.int8) - E2M1_ZERO
_NUMBERS = torch.zeros(2 * E2M1_ZERO + 1, dtype=torch.uint8)
_NUMBERS[list(E2M1_LEVELS)] = torch.arange(len(E2M1_LEVELS), dtype=torch.uint8)


def doubled(packed: torch.Tensor) -> torch.Tensor:
    """Twice the numbers: uint8 [rows, bytes] -> int8 [rows, bytes * 2]."""
    values = torch.empty(packed.shape[0], packed.shape[1] * 2, dtype=torch.int8)
    values[:, 0::2], values[:, 1::2] = _DOUBLED[(packed & 15).int()], _DOUBLED[(packed >> 4).int()]
    return values


def levels_of(values: torch.Tensor) -> torch.Tensor:
    """The numbers of their levels, uint8, of values that `doubled` has made."""
    return _NUMBERS[values.int() + E2M1_ZERO]
