"""Random weights, for tests and benchmarks."""

from hashlib import blake2b
from math import prod

import numpy as np
import torch
from torch import Tensor

from engine.models.encodings import Parameters
from engine.models.parameters import ParameterSpec
from engine.weights import Progress, WeightsTarget, held, parameters_of, target_of_table

_STD = 0.02
_DRAWN_AT_ONCE = 2**22


def dummy_weights(
    specs: list[ParameterSpec],
    target: WeightsTarget,
    seed: int = 0,
    on_progress: Progress | None = None,
    own_dtype: torch.dtype = torch.float32,
) -> Parameters:
    """Random parameters that depend on the seed, not on the device: norms are 1, biases and matrices small.
    `own_dtype`: that of a checkpoint's numbers.
    """
    values = (_dummy_values(spec, target_of_table(spec, own_dtype, target), seed) for spec in held(specs))
    return parameters_of(specs, target, values, on_progress)


def _dummy_values(spec: ParameterSpec, target: WeightsTarget, seed: int) -> Tensor:
    """Numbers are drawn for some rows at a time: those of a vocabulary would need twice as much memory as they take."""
    dtype, inputs = target.dtype_of(spec), spec.input_slice
    if spec.is_scale:
        return torch.ones(spec.held_shape, dtype=dtype, device=target.device)
    digest = blake2b(f"{seed}:{spec.name}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    values = torch.empty(spec.held_shape, dtype=dtype, device=target.device)
    rows_at_once = max(1, _DRAWN_AT_ONCE // prod(spec.shape[1:]))
    for first in range(0, spec.shape[0], rows_at_once):
        count = min(rows_at_once, spec.shape[0] - first)
        drawn = torch.empty(count, *spec.shape[1:]).normal_(0.0, _STD, generator=generator)
        if (rows := spec.held_rows) is None:
            values[first : first + count] = drawn[..., inputs]
            continue
        places = np.flatnonzero((rows >= first) & (rows < first + count))
        values[torch.from_numpy(places)] = drawn[torch.from_numpy(rows[places] - first)][..., inputs].to(values)
    return values
