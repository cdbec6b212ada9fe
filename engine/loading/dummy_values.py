"""Random weights, for tests and benchmarks."""

from hashlib import blake2b
from math import prod

import numpy as np
import torch
from torch import Tensor

from engine.models.parameters import ParameterSpec

_STD = 0.02
_MAX_DRAWN = 2**22


def dummy_values(spec: ParameterSpec, dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    """Numbers that depend on the seed, not on the device: norms are 1, biases and matrices small.

    After _MAX_DRAWN numbers the same rows are repeated, shifted by a column: drawing each number would take longer than
    packing it, and drawing those of a vocabulary at once would take twice the memory.
    """
    if spec.is_scale:
        return torch.ones(spec.held_shape, dtype=dtype, device=device)
    digest = blake2b(f"{seed}:{spec.name}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    rows_at_once = max(1, _MAX_DRAWN // prod(spec.shape[1:]))
    drawn = torch.empty(min(rows_at_once, spec.shape[0]), *spec.shape[1:]).normal_(0.0, _STD, generator=generator)
    values = torch.empty(spec.held_shape, dtype=dtype, device=device)
    for number, first in enumerate(range(0, spec.shape[0], rows_at_once)):
        numbers = drawn[: spec.shape[0] - first].roll(number, -1)[..., spec.input_slice]
        if (rows := spec.held_rows) is None:
            values[first : first + len(numbers)] = numbers
            continue
        places = np.flatnonzero((rows >= first) & (rows < first + len(numbers)))
        values[torch.from_numpy(places)] = numbers[torch.from_numpy(rows[places] - first)].to(values)
    return values
