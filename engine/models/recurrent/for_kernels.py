"""Recurrent layers as the kernels of CPUs take them: their parameters and facts, beside the places of states."""

from collections.abc import Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.kernels.cpu.arguments import Address, Floats
from engine.kernels.cpu.buffers import aligned
from engine.kernels.cpu.machine import PANEL
from engine.kernels.cpu.recurrent.recurrent_arguments import (
    CHANNELS,
    CONV,
    DELTA,
    NO_RECURRENT_WEIGHTS,
    SCAN,
    Recurrent,
    RecurrentWeights,
    ScanFacts,
    StatePlaces,
)
from engine.models.recurrent.config import RecurrentConfig

KINDS = {"conv": CONV, "delta": DELTA, "scan": SCAN, "channels": CHANNELS}
"""By the names of RecurrentConfig.kind."""
NO_NUMBERS: Floats = np.empty((1, 0), np.float32)
"""A parameter that a layer does not have."""
_LARGEST = float(np.finfo(np.float32).max)
"""Compiled code takes for granted that numbers are finite."""


def stacked(layers: Sequence[RecurrentWeights]) -> RecurrentWeights:
    """The parameters of several layers."""
    if not layers:
        return NO_RECURRENT_WEIGHTS
    return RecurrentWeights(*(_stacked(of_layers) for of_layers in zip(*layers, strict=True)))


def _stacked(arrays: Sequence[Floats]) -> Floats:
    shape = (sum(map(len, arrays)), *arrays[0].shape[1:])
    stacked: Floats = aligned(prod(shape), np.float32).reshape(shape)
    return np.concatenate(arrays, out=stacked)


def in_panels(matrix: Tensor) -> Floats:
    """[outputs, inputs] -> [1, panels * inputs * 16], panels behind each other."""
    padded = F.pad(matrix.to(torch.float32), (0, 0, 0, -len(matrix) % PANEL))
    panels: Floats = aligned(padded.numel(), np.float32).reshape(1, -1)
    torch.from_numpy(panels).view(-1, matrix.shape[1], PANEL).copy_(padded.view(-1, PANEL, matrix.shape[1]).mT)
    return panels


def recurrent_layers(
    weights: RecurrentWeights, facts: RecurrentConfig, norm_eps: float, places: StatePlaces, multiply: Address
) -> Recurrent:
    """The layers that have these parameters and states. multiply: `recurrence.multiply_address`."""
    gate_factor, *_, step_factor = facts.scan.factors
    least, most = facts.scan.step_limits
    is_of_channels = facts.kind == "channels"
    return Recurrent(
        *weights,
        eps=np.float32(facts.channel_scan.norm_eps if is_of_channels else norm_eps),
        kind=KINDS[facts.kind],
        num_key_heads=facts.num_key_heads,
        key_dim=facts.key_dim,
        value_dim=facts.value_dim,
        step_rank=facts.channel_scan.step_rank,
        scan=ScanFacts(
            gate_factor=np.float32(gate_factor),
            step_factor=np.float32(step_factor),
            least_step=np.float32(min(least, _LARGEST)),
            most_step=np.float32(min(most, _LARGEST)),
            gate_first=facts.scan.norm == "gated",
        ),
        places=places,
        multiply=multiply,
    )
