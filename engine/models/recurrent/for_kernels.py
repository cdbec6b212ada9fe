"""Recurrent layers as the kernels of CPUs take them: their parameters and facts, beside the places of states."""

from collections.abc import Sequence

import numpy as np

from engine.kernels.cpu.arguments import (
    CONV,
    DELTA,
    NO_RECURRENT_WEIGHTS,
    SCAN,
    Floats,
    Recurrent,
    RecurrentWeights,
    ScanFacts,
    StatePlaces,
)
from engine.models.recurrent.config import RecurrentConfig

_KINDS = {"conv": CONV, "delta": DELTA, "scan": SCAN}
"""By the names of RecurrentConfig.kind."""
NO_NUMBERS: Floats = np.empty((1, 0), np.float32)
"""A parameter that a layer does not have."""
_LARGEST = float(np.finfo(np.float32).max)
"""Compiled code takes for granted that numbers are finite."""


def stacked(layers: Sequence[RecurrentWeights]) -> RecurrentWeights:
    """The parameters of several layers."""
    if not layers:
        return NO_RECURRENT_WEIGHTS
    parts: list[Floats] = [np.concatenate(of_layers) for of_layers in zip(*layers, strict=True)]
    return RecurrentWeights(*parts)


def recurrent_layers(
    weights: RecurrentWeights, facts: RecurrentConfig, norm_eps: float, places: StatePlaces
) -> Recurrent:
    """The layers that have these parameters and states."""
    gate_factor, *_, step_factor = facts.scan.factors
    least, most = facts.scan.step_limits
    return Recurrent(
        *weights,
        eps=np.float32(norm_eps),
        kind=_KINDS[facts.kind],
        num_key_heads=facts.num_key_heads,
        key_dim=facts.key_dim,
        value_dim=facts.value_dim,
        scan=ScanFacts(
            gate_factor=np.float32(gate_factor),
            step_factor=np.float32(step_factor),
            least_step=np.float32(min(least, _LARGEST)),
            most_step=np.float32(min(most, _LARGEST)),
            gate_first=facts.scan.norm == "gated",
        ),
        places=places,
    )
