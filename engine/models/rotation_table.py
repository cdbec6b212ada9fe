"""RotationTable: the rotations of a step's tokens, as the kernels take them."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.attention.backend import ForwardMetadata
from engine.kernels.cpu.arguments import NO_ROTATIONS, Floats, KernelRotations
from engine.models.rope import RotaryEmbedding, Rotation

_MAX_POSITIONS = 8192
"""Of the table, which has up to 8 MiB for each kind of layers with heads of 128. Attention to more takes far longer
than the rotation of a token.
"""


class RotationTable:
    """For each of `ropes` (see `ropes_of`). The rotations of the first positions are computed once, unless they depend
    on the lengths of sequences; those of other steps in the step.
    """

    def __init__(self, ropes: Sequence[RotaryEmbedding], num_positions: int) -> None:
        self._ropes = ropes
        uses_lengths = any(rope.uses_lengths for rope in ropes)
        positions = torch.arange(0 if uses_lengths else min(num_positions, _MAX_POSITIONS))
        self._first = self._computed(positions, positions)

    def of_step(self, metadata: ForwardMetadata) -> KernelRotations:
        if max(metadata.max_decode_context, metadata.max_chunk_context) <= self._first.cos.shape[1]:
            return self._first._replace(rows=metadata.positions.numpy())
        return self._computed(metadata.positions, metadata.rope_lengths)

    def _computed(self, positions: Tensor, lengths: Tensor) -> KernelRotations:
        if not self._ropes:
            return NO_ROTATIONS
        computed = [rope.rotation(positions, lengths) for rope in self._ropes]
        cos, sin = _padded([each.cos for each in computed]), _padded([each.sin for each in computed])
        rows = np.arange(len(positions))
        return KernelRotations(rows, cos, sin, _query_factors(computed, len(positions)))


def _query_factors(rotations: Sequence[Rotation], num_tokens: int) -> Floats:
    if all(each.query_factors is None for each in rotations):
        return NO_ROTATIONS.query_factors
    ones = torch.ones(num_tokens)
    factors = [ones if each.query_factors is None else each.query_factors.flatten() for each in rotations]
    stacked: Floats = torch.stack(factors).numpy()
    return stacked


def _padded(factors: Sequence[Tensor]) -> Floats:
    """Stack factors [num_tokens, 1, width] to [factors, num_tokens, width], padded to the widest."""
    padded = np.zeros((len(factors), len(factors[0]), max(each.shape[2] for each in factors)), np.float32)
    for row, each in zip(padded, factors, strict=True):
        row[:, : each.shape[2]] = each[:, 0].numpy()
    return padded
